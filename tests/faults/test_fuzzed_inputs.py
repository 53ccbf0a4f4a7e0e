"""Texts and files that others wrote, damaged: refused by name, never by what Python says."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import arguments, commands, configurations
from attacks.texts import NESTED, attack, readers
from tensorstow.base.errors import StowError


def test_a_sample(tmp_path: Path) -> None:
    assert attack(tmp_path, 40, seed=11) == []


@pytest.mark.parametrize("text", [*NESTED, "", "null", "[]", "{}", '"x"', "\0"])
def test_texts_that_are_something_else(text: str, tmp_path: Path) -> None:
    refused = 0
    for read in readers(tmp_path, lambda _: text):
        try:
            read()
        except StowError:
            refused += 1
    assert refused >= 2


def test_configurations_of_any_values_train_or_are_errors_of_ours() -> None:
    wrong, trained = configurations.attack(300, seed=3)
    assert wrong == []
    assert trained > 30


def test_commands_of_any_words_end_by_a_status_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = commands.command_lines(random.Random(7))  # noqa: S311
    assert commands.attack(lines, 150) == []


def test_configurations_of_transformers_end_by_a_status_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lines = commands.plans(tmp_path, random.Random(8))  # noqa: S311
    assert commands.attack(lines, 60) == []


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_name_that_is_no_text_is_printed(locale: str, tmp_path: Path) -> None:
    place = tmp_path / "name\udcff"
    place.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "tensorstow", "doctor", "--directory", place],
        env={**os.environ, "LC_ALL": locale, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode in {0, 1}, ended.stderr.decode()
    assert rb"name\udcff" in ended.stdout
    assert b"Traceback" not in ended.stderr


def test_arguments_of_any_values_are_taken_or_errors_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert arguments.attack(tmp_path, 600, seed=9) == []
