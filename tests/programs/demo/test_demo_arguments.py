"""The demo's command line."""

import pytest

from demo.__main__ import make_parser
from tensorstow.cli.main import main


def test_defaults() -> None:
    given = make_parser().parse_args([])
    assert (str(given.out), given.steps, given.small) == ("tensorstow-demo", 4, False)
    assert given.directory is None


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "0"], make_parser()) == 2
    assert capsys.readouterr().err == (
        "tensorstow: --steps 0 was given: use at least 2, because the first step of a turn is not"
        " counted.\n"
    )


def test_examples_of_the_help_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"], make_parser())
    examples = capsys.readouterr().out.split("examples:\n", 1)[1].splitlines()
    commands = [line for line in examples if line.startswith("  python examples/demo")]
    assert len(commands) == 3
    for line in commands:
        make_parser().parse_args(line.strip().split("  ")[0].split()[2:])
