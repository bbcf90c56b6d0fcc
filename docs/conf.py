"""Sphinx configuration."""

project = "torch-dist-extras"
author = "the torch-dist-extras authors"
copyright = "2026, " + author  # noqa: A001 - Sphinx's name for it

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_custom_sections = [("Cost", "Note")]
