"""The commands and their arguments, declared without importing the commands' modules.

Importing torch takes a second; help and usage errors need not wait for it.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensorstow.measure.known_models import KNOWN

DTYPES = ("fp32", "bf16", "fp16")
"""Names that `tensorstow plan` uses for the dtypes of a model's parameters."""
_JSON_BY_RANK = "one JSON object, or a list of them by rank,"
_EXAMPLES = {
    "doctor": """\
examples:
  tensorstow doctor                    the kernel, and where states may go
  tensorstow doctor /nvme              this directory too
  tensorstow doctor --json             for a bug report
""",
    "calibrate": """\
examples:
  tensorstow calibrate /nvme           memory, cores, an accelerator, and this directory's disk
  tensorstow calibrate /nvme --json    the profile, for `tensorstow plan --profile`
""",
    "plan": """\
examples:
  tensorstow plan llama-3-8b --device 24GiB --host 64GiB --disk 1TiB   bytes by tier
  tensorstow plan llama-3-8b --host 64GiB --batch 1 --seq 2048         activations and seconds too
  tensorstow plan mine:make_model --host 16GiB                         your own: returns a module,
                                                                       or (module, (batch,))
  tensorstow plan gpt2 --json | jq .plan                               for a script
""",
    "verify": """\
examples:
  tensorstow verify /nvme                    a small transformer
  tensorstow verify /nvme --model gpt2       GPT-2, cut to two layers
  tensorstow verify --model mine:make_model  your own: returns a module, or (module, (batch,))
  tensorstow verify --json | jq .is_equal

exit status: 0, all bits are equal; 1, they are not; 2, it could not be carried out
""",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `tensorstow`."""

    name: str
    summary: str
    module: str
    """Module whose ``run`` is called with the parsed arguments."""
    declare_own: Callable[[argparse.ArgumentParser], None]
    """Function that declares the options of this command only."""
    json: str = "one JSON object"
    """What ``--json`` prints."""

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command, and its examples."""
        parser.epilog = _EXAMPLES.get(self.name)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        self.declare_own(parser)
        parser.add_argument("--json", action="store_true", help=f"print {self.json} instead")


def _doctor(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow doctor`."""
    parser.add_argument(
        "named", metavar="DIR", nargs="*", default=[], help="look at these directories too"
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        action="append",
        default=[],
        help="the same; may be given several times",
    )
    parser.add_argument(
        "--local-ranks",
        metavar="N",
        type=int,
        help="show how N ranks on this machine share it (default: LOCAL_WORLD_SIZE, or 1)",
    )


def _calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow calibrate`."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        type=Path,
        help="a directory that states are to be in (default: the one that scratch files go to)",
    )


def _plan(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow plan`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a configuration of transformers (file or folder), module:function that"
        " returns a module, or a module and the arguments of its forward, or one of"
        f" {', '.join(KNOWN)}",
    )
    for tier, help_text in (
        ("device", "an accelerator's memory for each rank; 0: the CPU computes (default: 0)"),
        ("host", "host memory for each rank, such as 64GiB (default: no limit)"),
        ("disk", "disk space for each rank (default: no limit)"),
    ):
        parser.add_argument(f"--{tier}", metavar="SIZE", help=help_text)
    parser.add_argument(
        "--world-size", metavar="N", type=int, default=1, help="ranks that share the model"
    )
    parser.add_argument(
        "--accumulation-steps",
        metavar="N",
        type=_steps,
        default=1,
        help="micro-batches of a step (default: 1); auto: as many as are best, --batch in all",
    )
    parser.add_argument(
        "--allow-inexact",
        action="store_true",
        help="states may be in bf16 or int8 too, which round: other results than with fp32",
    )
    parser.add_argument("--batch", metavar="B", type=int, help="sequences of a micro-batch")
    parser.add_argument("--seq", metavar="S", type=int, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=DTYPES, help="of parameters (default: the model's own)")
    parser.add_argument(
        "--commits", action="store_true", help="the run commits: what commits take of the disk too"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        type=Path,
        help="rates, as `tensorstow calibrate --json` prints them (default: this machine's)",
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        help="where states on disk are to be, which was measured (default: the fastest measured)",
    )
    parser.add_argument(
        "--tbw",
        metavar="SIZE",
        help="bytes that a drive may be written, such as 600TB: its lifetime",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with tiers and timeline, too"
    )


def _verify(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow verify`."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="where states on disk go; nothing is left there (default: the first real disk among"
        " the usual places)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a configuration of transformers (file or folder), or one of"
        f" {', '.join(KNOWN)}: cut to two narrow layers; or module:function, as it is"
        " (default: a small transformer)",
    )
    parser.add_argument(
        "--device", help="where the model computes (default: the accelerator, else cpu)"
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow inspect`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the store's first directory")


def _scrub(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow scrub`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the store's first directory")
    parser.add_argument(
        "--generation",
        metavar="NAME",
        help="read this one only: a snapshot's name or a number (default: all that are kept)",
    )


def _recover(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow recover`."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="the store's directories, all of them, in their order",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="go on from what is whole if that loses nothing; without this, only print what",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on from what is whole, though steps or snapshots are lost",
    )


def _clean(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tensorstow clean`."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="the store's directories, the first one first: no other is changed",
    )
    parser.add_argument(
        "--yes", action="store_true", help="remove it; without this, only print what"
    )


def _steps(text: str) -> int | None:
    """Return a number of micro-batches; None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} was given: it is a number, at least 1, or auto"
        raise argparse.ArgumentTypeError(message) from None


COMMANDS = (
    Command(
        "doctor",
        "print what this machine gives: kernel, I/O backend, directories",
        "tensorstow.cli.doctor",
        _doctor,
    ),
    Command(
        "calibrate",
        "measure this machine's memory, disks, kernels and link",
        "tensorstow.cli.calibrate",
        _calibrate,
        "the profile as JSON, which `plan --profile` reads,",
    ),
    Command(
        "plan",
        "print what a run of a model will hold, before anything is allocated",
        "tensorstow.cli.plan",
        _plan,
    ),
    Command(
        "verify",
        "compare training with states in memory and on disk, bit for bit",
        "tensorstow.cli.verify.run",
        _verify,
    ),
    Command(
        "inspect",
        "print what a store has in it, also while its run is live",
        "tensorstow.cli.inspect",
        _inspect,
        _JSON_BY_RANK,
    ),
    Command(
        "scrub",
        "read back all that a store keeps and report damage",
        "tensorstow.cli.scrub",
        _scrub,
        _JSON_BY_RANK,
    ),
    Command(
        "recover",
        "read a store, and make its manifest anew of what is whole",
        "tensorstow.cli.recover",
        _recover,
        _JSON_BY_RANK,
    ),
    Command(
        "clean",
        "remove a dead run's store, and nothing that is not its own",
        "tensorstow.cli.clean",
        _clean,
        _JSON_BY_RANK,
    ),
)
