"""Files and texts of others with bytes that are others: read as they are, or refused by name."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from tensorstow import AdamW
from tensorstow.base.errors import StowError
from tensorstow.base.plan import Plan
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.deepspeed.config.json_text import parse
from tensorstow.io.safetensors import read_table

NESTED = ("[" * 200_000, '{"a":' * 200_000)
PIECES = (*'{}[]",:-0', "null", "1e999", "NaN", "\ud800", "9" * 400, '"../x"', *NESTED)


def mutated(text: str, dice: random.Random) -> str:
    """Return ``text`` with a piece put in, taken out, or repeated."""
    start = dice.randrange(len(text) + 1)
    stop = min(len(text), start + dice.choice((0, 1, 4, 20)))
    return text[:start] + dice.choice((*PIECES, "", text[start:stop] * 2)) + text[stop:]


def safetensors_with(path: Path, change: Callable[[str], str]) -> None:
    """Write a file of two tensors whose table is changed; its length is told right."""
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, path, {"k": "v"})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = change(data[8 : 8 + size].decode()).encode("utf-8", "surrogatepass")
    path.write_bytes(len(table).to_bytes(8, "little") + table + data[8 + size :])


def export_with(path: Path, change: Callable[[str], str]) -> AdamW:
    """Write what an optimizer exports, with other metadata; return one to load it."""
    optimizer = AdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    optimizer.save_safetensors(path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    for key in table["__metadata__"]:
        table["__metadata__"][key] = change(table["__metadata__"][key])
    made = json.dumps(table).encode()
    path.write_bytes(len(made).to_bytes(8, "little") + made + data[8 + size :])
    return optimizer


def readers(place: Path, change: Callable[[str], str]) -> Iterator[Callable[[], object]]:
    """Yield what reads each kind of input, changed."""
    table, export = place / "table.safetensors", place / "export.safetensors"

    def read_table_of() -> object:
        safetensors_with(table, change)
        return read_table(table)

    def read_weights() -> object:
        folder = place / "model"
        folder.mkdir(exist_ok=True)
        safetensors_with(folder / "part.safetensors", lambda text: text)
        index = {"metadata": {}, "weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
        text = change(json.dumps(index)).encode("utf-8", "surrogatepass")
        (folder / "model.safetensors.index.json").write_bytes(text)
        return PretrainedFiles(folder, None)

    def read_weights_file() -> object:
        safetensors_with(table, change)
        return PretrainedFiles(table, None)

    yield read_table_of
    yield read_weights
    yield read_weights_file
    yield lambda: export_with(export, change).load_safetensors(export)
    yield lambda: Plan.from_json(change(Plan().to_json()))
    yield lambda: parse(change('{"train_batch_size": 8, "optimizer": {"type": "Adam"}}'), "it")


def attack(place: Path, tries: int, seed: int) -> list[str]:
    """Read everything ``tries`` times, changed by chance; return what was wrong."""
    dice = random.Random(seed)  # noqa: S311
    wrong = []
    for number in range(tries):
        for kind, read in enumerate(readers(place, lambda text: mutated(text, dice))):
            try:
                read()
            except StowError:
                pass
            except Exception as error:  # noqa: BLE001  # that is the finding
                wrong.append(f"try {number}, reader {kind}: a bare {error!r}"[:300])
    return wrong
