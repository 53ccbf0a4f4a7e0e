"""The command `tensorstow`: parses arguments, runs a subcommand, prints errors.

Exit statuses: 0, success; 1, the command reports damage, an unusable directory or results that
differ, or the user's function raised an error; 2, the request cannot be carried out; 130,
interrupted; 143, terminated; 129, the terminal was closed; 141, the reader of the output closed it
(``| head``), as shells report for SIGPIPE.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import NoReturn, TextIO

from tensorstow.base.errors import StowError
from tensorstow.cli.arguments import COMMANDS, RUN_COMMANDS, RUN_SUMMARY, Command, add_examples
from tensorstow.cli.collector import collector_paused
from tensorstow.measure.user_code import UserCodeError

_GROUPED = 4
"""The first commands of `tensorstow run` had names without it before."""
USER_ERROR = 1
USAGE_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_NEGATIVE = re.compile(r"-\d")


class Terminated(BaseException):
    """A signal asked the process to end: raised in the main thread, as Ctrl-C is."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.status = 128 + number


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter with room for the longest name of a command, which argparse does not count."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 14


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest name for one that it does not know."""

    commands: Iterable[str] = ()
    """Names of its commands that help lists."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and ``message``, with the command nearest to an unknown one, and exit."""
        choice = re.search(r"invalid choice: '?(.*?)'? \(", message) if self.commands else None
        if choice is not None:
            listed = f"the commands are {', '.join(self.commands)}"
            message = (
                f"there is no command {choice[1]!r}{_hint(choice[1], self.commands)}; {listed}"
            )
        super().error(message)


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """Print the usage and the words that are no arguments of a parser, and exit."""
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
    hints = (_hint(word, flags) for word in words if word.startswith("-"))
    parser.error(f"unrecognized arguments: {' '.join(words)}{next(filter(None, hints), '')}")


def _hint(word: str, names: Iterable[str]) -> str:
    near = get_close_matches(word.partition("=")[0], list(names), 1)
    return f": did you mean {near[0]}?" if near else ""


def make_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="tensorstow",
        description="Train models that do not fit: weights, gradients and optimizer states over GPU"
        " memory, CPU memory and disk.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"tensorstow {version('tensorstow')}"
    )
    commands = _add_commands(parser, COMMANDS)
    group = commands.add_parser(
        "run", help=RUN_SUMMARY, description=_sentence(RUN_SUMMARY), allow_abbrev=False
    )
    add_examples(group, "run")
    group.formatter_class = _Formatter
    _add_commands(group, RUN_COMMANDS)
    parser.commands = [*parser.commands, "run"]
    # Their names before they were a group; without help= they are not listed.
    for command in RUN_COMMANDS[:_GROUPED]:
        old = commands.add_parser(command.name, allow_abbrev=False)
        _declare(command, old)
        old.set_defaults(replaced_by=f"tensorstow run {command.name}")
    return parser


def _add_commands(
    parser: Parser, commands: Sequence[Command]
) -> "argparse._SubParsersAction[Parser]":
    """Add commands to a parser, and return what further ones are added to."""
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        _declare(command, added.add_parser(command.name, help=command.summary, allow_abbrev=False))
    parser.commands = [command.name for command in commands]
    return added


def _declare(command: Command, parser: Parser) -> None:
    parser.description = _sentence(command.summary)
    command.declare(parser)
    parser.set_defaults(module=command.module, parser=parser)


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


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
        if (new := getattr(options, "replaced_by", None)) is not None:
            note = f"this command is `{new}` now; its old name works for one more minor release"
            _print_line(sys.stderr, f"tensorstow: {note}")
        with _terminations_raised():
            with collector_paused():
                module = import_module(options.module)
            status: int = module.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can still be reported
    except BrokenPipeError:
        _drop(sys.stdout)
        return PIPE_CLOSED
    except UserCodeError as error:
        _print_error(options, error.kind, str(error))
        return USER_ERROR
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
        _refuse_unknown(options.parser, unrecognized)
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
