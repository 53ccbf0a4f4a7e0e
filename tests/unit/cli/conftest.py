import json
from pathlib import Path

import pytest

from command_line import CommandLine


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a configuration of a small GPT-2, whose name is text and no markup."""
    given = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    path = tmp_path / "<small>.json"
    path.write_text(json.dumps(given))
    return path
