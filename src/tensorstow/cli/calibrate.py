"""`tensorstow calibrate`: measure this machine's rates, for `plan`, `doctor` and plan="auto"."""

import argparse
import os
from collections.abc import Iterator

from tensorstow.base.cores import process_cores
from tensorstow.base.directories import choose_directory
from tensorstow.base.profile import Profile, read_profile, write_profile
from tensorstow.base.sizes import format_bytes
from tensorstow.cli.output import format_rate, make_console, print_facts, print_json, print_line
from tensorstow.measure.calibration import calibrate

_LABEL_COLUMNS = 16
_BUSY = 0.5
"""Share of the cores: if other processes use more, the measured rates are too low."""


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    load = os.getloadavg()[0] / process_cores()  # before measuring, which is a load itself
    console = make_console(to_stderr=True)
    console.quiet = not console.is_terminal
    with console.status("measuring") as status:
        directories = options.directories or [choose_directory().path]
        profile = calibrate(directories, lambda subject: status.update(f"measuring: {subject}"))
    console.quiet = False
    earlier = read_profile()
    measured_before = {} if earlier is None else earlier.directories
    path = write_profile(profile.but(directories={**measured_before, **profile.directories}))
    if options.json:
        print_json(profile.as_dict())
    else:
        print_profile(profile)
        print_line(make_console(), f"\nkept in {path}")
    if load > _BUSY:
        message = (
            f"warning: other processes used {load:.0%} of the cores in the last minute; measure"
            " again when the machine is idle"
        )
        print_line(console, message)
    return 0


def print_profile(profile: Profile) -> None:
    """Print the rates of a machine."""
    console = make_console()
    print_facts(console, list(_lines(profile)), _LABEL_COLUMNS)
    for path, rates in profile.directories.items():
        console.print()
        print_line(console, path, "bold")
        facts = [
            ("  read", format_rate(rates.read)),
            ("  write", format_rate(rates.write)),
            ("  both at once", format_rate(rates.mixed)),
            ("  best requests", f"{format_bytes(rates.block_bytes)}, {rates.depth} under way"),
            ("  verdict", rates.verdict),
        ]
        print_facts(console, facts, _LABEL_COLUMNS)


def _lines(profile: Profile) -> Iterator[tuple[str, str]]:
    memory = (
        f"read {format_rate(profile.memory_read)}, write {format_rate(profile.memory_write)},"
        f" copy {format_rate(profile.memory_copy)} (both ways together)"
    )
    yield "host memory", memory
    yield "", f"checksums {format_rate(profile.checksums)}"
    for label, rates_by_key, place in (
        ("updates", profile.update, ""),
        ("updates there", profile.device_update, ", on the accelerator"),
    ):
        for number, (key, rate) in enumerate(rates_by_key.items()):
            dtype, state_format = key.split("/")
            speed = f"{rate / 1e6:,.0f} million {dtype} parameters/s, states in {state_format}"
            yield "" if number else label, speed + place
    for kind, rates in profile.compute.items():
        flops = (f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in rates.flops.items())
        yield f"compute, {kind}", ", ".join(flops)
        call_time = f"{1e6 * rates.call_seconds:.1f} us for each operation"
        random = f"{rates.random_elements / 1e6:,.0f} million random numbers/s"
        yield "", f"elementwise {format_rate(rates.tensor_bytes)}, {call_time}, {random}"
    if profile.link is not None:
        up, down, both = profile.link.up, profile.link.down, profile.link.both
        yield (
            "link",
            f"up {format_rate(up)}, down {format_rate(down)}, both ways {format_rate(both)}",
        )
