"""How Sphinx makes the site from the pages that tools/site.py gathers: `make docs`.

TENSORSTOW_DOCS_VERSION names the version in the titles, and TENSORSTOW_VERSIONS_URL the page that
lists all versions; without them there is only one, that of the package.
"""

import importlib.metadata
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def _sources() -> list[str]:
    """Return the repository's URL, once a person has filled in whose it is (pyproject.toml)."""
    lines = importlib.metadata.metadata("tensorstow").get_all("Project-URL") or []
    urls = dict(line.split(", ", 1) for line in lines)
    return [url for name, url in urls.items() if name == "Source" and "/OWNER/" not in url]


project = "tensorstow"
release = os.environ.get("TENSORSTOW_DOCS_VERSION") or importlib.metadata.version("tensorstow")
author = copyright = "the tensorstow authors"  # noqa: A001  # Sphinx names it so

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
pygments_dark_style = "a11y-dark"  # furo's own underlines what is imported
html_title = f"tensorstow {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
templates_path = ["templates"]
html_context = {"versions_url": os.environ.get("TENSORSTOW_VERSIONS_URL", "")}
html_theme_options = {
    "footer_icons": [
        {"name": "Source code", "url": url, "html": "Source code", "class": ""}
        for url in _sources()
    ]
}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Trainers are named in signatures only: they need not be installed, and take long to import.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autosummary_generate = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

UNSEARCHED = re.compile(r"adr/|changelog|comparison|figures|modules|roadmap|compatibility")
"""Pages that are not in the search index: they use every word and are about none."""
UNLISTED = re.compile(r"adr/|code_of_conduct")
"""Pages that are not in the side bar, and that other pages link to."""


def _keywords() -> dict[str, list[str]]:
    lines = (Path(__file__).parent / "keywords.txt").read_text("utf-8").splitlines()
    rows = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {page: words.split(", ") for page, _, words in rows}


KEYWORDS = _keywords()
"""What people search for, by the page that they should find first."""


def _index(app: Sphinx, document: nodes.document) -> None:
    """Tell the search what a page is about: an entry of the index beats any text."""
    page = app.env.docname
    if UNSEARCHED.match(page):
        app.env.metadata[page]["nosearch"] = True
    if UNLISTED.match(page):
        app.env.metadata[page]["orphan"] = True
    entries = [("single", word, "", "main", None) for word in KEYWORDS.get(page, ())]
    if entries:
        document.insert(0, addnodes.index(entries=entries))


def _check(_app: Sphinx, env: object) -> None:
    missing = sorted(set(KEYWORDS) - set(env.found_docs))
    if missing:
        message = f"docs/keywords.txt names pages that do not exist: {', '.join(missing)}"
        raise ValueError(message)


READ_BY = re.compile(r"~?(?:\w+\.)?Annotated\[([^<]*), <function .*? at 0x\w+>\]")
"""A type, and the function that checks its values."""


def _signature(*arguments: object) -> tuple[str | None, object]:
    """Return a signature with types alone: the functions that check values have no short name."""
    signature, returned = arguments[-2:]
    if not isinstance(signature, str):
        return None, returned
    return READ_BY.sub(r"\1", signature).replace("<factory>", "{}"), returned


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("doctree-read", _index)
    app.connect("autodoc-process-signature", _signature)
    app.connect("env-updated", _check)
