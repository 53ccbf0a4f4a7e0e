import argparse
from importlib.metadata import version

import pytest

from tensorstow.base.errors import StowError
from tensorstow.cli import doctor
from tensorstow.cli.main import main, make_parser


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(flag for action in parser._actions for flag in action.option_strings)


def test_the_command_line_is_frozen() -> None:
    parser = make_parser()
    assert flags_of(parser) == ["--help", "--version", "-h"]
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert {name: flags_of(command) for name, command in commands.choices.items()} == {
        "demo": ["--directory", "--help", "--out", "--small", "--steps", "-h"],
        "doctor": ["--directory", "--help", "--json", "-h"],
        "inspect": ["--help", "--json", "-h"],
        "scrub": ["--generation", "--help", "-h"],
        "clean": ["--help", "--yes", "-h"],
    }


def test_defaults_of_the_demo() -> None:
    given = make_parser().parse_args(["demo"])
    assert (str(given.out), given.steps, given.small) == ("tensorstow-demo", 3, False)
    assert given.directory is None


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tensorstow {version('tensorstow')}\n"


@pytest.mark.parametrize("arguments", [[], ["swim"], ["demo", "--smal"], ["doctor", "somewhere"]])
def test_what_is_not_understood_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tensorstow" in capsys.readouterr().err


def test_errors_are_one_message_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0"]) == 2
    said = capsys.readouterr().err
    assert said == "tensorstow: --steps 0 was given: at least 1 step can be measured.\n"


@pytest.mark.parametrize(("error", "status"), [(StowError("so"), 2), (KeyboardInterrupt(), 130)])
def test_exit_statuses(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_given: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == status
