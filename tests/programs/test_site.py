"""The site, built as `make docs` builds it: what a search finds, and what a page loads."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tensorstow
from site_search import Search
from tensorstow import errors
from tree import ROOT

pytestmark = pytest.mark.timeout(600)

FIRST = {
    "install": "guides/install",
    "pip install": "guides/install",
    "cuda": "guides/install",
    "gpu": "guides/install",
    "out of memory": "faq",
    "CUDA out of memory": "faq",
    "OOM": "faq",
    "lora": "guides/lora",
    "QLoRA": "guides/lora",
    "peft": "guides/lora",
    "hugging face": "guides/trainers",
    "transformers": "guides/trainers",
    "Trainer": "guides/trainers",
    "resume": "guides/saving-and-resuming",
    "checkpoint": "guides/saving-and-resuming",
    "save a checkpoint": "guides/saving-and-resuming",
    "deepspeed": "guides/deepspeed",
    "zero-offload": "guides/deepspeed",
    "gemini": "guides/colossalai",
    "fsdp": "guides/several-gpus",
    "nvme": "guides/storage",
    "8B": "guides/8b-on-24gb",
    "inference": "guides/generation",
    "gradient checkpointing": "guides/long-sequences",
    "AdamW": "reference/adamw",
    "BudgetError": "reference/errors",
}
"""What people look for, and the page that the search shows first."""
UNSEARCHED = ("adr/", "changelog", "comparison", "figures/", "modules", "roadmap", "compatibility")


class Loads(HTMLParser):
    """Collects what a browser loads by itself: pictures, scripts, style sheets, fonts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        loaded = tag != "a" and (
            tag != "link" or values.get("rel") not in {"next", "prev", "canonical"}
        )
        self.urls += [
            values[key] for key in ("src", "href", "data", "srcset") if loaded and key in values
        ]
        self.urls += re.findall(r"url\(([^)]+)\)", values.get("style", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pages, made = folder / "pages", folder / "site"
    sphinx = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "-q",
        "-c",
        "docs",
    ]
    for command in ([sys.executable, "tools/site.py", pages], [*sphinx, pages, made]):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
    return made


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    return Search(site)


@pytest.mark.parametrize(("query", "page"), FIRST.items())
def test_a_search_finds_the_right_page_first(search: Search, query: str, page: str) -> None:
    assert [hit.page for hit in search.hits(query)][:1] == [page]


def test_decisions_figures_and_the_changelog_are_not_searched(search: Search) -> None:
    hidden = {
        number
        for number, page in enumerate(search.index["docnames"])
        if page.startswith(UNSEARCHED)
    }
    assert len(hidden) > 50
    assert {search.index["titles"][number] for number in hidden} == {""}
    for table in ("terms", "titleterms"):
        for files in search.index[table].values():
            assert not hidden & set(files if isinstance(files, list) else [files])
    assert not any(page.startswith("_modules") for page in search.index["docnames"])


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 80
    urls = {url for page in pages for url in Loads(page.read_text("utf-8")).urls}
    styles = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    urls |= set(re.findall(r"url\(([^)]+)\)|@import ([^;]+)", styles))
    scripts = "".join(path.read_text("utf-8") for path in site.rglob("*.js"))
    assert urls
    assert [url for url in map(str, urls) if "//" in url and "data:" not in url] == []
    assert re.findall(r"""(?:import|fetch|src\s*=)\W{1,4}["'`]https?:[^"'`]+""", scripts) == []


def test_the_reference_shows_each_name_with_its_source(site: Path) -> None:
    pages = [path.read_text("utf-8") for path in (site / "reference").glob("*.html")]
    text = "".join(pages)
    names = set(tensorstow.__all__) - {"__version__", "StowError", "errors"}
    for name in (
        *(f"tensorstow.{n}" for n in names),
        *(f"tensorstow.errors.{n}" for n in errors.__all__),
    ):
        assert len(re.findall(f'<dt[^>]* id="{re.escape(name)}"', text)) == 1, name
    assert text.count('class="viewcode-link"') > 40
    assert re.findall(r"&lt;f\w+|0x\w{8,}|Annotated", text) == []
    assert re.findall(r"Returns<span.{0,80}?<dd[^>]*><p><em>[^<]+", text, re.DOTALL) == []


def test_flowcharts_are_drawn_and_code_can_be_copied(site: Path) -> None:
    page = (site / "architecture.html").read_text("utf-8")
    source = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert page.count('<div class="flowchart"><svg ') == source.count("```mermaid") > 0
    assert "flowchart LR" not in page
    assert "copybutton.js" in page
    assert list(site.glob("adr/0*.html"))
    navigation = page.partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert "adr/" not in navigation
