"""`tensorstow` in this process, and what it prints."""

import json
from typing import Any

import pytest

from tensorstow.cli.main import main


class CommandLine:
    """Calls `tensorstow` with words, which may be paths; each call checks the exit status."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> str:
        """Return what is printed, or the error of a command that prints nothing else."""
        return _said(*self._run(words, status), status)

    def json(self, *words: object, status: int = 0) -> Any:  # noqa: ANN401  # any of JSON
        """Return the value that is printed with ``--json``."""
        return json.loads(self._run((*words, "--json"), status)[0])

    def exit(self, *words: object, status: int = 0) -> str:
        """Return the help, or the usage and the error, with which argparse ends the process."""
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        assert ended.value.code == status
        return _said(*self._capsys.readouterr(), status)

    def _run(self, words: tuple[object, ...], status: int) -> tuple[str, str]:
        self._capsys.readouterr()
        assert main(list(map(str, words))) == status
        return self._capsys.readouterr()


def _said(out: str, err: str, status: int) -> str:
    assert not out.startswith("tensorstow: ")  # errors begin so, and have a stream of their own
    return (out or err) if status else out
