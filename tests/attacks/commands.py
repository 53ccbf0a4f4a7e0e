"""Command lines of odd words, files and configurations: each ends by a status of ours."""

import contextlib
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attacks.values import altered
from tensorstow.cli.main import main

WORDS = (
    *("--", "-", "", "\udcff", "loop", "loop/x", "dangling", "dangling/x", "name\udcff", "file"),
    *("file\udcff", "file/x", "empty", "pipe", "folder-of-pipe", "bytes", "x" * 300, "x/" * 3000),
    *("/dev/null", "/dev/zero", "/proc", "~nobody/x", "mod:", ":f", "a.b:c", "exits:f", "exits2:f"),
    *(
        "0",
        "-1",
        "1",
        "9" * 20,
        "9" * 5000,
        "1e9",
        "NaN",
        "0x10",
        "1GiB",
        "--json",
        "auto",
        "\u0663",
    ),
)
OPTIONS = {
    "plan": (
        *("--device", "--host", "--disk", "--world-size", "--accumulation-steps", "--batch"),
        *("--seq", "--dtype", "--profile", "--directory", "--tbw", "--html"),
    ),
    "doctor": ("--directory", "--local-ranks"),
    "inspect": ("--json",),
    "scrub": ("--generation", "--json"),
    "recover": ("--json",),
    "clean": ("--json",),
}
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
    },
    {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64},
)


def furnish(place: Path) -> None:
    """Make what the words name, in ``place``."""
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nowhere")
    for name in ("empty", "name\udcff", "folder-of-pipe"):
        (place / name).mkdir()
    for name in ("file", "file\udcff"):
        (place / name).write_text("{}")
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "folder-of-pipe" / "config.json")
    (place / "bytes").write_bytes(b"\xff\xfe\x00{}")
    (place / "exits.py").write_text("raise SystemExit(9)\n")
    (place / "exits2.py").write_text("def f():\n    raise SystemExit(9)\n")


def command_lines(dice: random.Random) -> Iterator[list[str]]:
    """Yield commands with random words as their arguments and options."""
    while True:
        command = dice.choice(list(OPTIONS))
        line = [command] if command == "doctor" else [command, dice.choice(WORDS)]
        if command == "plan" and dice.random() < 0.7:
            line[1] = "gpt2"
        for _ in range(dice.choice((0, 1, 1, 2))):
            option, word = dice.choice(OPTIONS[command]), dice.choice(WORDS)
            line += [f"{option}={word}"] if dice.random() < 0.5 else [option, word]
        yield line


def plans(place: Path, dice: random.Random) -> Iterator[list[str]]:
    """Yield `plan` with configurations of transformers that are altered, or cut."""
    file = place / "configuration.json"
    while True:
        text = json.dumps(altered(dice.choice(CONFIGURATIONS), dice))
        text = text[: dice.randrange(len(text))] if dice.random() < 0.1 else text
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        yield ["plan", str(file), *(("--batch", "1", "--seq", "4") if dice.random() < 0.5 else ())]


def attack(lines: Iterator[list[str]], tries: int) -> list[str]:
    """Run commands; return what ended otherwise than by a status and a line or a usage."""
    wrong = []
    for line in (next(lines) for _ in range(tries)):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                status: object = main(line)
        except SystemExit as ended:
            status = ended.code
        except Exception as error:  # noqa: BLE001  # that is the finding
            status = repr(error)
        is_short = status == 0 or "usage:" in said.getvalue() or said.getvalue().count("\n") <= 4
        if status not in {0, 1, 2} or not is_short:
            wrong.append(f"{line}: {status} {said.getvalue()}"[:500])
    return wrong
