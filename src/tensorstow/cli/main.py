"""The command `tensorstow`: parses arguments, runs a subcommand, prints errors.

Exit statuses: 0; 1, something was found: damage, an unusable directory, results that differ; 2, the
request cannot be carried out; 130, interrupted; 143, terminated, and 129, the terminal was closed;
141, the reader of the output has closed it (``| head``), as the shell reports for SIGPIPE.

An error is a line on standard error. With ``--json`` it is an object on standard output, too:
``{"error": {"type": "OptionError", "message": ...}}``.
"""

import argparse
import atexit
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import NoReturn, TextIO

from tensorstow.base.errors import StowError
from tensorstow.cli.arguments import COMMANDS
from tensorstow.cli.collector import collector_paused

USAGE_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_NEGATIVE = re.compile(r"-\d")


class Terminated(BaseException):
    """A signal asked the process to end: raised in the main thread, as Ctrl-C is."""

    def __init__(self, number: int) -> None:
        """Keep the signal's number."""
        super().__init__(signal.strsignal(number))
        self.status = 128 + number


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
    for each in COMMANDS:
        command = commands.add_parser(
            each.name,
            help=each.summary,
            description=f"{each.summary[0].upper()}{each.summary[1:]}.",
            allow_abbrev=False,
        )
        each.declare(command)
        command.set_defaults(module=each.module, parser=command)
    return parser


def run_and_exit() -> NoReturn:
    """Run the command that this process was started for, and end the process.

    Python would take apart each of the million objects that torch and transformers have made, which
    takes most of a second: once everything is written and closed, the system frees memory sooner.
    """
    status = main()
    if threading.active_count() > 1:  # Python waits for them
        sys.exit(status)
    atexit._run_exitfuncs()  # noqa: SLF001  # Python's own way to call them
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = argparse.Namespace()
    try:
        given = _parse(arguments)
        with _terminations_raised():
            with collector_paused():
                module = import_module(given.module)
            status: int = module.run(given)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can still be reported
    except BrokenPipeError:
        _drop(sys.stdout)
        return PIPE_CLOSED
    except StowError as error:
        _print_error(given, type(error).__name__, str(error))
        return USAGE_ERROR
    except KeyboardInterrupt:  # while what a command needs is being imported, too
        _print_error(given, "KeyboardInterrupt", "interrupted")
        return INTERRUPTED
    except Terminated as ended:
        _print_error(given, "Terminated", str(ended).lower())
        return ended.status
    return status


@contextmanager
def _terminations_raised() -> Iterator[None]:
    """Raise ``Terminated`` for a signal that would end the process before it removes its files."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Terminated(number)

    replaced = []
    if threading.current_thread() is threading.main_thread():
        # nohup has them ignored, and who calls main() may handle them.
        replaced = [each for each in _ENDING if signal.getsignal(each) is signal.SIG_DFL]
    for each in replaced:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in replaced:
            signal.signal(each, signal.SIG_DFL)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    given, strange = make_parser().parse_known_args(_with_negative_values(words))
    if strange:  # argparse would print the usage of the whole command
        given.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    return given


def _with_negative_values(words: Sequence[str]) -> list[str]:
    """Return words with ``--host -5GiB`` as ``--host=-5GiB``: argparse takes it for an option."""
    found: list[str] = []
    for word in words:
        if found and _NEGATIVE.match(word) and re.fullmatch(r"--[a-z][a-z-]*", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _print_error(given: argparse.Namespace, kind: str, message: str) -> None:
    """Print an error for people, and with ``--json`` for the program that reads the output, too."""
    _tell(sys.stderr, f"tensorstow: {message}")
    if getattr(given, "json", False):
        error = {"error": {"type": kind, "message": message}}
        _tell(sys.stdout, json.dumps(error, indent=2))


def _tell(stream: TextIO | None, text: str) -> None:
    """Print a line, unless nobody reads it."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    """Discard what was not written yet, and what will be."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


if __name__ == "__main__":
    run_and_exit()
