"""Packages run beside the oldest and the newest sibling in range, from wheels."""

import subprocess
import sys
from pathlib import Path

import pytest

from releasing import siblings

USES = """
import pytest
import lower
import upper

@pytest.mark.short
def test_they_fit():
    assert hasattr(lower, "{name}"), lower.__version__
    print("upper", upper.__version__, "lower", lower.__version__)

def test_is_not_short():
    raise AssertionError
"""


@pytest.fixture
def python(tmp_path):
    """Make an environment for siblings, with this one's pytest, and return its Python."""
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    (library,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (library / "these.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return str(tmp_path / "venv" / "bin" / "python")


def test_a_named_package_is_tried_with_those_that_need_it(repository, tmp_path):
    repository.released("upper", "1.0.0.dev0")
    sources = siblings.gather(repository.root, tmp_path / "sources")
    tried = {
        name: [f"{one.package.name} {one.version}" for one in siblings.sources_to_test(sources, [name])]
        for name in ("lower", "upper")
    }
    upper = ["upper 1.0.0.dev0", "upper 1.0.0.dev0+tree"]
    assert tried == {"lower": [upper[0], "lower 1.0.0.dev0+tree", upper[1]], "upper": upper}


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        siblings.main(["dist_utils"])
    assert "there is no package dist_utils; there are ddp-compress-hooks" in capsys.readouterr().err


def test_the_ends_of_every_range_are_tried(repository, python, capfd):
    for version in ("1.0.0", "1.1.0", "1.2.0"):
        repository.package("lower", version, code=f"since_{version[2]} = old = None")
        repository.commit(f"lower {version}")
        repository.released("lower", version)
    repository.package("upper", "1.0.0", "lower>=1.1,<2", test=USES.format(name="old"))
    repository.commit("upper 1.0.0")
    repository.released("upper", "1.0.0")

    assert siblings.try_all(repository.root, ["upper"], python) == []
    tried = [line.partition(":")[0] for line in capfd.readouterr().out.splitlines()]
    # The release with its newest sibling; what was released together is the past.
    assert tried == [
        "lower 1.2.0+tree, upper 1.0.0",
        "lower 1.1.0, upper 1.0.0+tree",
        "lower 1.2.0+tree, upper 1.0.0+tree",
    ]

    # A name that is in no release, though the range admits them; and one that a release used is gone.
    repository.package("lower", "1.2.0", code="new = None")
    repository.package("upper", "1.1.0", "lower>=1.1,<2", test=USES.format(name="new"))
    repository.commit("a new name")
    broken = siblings.try_all(repository.root, ["upper"], python)
    assert [line.partition(":")[0] for line in broken] == [
        "lower 1.2.0+tree, upper 1.0.0",
        "lower 1.1.0, upper 1.1.0+tree",
    ]
    assert "AssertionError: 1.1.0" in broken[1]
