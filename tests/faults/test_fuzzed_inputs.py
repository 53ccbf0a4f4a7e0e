"""Texts and files that others wrote, damaged: refused by name, never by what Python says."""

from pathlib import Path

import pytest

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
