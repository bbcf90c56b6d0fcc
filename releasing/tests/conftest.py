"""A repository of two packages: ``upper`` needs ``lower``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from releasing.workspace import ROOT, run

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
dynamic = ["version"]
dependencies = {needs}

[tool.hatch.version]
path = "src/{name}/__init__.py"

[tool.pytest.ini_options]
markers = ["short: also run beside older and newer siblings"]
"""


class Repository:
    """A repository that is changed like one by hand."""

    def __init__(self, root):
        self.root = root
        (root / "releasing").mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A Tester")
        self.git("config", "user.email", "tester@example.org")
        self.write("towncrier.toml", (ROOT / "towncrier.toml").read_text())
        self.write("releasing/releases.txt", "# What was released.\n")
        self.write("pyproject.toml", '[tool.torch-dist-extras]\nrepository = "https://example.org/here"\n')
        self.package("lower", "1.0.0.dev0")
        self.package("upper", "1.0.0.dev0", "lower>=1.0.0.dev0,<2")
        self.commit("begin")

    def git(self, *arguments):
        return run(["git", *arguments], self.root).strip()

    def write(self, name, text):
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def package(self, name, version, *needs, code="", test=""):
        folder = f"packages/{name}"
        self.write(f"{folder}/pyproject.toml", PROJECT.format(name=name, needs=list(needs)))
        self.write(
            f"{folder}/src/{name}/__init__.py", f'"""Package."""\n\n__version__ = "{version}"\n{code}\n'
        )
        self.write(f"{folder}/CHANGELOG.md", "# Changelog\n\n<!-- towncrier release notes start -->\n")
        if test:
            self.write(f"{folder}/tests/test_{name}.py", test)

    def note(self, name, file="+new.added.md"):
        self.write(f"packages/{name}/changelog.d/{file}", "Something new.\n")

    def commit(self, message):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        return self.git("rev-parse", "HEAD")

    def released(self, name, version):
        """Write down that HEAD is a release."""
        file = self.root / "releasing/releases.txt"
        file.write_text(f"{file.read_text()}{name} {version} {self.git('rev-parse', 'HEAD')}\n")
        self.commit(f"{name} {version} is released")


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "repository")
