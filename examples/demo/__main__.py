"""The demo's command line: `python examples/demo --help`."""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a folder, which Python puts on the path in place of its parent
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from demo.configurations import TURN_STEPS
from tensorstow.cli.main import run_and_exit

_EXAMPLES = """\
examples:
  python examples/demo                GPT-2 in memory, and with its states on disk
  python examples/demo --gemini       the table of ColossalAI's Gemini example
  python examples/demo --out figures  report, timeline and memory go there
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the demo's arguments."""
    parser = argparse.ArgumentParser(
        prog="examples/demo",
        description="Train GPT-2 with and without offload and show what it costs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="put the scratch files here (default: the first real disk among the usual places)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("tensorstow-demo"),
        help="write plots, report and event log here (default: ./%(default)s)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=2 * TURN_STEPS,
        help=f"training steps per configuration, in turns of {TURN_STEPS} (default: %(default)s)",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="a toy model: about a minute on two idle cores, most of it to start ten processes",
    )
    parser.add_argument(
        "--gemini",
        action="store_true",
        help="make the table of ColossalAI's Gemini example instead (3 steps, no files)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(module="demo.run", parser=parser)
    return parser


if __name__ == "__main__":
    run_and_exit(make_parser())
