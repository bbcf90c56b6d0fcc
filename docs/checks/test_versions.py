"""Versions and names that stand in several places are the same, or differ where they must."""

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "check.yml").read_text()
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def test_torch():
    noxfile = (ROOT / "noxfile.py").read_text()
    default = re.search(r'DEFAULT_TORCH = "(.+)"', noxfile)[1]
    supported = re.search(r"SUPPORTED_TORCH = \[(.+)]", noxfile)[1].replace("DEFAULT_TORCH", f'"{default}"')
    versions = re.findall(r'"([^"]+)"', supported)
    assert re.findall(r'"([^"]+)"', re.search(r"torch: \[(.+)]", WORKFLOW)[1]) == versions
    assert ", ".join(versions).replace(default, f"{default} (default)") in PAGE


@pytest.mark.parametrize("package", PROJECTS)
def test_python_and_siblings(package):
    project = PROJECTS[package]["project"]
    pythons = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert re.findall(r'"([^"]+)"', re.search(r"python: \[(.+)]", WORKFLOW)[1]) == pythons
    needs = ", ".join(re.match(r"[\w-]+", need)[0] for need in project["dependencies"])
    assert f"| {package} | {needs} |" in PAGE


def test_frameworks():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert ", ".join(f"`{pin}`" for pin in groups["frameworks"]) in PAGE


@pytest.mark.parametrize("package", PROJECTS)
def test_packages_have_the_root_s_settings_of_pytest(package):
    def settings(project):
        return {**project["tool"]["pytest"]["ini_options"], "testpaths": None}

    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings(PROJECTS[package]) == settings(root)


def test_names_of_test_files_are_unique():
    """Otherwise pytest can collect all of them only one folder at a time."""
    folders = [*ROOT.glob("packages/*/tests"), ROOT / "integration_tests"]
    names = [path.name for folder in folders for path in folder.glob("*.py")]
    assert sorted(names) == sorted(set(names))
