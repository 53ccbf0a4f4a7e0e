"""The README and the guides: every block of Python runs as printed.

The blocks of ``SCRIPTS`` run in order, in an empty folder, with nothing that the page has not made.
Those of the README import what they use, and run one by one: a reader has a model, data and a disk
at /nvme, which the prelude below makes.
"""

import gc
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import trainers
from pages import PAGES, SCRIPTS

pytestmark = [
    # torch's, of a process alone that saves what torch.distributed.checkpoint is also for
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),  # of the run before
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true"),  # transformers'
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # Lightning's
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),  # of a first run
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),  # of the run before
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec"),  # Lightning's
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),  # peft's, of GPT-2's layers
]


def prelude(place: Path) -> dict[str, Any]:
    """Return what a reader of the README has: a model, data, and files in the current folder."""
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    (place / "ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    trainers.model().save_pretrained(place / "base")
    return {"model": trainers.model(), "dataset": trainers.examples(2)}


@dataclass
class Block:
    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(pages: Iterable[Path]) -> Iterator[Block]:
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert match[1] == "python", f"{page.name} has a block of {match[1] or 'no language'}"
            yield Block(page, text[: match.start()].count("\n") + 1, match[2])


@pytest.mark.parametrize("block", list(blocks(p for p in PAGES if p not in SCRIPTS)), ids=str)
def test_a_block_runs_as_printed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = prelude(tmp_path)
    (tmp_path / "nvme").mkdir()  # mounted, on a reader's machine
    code = block.code.replace('"/nvme', f'"{tmp_path}/nvme')
    try:
        exec(compile("\n" * block.line + code, str(block.page), "exec"), names)  # noqa: S102
    finally:
        getattr(names.get("optimizer"), "close", lambda: None)()
        names.clear()
        gc.collect()


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom_twice(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    on_term, has_group = signal.getsignal(signal.SIGTERM), dist.is_initialized()
    for _ in range(2):  # readers run a script again
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            with patch.dict(os.environ):  # Lightning writes a rank's variables
                for block in blocks([page]):
                    exec(compile("\n" * block.line + block.code, str(page), "exec"), names)  # noqa: S102
        finally:
            signal.signal(signal.SIGTERM, on_term)
            names.clear()
            gc.collect()
            if dist.is_initialized() and not has_group:
                dist.destroy_process_group()
