"""The pages of the project whose code and commands tests run."""

from tree import ROOT

SCRIPTS = [
    ROOT / "docs/guides/quickstart.md",
    ROOT / "docs/guides/8b-on-24gb.md",
    ROOT / "docs/guides/lora.md",
    ROOT / "docs/guides/deepspeed.md",
    ROOT / "docs/guides/colossalai.md",
    ROOT / "docs/guides/several-gpus.md",
    ROOT / "docs/guides/generation.md",
    ROOT / "docs/guides/long-sequences.md",
    ROOT / "docs/guides/trainers.md",
    ROOT / "docs/guides/saving-and-resuming.md",
    ROOT / "docs/guides/planning.md",
    ROOT / "docs/guides/storage.md",
]
"""Pages that are one script each: a reader pastes their blocks in order into an empty folder."""

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/how-it-works.md",
    ROOT / "docs/faq.md",
    ROOT / "docs/limitations.md",
    ROOT / "docs/serial-reference.md",
    *sorted((ROOT / "docs/guides").glob("*.md")),
]
