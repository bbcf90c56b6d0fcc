"""The files and folders that "How it works" names exist in the package of their section."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name: path for path in ROOT.glob("packages/*/src/*/__init__.py")}
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "how-it-works.md").read_text(), flags=re.MULTILINE)[1:]
NAME = re.compile(r"`([\w/]+(?:\.(?:py|cpp|cu|h)|/))`")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_named_files_exist(section):
    package = re.search("|".join(PACKAGES), section)
    assert package, "the section names no package"
    folder = PACKAGES[package[0]].parents[2]
    files = [f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()]
    names = [*NAME.findall(section)]
    missing = [
        name
        for name in names
        if not any(f"/{name}" in file if name.endswith("/") else file.endswith(f"/{name}") for file in files)
    ]
    assert names
    assert not missing
