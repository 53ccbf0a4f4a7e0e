"""Gather the pages and pictures of the site in one folder, for Sphinx: `make docs`.

The pages of docs/ and of the root are written for a code host, where people read them too. Here
their links lead to where the site has a page, and two conventions become what the site can draw:

* ``> **Note:** text`` (or Tip, Important, Warning) is an admonition.
* Between ``<!-- tabs -->`` and ``<!-- end of tabs -->`` a line ``**Trainer**`` begins a tab.

flowchart.py draws flowcharts, and site_pages.py writes the pages that have no file: commands, keys,
figures, examples.
"""

import re
import shutil
import sys
from pathlib import Path, PurePosixPath

import flowchart
import site_pages

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "README.md": "index.md",
    "benchmarks/compatibility.md": "compatibility.md",
    "benchmarks/results/table.md": "figures/index.md",
    "docs/adr": "adr/index.md",
    "docs/adr/README.md": "adr/index.md",
    "docs/reference": "reference/python.md",
    "examples": "examples/index.md",
    **{
        file.name: f"{file.stem.lower()}.md"
        for file in ROOT.glob("[A-Z]*.md")
        if file.stem != "README"
    },
    **{f"examples/{file.name}": f"examples/{file.stem}.md" for file in ROOT.glob("examples/*.py")},
}
"""Files and folders of the repository, and the pages that the site has of them."""
CHILDREN = {
    "architecture.md": "serial-reference\nmodules",
    "comparison.md": "figures/index\ncompatibility",
}
"""What the side bar has below pages that are files of the root."""
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")
"""The target of a link to another file."""
QUOTE = re.compile(r"^> \*\*(Note|Tip|Important|Warning):\*\* ?(.*(?:\n>.*)*)", re.MULTILINE)
"""A quotation that is an admonition."""
TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
"""Alternatives, one after the other."""
TAB = re.compile(r"^\*\*([^*\n]+)\*\*$", re.MULTILINE)
"""The line that begins an alternative."""


def gather(folder: Path) -> None:
    """Write all pages to ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs/images", folder / "images")
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in MOVED)]
    for file in dict.fromkeys(files):
        source = str(file.relative_to(ROOT))
        target = MOVED.get(source) or source.removeprefix("docs/")
        if file.suffix == ".md" and target not in site_pages.PAGES:
            _write(folder / target, page(file.read_text("utf-8"), source, target, folder))
    for target, lines in site_pages.pages():
        _write(folder / target, "\n".join(lines) + "\n")
    for target, text in CHILDREN.items():
        _append(folder / target, f"\n```{{toctree}}\n:hidden:\n\n{text}\n```\n")
    _append(folder / "index.md", (ROOT / "docs/contents.txt").read_text("utf-8"))


def _append(file: Path, text: str) -> None:
    file.write_text(file.read_text("utf-8") + text, "utf-8")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def page(text: str, source: str, target: str, folder: Path) -> str:
    """Return a page of the repository as the site has it.

    Args:
        text: The page, in Markdown.
        source: Its path in the repository.
        target: Its path in the site.
        folder: Where the site's pages are written; files that the page links to are copied there.
    """
    return flowchart.drawn(tabs(admonitions(moved(text, source, target, folder))))


def moved(text: str, source: str, target: str, folder: Path) -> str:
    """Return a page with its links to other files as the site has them; see :func:`page`."""

    def of(match: re.Match[str]) -> str:
        path = _normal(PurePosixPath(source).parent / match[1])
        there = MOVED.get(path) or path.removeprefix("docs/")
        if path not in MOVED and not path.startswith("docs/") and (ROOT / path).is_file():
            there = f"files/{path}"
            (folder / there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / there)
        up = [".."] * (len(PurePosixPath(target).parts) - 1)
        return "/".join([*up, there]) + (match[2] or "")

    return LINK.sub(of, text)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def admonitions(text: str) -> str:
    """Return a page with its notes and warnings as admonitions."""

    def of(match: re.Match[str]) -> str:
        inside = re.sub(r"^> ?", "", match[2], flags=re.MULTILINE)
        return f":::{{{match[1].lower()}}}\n{inside}\n:::"

    return QUOTE.sub(of, text)


def tabs(text: str) -> str:
    """Return a page with its alternatives as tabs; those of one name are switched together."""

    def of(match: re.Match[str]) -> str:
        before, *rest = TAB.split(match[1])
        items = (
            f":::::{{tab-item}} {title}\n:sync: {title.lower()}\n\n{body.strip()}\n:::::\n"
            for title, body in zip(rest[::2], rest[1::2], strict=True)
        )
        return f"{before}::::::{{tab-set}}\n\n" + "\n".join(items) + "\n::::::"

    return TABS.sub(of, text)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
