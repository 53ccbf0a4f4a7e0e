"""The pages of the project whose code and commands tests run."""

from tree import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/tutorial.md",
    ROOT / "docs/concepts.md",
    ROOT / "docs/serial-reference.md",
    *sorted((ROOT / "docs/guides").glob("*.md")),
]
