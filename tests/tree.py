"""Where the project's files are."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
