"""Pages of the site that have no file: what commands, tables in code and measurements say."""

import argparse
import ast
import json
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

from architecture import modules

from tensorstow.cli.main import make_parser
from tensorstow.colossalai.booster import plugin
from tensorstow.colossalai.zero import GeminiDDP, GeminiOptimizer
from tensorstow.deepspeed.config.settings import KEYS
from tensorstow.doorkit.keyword_table import defaults_of, table_of

ROOT = Path(__file__).resolve().parent.parent
PEERS = {
    "torch fused": "torch's fused AdamW",
    "torch composition": "torch's operations",
    "composition in tiles": "torch's operations",
    "DeepSpeed": "DeepSpeed",
    "TensorNVMe": "TensorNVMe",
    "cpu_offload": "accelerate",
    "disk_offload": "accelerate",
    "FSDP2": "torch's FSDP2",
    "fio": "fio",
}
"""What a figure is named by, and whose code that is."""
TITLES = {
    "accelerator_model": "Steps on a simulated GPU",
    "activations": "Activations: four ways to keep them",
    "cross_entropy": "The loss in chunks",
    "deepspeed_numbers": "Results with a DeepSpeed configuration",
    "deepspeed_step": "A step next to DeepSpeed's",
    "delayed": "Delayed updates: the loss curve",
    "durable": "Commits and resuming",
    "engine": "What stow() costs on a CPU",
    "generation": "Generation with weights on disk",
    "experts": "A mixture of experts on disk",
    "gpu": "Steps on a GPU",
    "kernels": "The update's kernels",
    "lecture": "No offload, ZeRO-Offload and ZeRO-Infinity",
    "lora": "LoRA over a base on disk",
    "lora_large": "LoRA over 7 billion parameters on disk",
    "offload": "The offloaded step against disk and kernel alone",
    "optimizer": "optimizer.step() with states in memory",
    "overlap": "Updates during forward and backward",
    "gpu_overlap": "When updates run beside a GPU",
    "peers": "The update next to DeepSpeed and TensorNVMe",
    "placements": "GPT-2 on a CPU in each placement",
    "plan_bytes": "Predicted and measured GPU memory",
    "plan_command": "What `tensorstow plan` takes",
    "plan_memory": "Resident memory and the bound of a plan",
    "plans": "Predicted and measured plans on a CPU",
    "raw_io": "Disk transfers next to fio",
    "seed_example": "GPT-2 on a CPU, with and without offload",
    "trainer": "The Trainer next to a loop by hand",
    "reshard": "Another number of ranks",
    "worlds": "The same weights on any number of ranks",
    "averages": "Averages of weights",
    "touched_rows": "Rows that a step does not touch",
    "drives": "Two drives of which one is twice as fast",
    "vertical": "Micro-batches in vertical order",
}
"""What each subject of the benchmarks is called."""
PLACERS = (GeminiDDP, GeminiOptimizer)
"""The classes of ColossalAI that place a model without a booster."""


