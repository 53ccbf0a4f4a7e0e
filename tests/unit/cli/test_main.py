import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import pytest

from command_line import CommandLine
from tensorstow.base.errors import OptionError
from tensorstow.cli import doctor
from tensorstow.cli.arguments import COMMANDS, RUN_COMMANDS, Command
from tensorstow.cli.main import main, make_parser


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(flag for action in parser._actions for flag in action.option_strings)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


OF_A_RUN = {
    "inspect": ["--help", "--json", "-h"],
    "scrub": ["--generation", "--help", "--json", "-h"],
    "recover": ["--accept-loss", "--help", "--json", "--yes", "-h"],
    "clean": ["--help", "--json", "--snapshot", "--yes", "-h"],
}
SINCE = {
    "push": ["--help", "--json", "--name", "--snapshot", "-h"],
    "pull": ["--help", "--json", "--rank", "--snapshot", "-h"],
}
"""Commands of a run that never had another name."""


def test_the_command_line_is_frozen() -> None:
    parser = make_parser()
    assert flags_of(parser) == ["--help", "--version", "-h"]
    commands = commands_of(parser)
    assert {name: flags_of(command) for name, command in commands.items()} == {
        "doctor": ["--directory", "--help", "--json", "--local-ranks", "--ranks", "-h"],
        "calibrate": ["--help", "--json", "-h"],
        "plan": [
            "--accumulation-steps",
            "--all",
            "--allow-inexact",
            "--batch",
            "--card",
            "--commits",
            "--deepspeed",
            "--device",
            "--directory",
            "--disk",
            "--dtype",
            "--ema",
            "--gemini",
            "--headroom",
            "--help",
            "--host",
            "--html",
            "--json",
            "--lora",
            "--machines",
            "--network",
            "--ordered-reduce",
            "--profile",
            "--seq",
            "--tbw",
            "--world-size",
            "-h",
        ],
        "quantize": ["--experts", "--help", "--int8", "--json", "--nf4", "-h"],
        "verify": ["--device", "--help", "--json", "--model", "-h"],
        "run": ["--help", "-h"],
        **OF_A_RUN,
    }
    of_a_run = commands_of(commands["run"])
    assert {name: flags_of(command) for name, command in of_a_run.items()} == {
        **OF_A_RUN,
        **SINCE,
    }


@pytest.mark.parametrize("name", OF_A_RUN)
def test_commands_of_a_run_go_on_by_their_old_names(name: str, cli: CommandLine) -> None:
    said = cli("run", name, "/nowhere", status=2)
    old = f"tensorstow: this command is `tensorstow run {name}` now; its old name works for one"
    assert cli(name, "/nowhere", status=2) == f"{old} more minor release\n{said}"
    assert cli.json(name, "/nowhere", status=2)["error"]["type"] == "DirectoryError"


