"""How Sphinx makes the site of the pages that tools/site.py gathers: `make docs`."""

import importlib.metadata

project = "tensorstow"
release = importlib.metadata.version("tensorstow")
author = "the tensorstow authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "tensorstow"
html_show_sphinx = False
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False
maximum_signature_line_length = 88
