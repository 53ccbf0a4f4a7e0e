"""The command `tensorstow`: parses arguments, runs a subcommand, prints errors.

Exit statuses: 0; 1, something was found: damage, an unusable directory, results that differ; 2, the
request cannot be carried out; 130, interrupted; 141, the reader of the output has closed it (``|
head``), as the shell reports for SIGPIPE.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tensorstow.base.errors import StowError
from tensorstow.cli import calibrate, clean, doctor, inspect, plan, recover, scrub
from tensorstow.cli.demo import run as demo
from tensorstow.cli.output import drop_output
from tensorstow.cli.verify import run as verify

USAGE_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="tensorstow",
        description="Parameters, gradients and optimizer states over device, RAM and disk.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"tensorstow {version('tensorstow')}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module, summary in (
        ("demo", demo, "train GPT-2 with and without offload and show what it costs"),
        ("doctor", doctor, "print what this machine gives: kernel, I/O backend, directories"),
        ("calibrate", calibrate, "measure this machine's memory, disks, kernels and link"),
        ("plan", plan, "print what a run of a model will hold, before anything is allocated"),
        ("verify", verify, "compare training with states in memory and on disk, bit for bit"),
        ("inspect", inspect, "print what a store has in it, also while its run is live"),
        ("scrub", scrub, "read back all that a store keeps and say what is damaged"),
        ("recover", recover, "make a damaged manifest anew, of what in it is whole"),
        ("clean", clean, "remove a dead run's store, and nothing that is not its own"),
    ):
        command = commands.add_parser(
            name, help=summary, description=f"{summary}.".capitalize(), allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given, strange = make_parser().parse_known_args(arguments)
    if strange:  # argparse would print the usage of the whole command
        given.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    try:
        status: int = given.run(given)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can still be reported
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except StowError as error:
        print(f"tensorstow: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("tensorstow: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