def test_help_lists_commands_by_their_new_names_alone(cli: CommandLine) -> None:
    listed = re.findall(r"^    (\w+) ", cli.exit("--help"), re.MULTILINE)
    assert listed == [*(command.name for command in COMMANDS), "run"]
    of_a_run = re.findall(r"^    (\w+) ", cli.exit("run", "--help"), re.MULTILINE)
    assert of_a_run == [*OF_A_RUN, *SINCE]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["plna", "gpt2"],
            "there is no command 'plna': did you mean plan?; the commands are doctor",
        ),
        (["run", "inspekt", "x"], "there is no command 'inspekt': did you mean inspect?"),
        (
            ["xyzzy"],
            "no command 'xyzzy'; the commands are doctor, calibrate, plan, quantize, verify",
        ),
        (["plan", "gpt2", "--devic", "0"], "arguments: --devic 0: did you mean --device?"),
        (["plan", "gpt2", "--accumulation=2"], "did you mean --accumulation-steps?"),
        (["run", "clean", "x", "--yess"], "arguments: --yess: did you mean --yes?"),
        (["plan", "gpt2", "--lora", "many"], "'many' was given: it is the adapters' rank"),
        (["plan", "gpt2", "--lora", "r=0"], "'r=0' was given: it is the adapters' rank"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(
    arguments: list[str], said: str, cli: CommandLine
) -> None:
    assert said in cli.exit(*arguments, status=2)


def test_version(cli: CommandLine) -> None:
    assert cli.exit("--version") == f"tensorstow {version('tensorstow')}\n"


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        ([], "[-h] [--version] COMMAND ..."),
        (["swim"], "[-h] [--version] COMMAND ..."),
        (["plan", "gpt2", "--devic"], "plan [-h]"),
        (["doctor", "--somewhere"], "doctor [-h]"),
        (["inspect"], "inspect [-h]"),
        (["run"], "run [-h] COMMAND ..."),
        (["run", "scrub"], "run scrub [-h]"),
        (["plan", "gpt2", "--world-size", "many"], "plan [-h]"),
        (["plan", "gpt2", "--accumulation-steps=--"], "plan [-h]"),
        (["scrub", "x", "--generation=--"], "scrub [-h]"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_usage_of_its_command(
    arguments: list[str], usage: str, cli: CommandLine
) -> None:
    assert cli.exit(*arguments, status=2).startswith(f"usage: tensorstow {usage}")


def test_every_command_that_prints_has_json() -> None:
    commands = commands_of(make_parser())
    commands |= commands_of(commands.pop("run"))
    assert all("--json" in flags_of(command) for command in commands.values())


class ClosedPipe:
    """Standard output whose reader has gone."""

    def __enter__(self) -> TextIO:
        reader, writer = os.pipe()
        os.close(reader)
        self.file = os.fdopen(writer, "w", encoding="utf-8")
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.close()  # what is left over goes nowhere, and is no error


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_a_closed_pipe_is_quiet_and_has_a_status_of_its_own(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ClosedPipe() as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(arguments) == 141
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_a_process_ends_so_too_and_can_be_started_as_a_module() -> None:
    command = f"{shlex.quote(sys.executable)} -m tensorstow doctor | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_what_is_to_run_at_the_end_of_the_process_runs() -> None:
    code = """
import argparse, atexit, sys, types
from tensorstow.cli import main
def told(given: argparse.Namespace) -> int:
    atexit.register(print, "last", file=sys.stderr)
    print("said", end="")
    return 1
class Undeleted:
    def __del__(self) -> None:
        print("taken apart")
main.import_module = lambda name: types.SimpleNamespace(run=told)
kept = Undeleted()
sys.argv = ["tensorstow", "doctor"]
main.run_and_exit()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "said", "last\n")


def test_an_error_keeps_its_status_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with ClosedPipe() as output, ClosedPipe() as errors:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        assert main(["inspect", "/nowhere", "--json"]) == 2
        output.flush()
        errors.flush()
        monkeypatch.undo()


def test_no_standard_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["doctor", "--json"]) == 0


def test_errors_are_one_message_without_a_traceback(cli: CommandLine) -> None:
    said = cli("run", "inspect", "/nowhere", status=2)
    assert said.startswith("tensorstow: Directory /nowhere was requested but does not exist.")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "kind", "told"),
    [
        (OptionError("so"), 2, "OptionError", "so"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt", "interrupted"),
    ],
)
def test_errors_have_a_status_and_are_an_object_with_json(
    error: BaseException,
    status: int,
    kind: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_given: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == status
    assert capsys.readouterr() == ("", f"tensorstow: {told}\n")
    assert main(["doctor", "--json"]) == status
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"type": kind, "message": told}}
    assert err == f"tensorstow: {told}\n"


@pytest.mark.parametrize(
    ("number", "status", "told"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hangup")],
)
def test_a_command_that_is_ended_by_a_signal_removes_its_files(
    number: signal.Signals,
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ended(_given: argparse.Namespace) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            # Not to the process: without a handler the tests would end.
            handler = signal.getsignal(number)
            assert callable(handler)
            handler(number, None)
        raise AssertionError

    monkeypatch.setattr(doctor, "run", ended)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["doctor"]) == status
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr() == ("", f"tensorstow: {told}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def look(_given: argparse.Namespace) -> int:
        seen.append(signal.getsignal(signal.SIGHUP))
        return 0

    monkeypatch.setattr(doctor, "run", look)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert main(["doctor"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_an_interrupt_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("tensorstow.cli.main.import_module", interrupted)
    assert main(["plan", "gpt2"]) == 130
    assert capsys.readouterr() == ("", "tensorstow: interrupted\n")


SAYS_WHETHER_TORCH = """
import sys
import tensorstow.deepspeed
from tensorstow.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(f"torch imported: {'torch' in sys.modules}", file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["verify", "--strange"]])
def test_help_and_usage_errors_do_not_wait_for_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-c", SAYS_WHETHER_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "torch imported: False" in done.stderr


@pytest.mark.parametrize("command", [*COMMANDS, *RUN_COMMANDS], ids=lambda each: each.name)
def test_each_command_is_there(command: Command) -> None:
    assert callable(import_module(command.module).run)


@pytest.mark.parametrize("command", [*COMMANDS, *RUN_COMMANDS], ids=lambda each: each.name)
def test_help_says_what_a_command_does_in_the_words_of_the_list(
    command: Command, cli: CommandLine
) -> None:
    told = cli.exit(*(["run"] if command in RUN_COMMANDS else []), command.name, "--help")
    assert f"{command.summary[1:]}." in " ".join(told.split())


def test_help_of_plan_explains_its_words(cli: CommandLine) -> None:
    _, words = cli.exit("plan", "--help").split("words:\n")
    explained = re.findall(r"^  (\S+)  +\S", words, re.MULTILINE)
    assert explained == ["rank", "micro-batch", "step", "unit", "host"]


@pytest.mark.parametrize("command", ["plan", "calibrate", "doctor", "verify", "run"])
def test_help_has_examples_that_parse(command: str, cli: CommandLine) -> None:
    told = cli.exit(command, "--help").split("examples:\n", 1)[1]
    shown = [line.strip() for line in told.splitlines() if line.startswith("  tensorstow ")]
    assert shown
    for line in shown:
        words = line.split("  ")[0].split("|")[0].split()
        assert make_parser().parse_args(words[1:]).parser.prog.split()[1] == command