def pages() -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the path in the site and the lines of each page."""
    for target, lines in PAGES.items():
        yield target, lines()
    for document in results():
        yield f"figures/{document['subject']}.md", figures_of(document)
    for script in scripts():
        yield f"examples/{script.stem}.md", example(script)


def scripts() -> list[Path]:
    """Return the scripts of examples/."""
    return sorted((ROOT / "examples").glob("*.py"))


def example(script: Path) -> Iterator[str]:
    """Yield the page of a script of examples/, with its source to copy."""
    yield from (f"# {script.name}", "", f"This is `examples/{script.name}`.", "")
    yield from ("```python", script.read_text("utf-8").rstrip(), "```")


def examples() -> Iterator[str]:
    """Yield the page that lists the scripts of examples/."""
    yield from ("# Examples", "", "Scripts to copy, each whole.", "")
    yield from ("| script | what it shows |", "|---|---|")
    for script in scripts():
        text = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
        yield _row(f"[{script.name}]({script.stem}.md)", text.partition("\n")[0])
    yield from ("", "```{toctree}", ":hidden:", "", *(script.stem for script in scripts()), "```")


def commands() -> Iterator[str]:
    """Yield a page of what `tensorstow --help` and `tensorstow COMMAND --help` print."""
    yield from ("# Commands", "", "```text", make_parser().format_help().rstrip(), "```")
    yield from _subcommands(make_parser(), "##")


def _subcommands(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]  # noqa: SLF001  # argparse offers no other way
    for name, command in (item for group in groups for item in group.choices.items()):
        yield from ("", f"{level} {name}", "", "```text", command.format_help().rstrip(), "```")
        yield from _subcommands(command, f"{level}#")


def keys() -> Iterator[str]:
    """Yield a page of all keys of a DeepSpeed configuration."""
    yield from ("# Keys of a DeepSpeed configuration", "")
    yield "What each does here. A refused key raises an error unless its value turns it off."
    yield from ("", "| key | values | here | what it does |", "|---|---|---|---|")
    for key in KEYS.values():
        cells = (f"`{key.path}`", key.kind.allowed, key.support.value, key.note)
        yield _row(*cells)


def keywords() -> Iterator[str]:
    """Yield a page of all keywords of ColossalAI's classes that place models."""
    yield from ("# Keywords of ColossalAI's classes", "")
    yield "What each does here. A keyword without a meaning changes nothing, and a log line says"
    yield "why. A refused one raises an error unless it has its default."
    for cls in (*(vars(plugin)[name] for name in plugin.__all__ if name != "Plugin"), *PLACERS):
        yield from ("", f"## {cls.__name__}", "")
        yield from ("| keyword | default | here | what it does |", "|---|---|---|---|")
        table = table_of(cls)
        for name, default in defaults_of(cls).items():
            note = table[name].note.replace("``", "`")
            yield _row(f"`{name}`", _cell(default), table[name].support.value, note)


def _cell(default: object) -> str:
    return "" if default is Parameter.empty else f"`{default!r}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def results() -> list[dict[str, Any]]:
    """Return what `make bench` saved, a document for each subject."""
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    return [json.loads(path.read_text("utf-8")) for path in files]


def _measured(document: Mapping[str, Any]) -> Iterator[str]:
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    yield f"`python benchmarks/run.py {document['subject']}`: {document['pairs']} pairs; {machine}."
    yield ""


def figures() -> Iterator[str]:
    """Yield the page that lists the pages of figures."""
    yield from ("# Figures", "")
    yield "What `make bench` measured. A figure is a ratio of medians of pairs that took turns in"
    yield "one run. [Comparison](../comparison.md) has those that are next to other projects' code."
    yield ""
    for document in results():
        subject, count = document["subject"], len(document["figures"])
        title = f"[{TITLES[subject]}]({subject}.md)"
        yield f"* {title}: {count} {'figure' if count == 1 else 'figures'}"
    subjects = (document["subject"] for document in results())
    yield from ("", "```{toctree}", ":hidden:", "", *subjects, "```")


def figures_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page of a subject's figures: its part of benchmarks/results/table.md."""
    table = (ROOT / "benchmarks/results/table.md").read_text("utf-8")
    text = table.partition(f"## {document['subject']}\n\n")[2].partition("\n## ")[0]
    yield from (f"# {TITLES[document['subject']]}", "", *_measured(document))
    yield from text.partition("\n\n")[2].splitlines()


def comparison() -> Iterator[str]:
    """Yield the page of what was measured next to other projects' code, and of nothing else."""
    yield from ("# Comparison", "")
    yield "What was measured next to other projects' code. Each figure is a ratio of medians of one"
    yield "run, in which both took turns; what is not listed was not measured."
    yield "[Figures](figures/index.md) has all others."
    for document in results():
        rows = [row for row in document["figures"] if row["measured"] is not None and _peer_in(row)]
        if rows:
            yield from ("", f"## {TITLES[document['subject']]}", "", *_measured(document))
            yield from ("| figure | next to | measured |", "|---|---|---|")
            for row in rows:
                yield f"| {row['name']} | {_peer_in(row)} | {row['measured']:.3g} {row['unit']} |"


def _peer_in(row: Mapping[str, Any]) -> str | None:
    """Return whose code a figure is next to ours."""
    return next((peer for word, peer in PEERS.items() if word in row["name"]), None)


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "comparison.md": comparison,
    "examples/index.md": examples,
    "figures/index.md": figures,
    "modules.md": modules,
    "reference/colossalai-keywords.md": keywords,
    "reference/commands.md": commands,
    "reference/deepspeed-keys.md": keys,
}
"""Pages that are always the same ones, by their paths in the site."""
