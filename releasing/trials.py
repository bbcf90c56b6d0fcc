"""Install versions beside each other in one environment, and run programs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from releasing.commands import CommandError, git, run
from releasing.workspace import Package

PROGRAM = Path(__file__).with_name("short_program.py")
PROGRAM_LIMIT = 1000.0  # seconds; the program ends itself earlier
TESTS_LIMIT = 3600.0
SUMMARY = re.compile(r"^=* ?(\d+ [a-z]+.*) in [\d.]+s.*$", re.MULTILINE)
ERROR = re.compile(r"^(?:\[rank\d+\]: |E +)?((?:\w+\.)*\w*(?:Error|Exception): .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        ok: Whether it succeeded.
        text: The summary of passed tests, or the reason for the failure.
    """

    ok: bool
    text: str


def own_environment() -> dict[str, str]:
    """Return this process's variables, except those that would make the checkout importable elsewhere."""
    return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTEST_ADDOPTS"}}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with torch and the tests' requirements, in which siblings are replaced.

    Attributes:
        python: Its interpreter.
        wheels: A folder with the wheels of all versions.
        names: The packages of the repository.
    """

    python: Path
    wheels: Path
    names: Sequence[str]

    def install(self, pins: Mapping[str, Version]) -> Outcome:
        """Install exactly ``pins`` and the siblings that they need, and no other sibling.

        The installer resolves them from the wheels alone, as for a user.
        """
        run(["uv", "pip", "uninstall", "--quiet", "--python", str(self.python), *self.names], self.wheels)
        command = ["uv", "pip", "install", "--quiet", "--python", str(self.python), "--no-index"]
        command += ["--find-links", str(self.wheels)]
        command += [f"--refresh-package={name}" for name in self.names]
        try:
            # "==0.5.0" would also accept 0.5.0+tree, and prefer it.
            run([*command, *(f"{name}==={version}" for name, version in pins.items())], self.wheels)
        except CommandError as error:
            return Outcome(ok=False, text=_resolver_reason(str(error)))
        return Outcome(ok=True, text="")

    def installed(self) -> dict[str, str]:
        """Return the version of each installed sibling."""
        lines = run(["uv", "pip", "freeze", "--python", str(self.python)], self.wheels).splitlines()
        found = dict(line.split("==", 1) for line in lines if "==" in line)
        # A wheel installed by path would be listed as "name @ file:..."; these are installed by name.
        return {name: found[name] for name in self.names if name in found}

    def program(self, package: str) -> Outcome:
        """Run the short program of ``package`` on two ranks."""
        done = self._run([str(PROGRAM), package], Path(tempfile.gettempdir()), PROGRAM_LIMIT)
        if done is None:
            return Outcome(ok=False, text=f"it did not end within {PROGRAM_LIMIT:.0f} s")
        return Outcome(ok=done.returncode == 0, text="" if done.returncode == 0 else _last_error(done.stderr))

    def tests(self, root: Path, package: Package, commit: str | None, files: Sequence[str] = ()) -> Outcome:
        """Run the tests that ``package`` had at ``commit`` (None: those of the checkout).

        Args:
            root: The repository.
            package: The package whose tests run.
            commit: The commit that they are taken from.
            files: Names of test files; only those that exist are run.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _lay_out_tests(root, package, commit, folder)
            tests = folder / package.folder / "tests"
            chosen = [str(tests / file) for file in files if (tests / file).exists()]
            if files and not chosen:
                return Outcome(ok=True, text="none of the chosen files is there")
            chosen = chosen or [str(tests)]
            # The copy is pytest's rootdir, so an old commit's tests run under that commit's settings.
            done = self._run(["-m", "pytest", "-q", "--tb=line", *chosen], folder, TESTS_LIMIT)
        if done is None:
            return Outcome(ok=False, text=f"they did not end within {TESTS_LIMIT:.0f} s")
        counts = SUMMARY.findall(done.stdout)
        failed = re.findall(r"^(?:FAILED|ERROR) (?:.*/)?(\S+)", done.stdout, re.MULTILINE)
        text = counts[-1] if counts else _last_error(done.stdout + done.stderr)
        return Outcome(ok=done.returncode == 0, text="; ".join([text, *failed[:10]]))

    def _run(
        self, arguments: list[str], folder: Path, limit: float
    ) -> subprocess.CompletedProcess[str] | None:
        env, command = own_environment(), [str(self.python), *arguments]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=err)  # noqa: S603
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _lay_out_tests(root: Path, package: Package, commit: str | None, folder: Path) -> None:
    # The package's folder and the tests' settings. Its src is not on the path, so imports find the wheel.
    wanted = ["pyproject.toml", package.folder]
    if commit is None:
        for name in git(root, "ls-files", "-z", *wanted).split("\0"):
            if name and (root / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
    else:
        archive = folder / "tests.tar"
        git(root, "archive", f"--output={archive}", commit, *wanted)
        run(["tar", "--extract", "--file", str(archive)], folder)
        archive.unlink()


def _last_error(text: str) -> str:
    # The environment's path is irrelevant, and differs between machines.
    errors = ERROR.findall(re.sub(r"/\S*/site-packages/", "", text))
    return str(errors[-1]) if errors else (text.strip().splitlines() or ["no message"])[-1]


def _resolver_reason(text: str) -> str:
    words = " ".join(text.split())
    return words[words.find("Because ") :] if "Because " in words else words
