"""The command `tensorstow`: reads arguments, calls what they name, prints errors in one piece."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tensorstow.base.errors import StowError
from tensorstow.cli import clean, doctor, inspect, scrub
from tensorstow.cli.demo import run as demo

USAGE_ERROR = 2
INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="tensorstow",
        description="Optimizer states over RAM and disk, exact to the bit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"tensorstow {version('tensorstow')}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module, summary in (
        ("demo", demo, "train GPT-2 with and without offload and show what it costs"),
        ("doctor", doctor, "print what this machine gives: kernel, I/O backend, directories"),
        ("inspect", inspect, "print what a store has in it, also while its run is live"),
        ("scrub", scrub, "read back all that a store keeps and say what is damaged"),
        ("clean", clean, "remove a dead run's store, and nothing that is not its own"),
    ):
        command = commands.add_parser(
            name, help=summary, description=f"{summary}.".capitalize(), allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = make_parser().parse_args(arguments)
    try:
        status: int = given.run(given)
    except StowError as error:
        print(f"tensorstow: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("tensorstow: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
