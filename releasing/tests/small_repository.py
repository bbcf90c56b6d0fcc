"""A repository of two packages, made for one test: ``upper`` needs ``lower``."""

from pathlib import Path

from releasing.commands import git

ROOT = Path(__file__).parents[2]


def commit(root: Path, message: str) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(root, "rev-parse", "HEAD").strip()


def write_package(
    root: Path, name: str, version: str, *needs: str, entries: str = "", tests: tuple[str, ...] = ()
) -> None:
    folder = root / "packages" / name
    source = folder / "src" / name
    source.mkdir(parents=True, exist_ok=True)
    (folder / "changelog.d").mkdir(exist_ok=True)
    (folder / "changelog.d" / ".gitignore").write_text("!.gitignore\n")
    (source / "__init__.py").write_text(f'"""Package."""\n\n__version__ = "{version}"\n')
    marker = "<!-- towncrier release notes start -->\n"
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{marker}\n{entries}")
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{name}"\ndynamic = ["version"]\ndependencies = {list(needs)!r}\n'
        f"[project.optional-dependencies]\ntest = {list(tests)!r}\n"
        f'[tool.hatch.version]\npath = "src/{name}/__init__.py"\n'
    )


def start(root: Path) -> Path:
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "A Tester")
    git(root, "config", "user.email", "tester@example.org")
    (root / "towncrier.toml").write_text((ROOT / "towncrier.toml").read_text())
    (root / "README.md").write_text(
        "| [lower](packages/lower) | 0.1.0 |\n| [upper](packages/upper) | 0.1.0 |\n"
    )
    write_package(root, "lower", "0.1.0", entries="## 0.1.0\n")
    write_package(root, "upper", "0.1.0", "lower>=0.1,<1", entries="## 0.1.0\n")
    commit(root, "begin")
    return root
