"""The command `tensorstow`: parses arguments, runs a subcommand, prints errors.

Exit statuses: 0, success; 1, the command reports damage, an unusable directory or results that
differ; 2, the request cannot be carried out; 130, interrupted; 143, terminated; 129, the terminal
was closed; 141, the reader of the output closed it (``| head``), as shells report for SIGPIPE.

An error is a line on standard error. With ``--json`` it is also an object on standard output:
``{"error": {"type": "OptionError", "message": ...}}``.
"""

import argparse
import atexit
import io
import itertools
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
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        command.declare(subparser)
        subparser.set_defaults(module=command.module, parser=subparser)
    return parser


def run_and_exit(parser: argparse.ArgumentParser | None = None) -> NoReturn:
    """Run the command that this process was started for, and end the process.

    Python would deallocate each of the million objects that torch and transformers have created,
    which takes most of a second. Once everything is written and closed, exiting at once is faster.
    """
    status = main(parser=parser)
    if threading.active_count() > 1:  # Python waits for them
        sys.exit(status)
    atexit._run_exitfuncs()  # noqa: SLF001  # Python's own way to call them
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def main(
    arguments: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None
) -> int:
    """Run the command; return its exit status.

    Args:
        arguments: The words after the command's name. Default: None, those of this process.
        parser: Parser of another program. It sets ``module``, whose ``run`` is called, and
            ``parser``. Default: None, the parser of `tensorstow`.
    """
    options = argparse.Namespace()
    for stream in (sys.stdout, sys.stderr):  # file names may be invalid in the encoding
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parse(make_parser() if parser is None else parser, arguments)
        with _terminations_raised():
            with collector_paused():
                module = import_module(options.module)
            status: int = module.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can still be reported
    except BrokenPipeError:
        _drop(sys.stdout)
        return PIPE_CLOSED
    except StowError as error:
        _print_error(options, type(error).__name__, str(error))
        return USAGE_ERROR
    except KeyboardInterrupt:  # also during the import of the command's module
        _print_error(options, "KeyboardInterrupt", "interrupted")
        return INTERRUPTED
    except Terminated as ended:
        _print_error(options, "Terminated", str(ended).lower())
        return ended.status
    return status


@contextmanager
def _terminations_raised() -> Iterator[None]:
    """Raise ``Terminated`` for a signal that would end the process before it removes its files."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Terminated(number)

    replaced = []
    if threading.current_thread() is threading.main_thread():
        # nohup ignores them, and the caller of main() may handle them.
        replaced = [
            signal_number
            for signal_number in _ENDING
            if signal.getsignal(signal_number) is signal.SIG_DFL
        ]
    for signal_number in replaced:
        signal.signal(signal_number, end)
    try:
        yield
    finally:
        for signal_number in replaced:
            signal.signal(signal_number, signal.SIG_DFL)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    options, unrecognized = parser.parse_known_args(_with_negative_values(words))
    for word in itertools.takewhile(lambda word: word != "--", words):
        if re.fullmatch(r"--[a-z-]+=--", word):  # argparse would return an empty list
            options.parser.error(f"argument {word[:-3]}: expected one argument")
    if unrecognized:  # argparse would print the usage of the whole command
        options.parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    return options


def _with_negative_values(words: Sequence[str]) -> list[str]:
    """Join ``--host -5GiB`` to ``--host=-5GiB``: argparse would take -5GiB for an option."""
    joined: list[str] = []
    for word in words:
        if joined and _NEGATIVE.match(word) and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _print_error(options: argparse.Namespace, kind: str, message: str) -> None:
    """Print an error as a line, and with ``--json`` also as an object on standard output."""
    _print_line(sys.stderr, f"tensorstow: {message}")
    if getattr(options, "json", False):
        error = {"error": {"type": kind, "message": message}}
        _print_line(sys.stdout, json.dumps(error, indent=2))


def _print_line(stream: TextIO | None, text: str) -> None:
    """Print a line; discard the stream if its reader has closed it."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    """Discard buffered and future output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


if __name__ == "__main__":
    run_and_exit()
