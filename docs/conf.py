"""Sphinx configuration."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).parent / "checks"))  # for the extensions there

project = "torch-dist-extras"
author = "the torch-dist-extras authors"
copyright = "2026, " + author  # noqa: A001 - Sphinx's name for it

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "api_fields",
    "code_host",
    "line_breaks",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
# Furo's own underlines modules and classes like links.
pygments_dark_style = "github-dark"
html_domain_indices = False  # The sidebar lists the packages.
html_title = project
repository = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"][project][
    "repository"
]
if repository:  # a link from every page to its source
    html_theme_options = {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_static_path = ["_static"]
html_css_files = ["site.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Only what a docstring describes: dataclasses describe their fields, and errors nothing.
autodoc_typehints_description_target = "documented_params"
napoleon_custom_sections = ["Cost", "Source"]
