"""Checks of the monorepo. ``nox --list`` shows the sessions; arguments after ``--`` go to the tool."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path

import nox
from nox.virtualenv import PassthroughEnv
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"

DEFAULT_TORCH = "2.13.0"
SUPPORTED_TORCH = ["2.6.0", "2.9.1", DEFAULT_TORCH, "2.15.0"]
IMPOSSIBLE = {  # Python and torch
    ("3.10", "2.15.0"): "torch has no wheels",
    ("3.14", "2.6.0"): "torch has no wheels",
    ("3.14", "2.9.1"): "torch.compile refuses Python 3.14 before torch 2.10",
}
FULL_RUNS = [("3.10", "2.6.0"), ("3.11", "2.9.1"), ("3.12", DEFAULT_TORCH), ("3.13", "2.15.0")]
"""Versions of Python and torch that are tested together before a release: each at least once."""
# TORCH_VERSIONS="2.6.0 2.15.0" nox: these versions instead, wherever torch is a parameter.
CHOSEN_TORCH = os.environ.get("TORCH_VERSIONS", "").split()

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "repository", "docs"]
for name in ("mypy", "tests"):
    nox.options.sessions += [f"{name}({version})" for version in CHOSEN_TORCH or [DEFAULT_TORCH]]

ROOT = Path(__file__).parent
PACKAGES = {
    path.parent.name: nox.project.load_toml(path) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
SOURCES = [f"packages/{package}/src" for package in PACKAGES]
# At the end workers run out of work, so the files of the first package, which wait the least, come last.
TESTS = [f"packages/{package}/tests" for package in reversed(PACKAGES)]

# The sessions' own requirements, kept where Dependabot finds them.
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]

# Tests wait: for ranks to start, for peers, for timeouts. More tests than cores keep the cores busy, but each
# worker imports torch and collects all tests.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# xdist would start files with many tests first, and end with a few long tests while other workers are idle.
SIDE_BY_SIDE = ["-n", str(min(CORES, 31) + 1), "--dist", "loadfile", "--no-loadscope-reorder"]

TESTED_ON_HOST: list[str] = []
"""The ``integration`` sessions that ran with ``--no-venv``."""

# Keep byte code of imported modules; compiling all with UV_COMPILE_BYTECODE takes 40 s of processor time.
# A store of torch looks up its peers' names; a name server that loses the question would cost 5 s each time.
ENV: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": None, "RES_OPTIONS": "timeout:1 attempts:1"}
if "PIP_FIND_LINKS" in os.environ:  # a local folder of wheels; uv uses another variable
    ENV["UV_FIND_LINKS"] = os.environ.get("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
SAYS_WHERE_FROM = re.compile("(PIP|UV)_.*(INDEX|FIND_LINKS|TORCH_BACKEND)")
if not shutil.which("nvidia-smi") and not any(map(SAYS_WHERE_FROM.match, os.environ)):
    ENV["UV_TORCH_BACKEND"] = "cpu"  # an index's first choice brings CUDA, 5 GB


def install(
    session: nox.Session, *extra: str, torch: str = DEFAULT_TORCH, packages: list[str] | None = None
) -> None:
    """Install one torch, all packages (editable) and ``extra`` into the venv, in one resolution."""
    python = session.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    if why := IMPOSSIBLE.get((str(python), torch)):
        session.skip(f"Python {python}, torch {torch}: {why}")
    editable = [arg for package in packages or PACKAGES for arg in ("-e", f"packages/{package}[test]")]
    session.install(f"torch=={torch}", *editable, *extra, env=ENV)


def needed(package: str) -> list[str]:
    """Return ``package`` and the siblings that it or its tests need."""
    found = [package]
    project = PACKAGES[package]["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["test"]:
        if (sibling := Requirement(text).name) in PACKAGES:
            found += [name for name in needed(sibling) if name not in found]
    return found


def third_party(package: str) -> list[str]:
    """Return the requirements of ``package`` and its tests, except torch and siblings."""
    project = PACKAGES[package]["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return [need for need in needs if Requirement(need).name not in {"torch", *PACKAGES}]


def tracked(session: nox.Session) -> list[str]:
    """Return the files and folders under version control: a checkout may hold virtual environments, too."""
    listed = str(session.run("git", "ls-tree", "--name-only", "HEAD", external=True, silent=True))
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def torches(versions: list[str]) -> list[nox.param]:
    """Return the parameters of a session that runs once per torch version."""
    return [nox.param(version, id=version) for version in CHOSEN_TORCH or versions]


@nox.session
def lint(session: nox.Session) -> None:
    """Check ruff's rules and format."""
    session.install(*GROUPS["lint"], env=ENV)
    places = [name for name in tracked(session) if (ROOT / name).is_dir() or name.endswith(".py")]
    session.run("ruff", "check", *session.posargs, *places)
    session.run("ruff", "format", "--check", *places)


@nox.session
@nox.parametrize("torch", torches([SUPPORTED_TORCH[0], DEFAULT_TORCH, SUPPORTED_TORCH[-1]]))
def mypy(session: nox.Session, torch: str) -> None:
    """Check the types of every package strictly, with one torch."""
    install(session, *GROUPS["types"], torch=torch)
    # Torch's annotations differ between versions: an "ignore" for one version is unused with another.
    lenient = [] if torch == DEFAULT_TORCH else ["--allow-untyped-calls", "--no-warn-unused-ignores"]
    session.run("mypy", *lenient, *(session.posargs or SOURCES))


def run_everything(session: nox.Session, torch: str, marker: str, *options: str) -> None:
    """Run the unit and integration tests that a marker selects, with one torch."""
    install(session, *GROUPS["demo"], *GROUPS["examples"], *GROUPS["side-by-side"], torch=torch)
    chosen = ["integration_tests", *TESTS, *SIDE_BY_SIDE, "-m", marker, *options, *session.posargs]
    session.run("pytest", *chosen, env=ENV)


@nox.session
@nox.parametrize("torch", torches([DEFAULT_TORCH]))
def tests(session: nox.Session, torch: str) -> None:
    """Run ``unit`` and ``integration`` at once: workers import torch and all tests only once."""
    run_everything(session, torch, "not exhaustive")


@nox.session(default=False)
@nox.parametrize("torch", torches([DEFAULT_TORCH]))
def exhaustive(session: nox.Session, torch: str) -> None:
    """Run the tests that ``tests`` leaves out (large families), with one torch."""
    run_everything(session, torch, "exhaustive")


@nox.session(default=False)
@nox.parametrize("torch", torches(SUPPORTED_TORCH))
def unit(session: nox.Session, torch: str) -> None:
    """Run the unit tests of every package with one torch, except the exhaustive ones."""
    install(session, *GROUPS["side-by-side"], torch=torch)
    chosen = session.posargs or [*TESTS, *SIDE_BY_SIDE, "-m", "not exhaustive"]
    session.run("pytest", *chosen, env=ENV)


@nox.session(default=False)
@nox.parametrize("torch", torches(SUPPORTED_TORCH))
def integration(session: nox.Session, torch: str) -> None:
    """Run training jobs with several packages, on NCCL if there are enough GPUs, else Gloo.

    With ``--no-venv`` also the packages' tests on GPUs, which are part of ``unit`` otherwise.
    """
    env, tests, how = ENV, ["integration_tests"], SIDE_BY_SIDE
    if isinstance(session.virtualenv, PassthroughEnv):  # --no-venv: the host's own torch, nothing to install
        if TESTED_ON_HOST:
            session.skip("the host has one torch, which the first of these sessions has tested")
        TESTED_ON_HOST.append(torch)
        paths = [str(ROOT / source) for source in SOURCES]
        if "PYTHONPATH" in os.environ:  # some hosts provide torch in this way
            paths.append(os.environ["PYTHONPATH"])
        env = {**env, "PYTHONPATH": os.pathsep.join(paths)}
        tests += map(str, sorted(ROOT.glob("packages/*/tests/test_*_on_gpu.py")))
        how = ["-p", "no:benchmark"]  # a host's pytest-benchmark would warn with -n
    else:
        install(session, *GROUPS["demo"], *GROUPS["examples"], *GROUPS["side-by-side"], torch=torch)
        if shutil.which("nvidia-smi"):  # GPUs allow only one test at a time
            how = []
    chosen = ["-m", "not exhaustive", *session.posargs]  # the last -m counts
    session.run("python", "-m", "pytest", *tests, *how, *chosen, env=env, external=True)


@nox.session(default=False)
@nox.parametrize(("python", "torch"), FULL_RUNS, ids=[f"{python}, {torch}" for python, torch in FULL_RUNS])
def compatibility(session: nox.Session, torch: str) -> None:
    """Run all tests but the exhaustive ones, of a committed tree; note it in docs/compatibility.md."""
    session.run(
        "git", "diff", "--exit-code", "--stat", "HEAD", "--", ":!docs/compatibility.md", external=True
    )
    commit = str(session.run("git", "rev-parse", "--short", "HEAD", external=True, silent=True)).strip()
    # Not in create_tmp(), which moves TMPDIR: sockets of multiprocessing need short paths.
    report = str(ROOT / ".nox" / "report.xml")
    run_everything(session, torch, "not exhaustive", f"--junitxml={report}")
    session.run("python", "-m", "releasing.compatibility", report, commit)


@nox.session(default=False)
def frameworks(session: nox.Session) -> None:
    """Test Lightning, Accelerate and Transformers, and the programs of docs/frameworks.md."""
    install(session, *GROUPS["frameworks"], *GROUPS["side-by-side"])
    files = [f"integration_tests/test_frameworks{which}.py" for which in ("", "_fsdp2")]
    tests = session.posargs or [*files, *SIDE_BY_SIDE]
    session.run("pytest", *tests, env=ENV)


@nox.session(default=False)
@nox.parametrize("package", [nox.param(package, id=package) for package in PACKAGES])
def alone(session: nox.Session, package: str) -> None:
    """Run the unit tests of one package with only its declared requirements."""
    install(session, packages=needed(package))
    session.run("pytest", f"packages/{package}/tests", *session.posargs, env=ENV)


@nox.session(default=False, venv_backend="uv")
def lowest(session: nox.Session) -> None:
    """Run the unit tests with the lowest declared version of every requirement except siblings."""
    editable = [arg for package in PACKAGES for arg in ("-e", f"packages/{package}[test]")]
    session.install("--resolution=lowest-direct", *editable, env=ENV)
    session.run("pytest", *(session.posargs or TESTS), env=ENV)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Run property tests with new random examples again and again: ``-- --minutes 60 PYTEST-ARGUMENTS``."""
    install(session)
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0)
    options, others = parser.parse_known_args(session.posargs)
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        session.run("pytest", "-m", "hypothesis", "--hypothesis-profile=default", *(others or TESTS), env=ENV)


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """Run the compiled kernels under sanitizers (address, undefined, thread) and valgrind; needs GCC."""
    install(session, packages=needed("ddp-quant-hooks"))
    folder = ROOT / "packages/ddp-quant-hooks"
    library = Path(session.create_tmp()) / "cpu_kernels.so"
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    session.run("python", str(folder / "build_cpu_kernels.py"), str(library), *flags)
    compiler = os.environ.get("CXX", "c++")
    # With the C++ library, or the sanitizer finds no way to pass on what torch throws.
    runtime = [
        str(session.run(compiler, f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    env = {
        **ENV,
        "DDP_QUANT_HOOKS_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks at exit
    }
    tests = [str(path) for path in sorted(folder.glob("tests/test_kernel_*.py"))]
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=env)
    # Without Python, which has races and leaks of its own.
    driver = str(Path(session.create_tmp()) / "kernel_driver")
    build = ["python", str(folder / "build_cpu_kernels.py"), driver, "--driver", "-g"]
    session.run(*build, "-fsanitize=thread")
    session.run(driver, "1", "3", "1500000", external=True)  # enough values for four threads
    if shutil.which("valgrind"):
        session.run(*build)
        session.run("valgrind", "--quiet", "--error-exitcode=9", driver, "2", "20", "3000", external=True)


@nox.session
def repository(session: nox.Session) -> None:
    """Test the commands in releasing/; no torch."""
    session.install(*GROUPS["releasing"], "pytest>=8", env=ENV)
    session.run("python", "-m", "pytest", "-o", "addopts=", *(session.posargs or ["releasing/tests"]))


@nox.session(default=False)
def siblings(session: nox.Session) -> None:
    """Run short suites, from wheels, beside the oldest and newest siblings in range: ``-- [NAME ...]``."""
    needs = {need for package in PACKAGES for need in third_party(package)}
    session.install(f"torch=={DEFAULT_TORCH}", *sorted(needs), *GROUPS["releasing"], env=ENV)
    session.run("python", "-m", "releasing.siblings", *session.posargs, env=ENV)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Release a package, as a dry run without --yes: ``-- NAME minor|patch|major [--yes]``."""
    session.install(*GROUPS["releasing"], "nox[uv]", env=ENV)
    session.run("python", "-m", "releasing.release", *session.posargs, env=ENV)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build sdists and wheels in dist/, of all packages or ``-- NAME ...``, and check them."""
    session.install(*GROUPS["build"], env=ENV)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    pinned = ["--build-constraint", "releasing/build-requirements.txt"]
    for package in session.posargs or PACKAGES:
        session.run("uv", "build", *pinned, "--out-dir", "dist", f"packages/{package}", env=ENV)
    session.run("twine", "check", "--strict", *map(str, sorted(ROOT.glob("dist/*-*"))))


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Inject faults, restart jobs, train long: hours; ``-- --faults 50 --minutes 20 --seed 1``."""
    install(session)
    session.run("python", "integration_tests/soak", *session.posargs, env={**ENV, "OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small model over 1 Gbit/s, with several ways to average gradients: ``-- --rate 100mbit``."""
    editable = [arg for package in PACKAGES for arg in ("-e", f"packages/{package}")]
    session.install(f"torch=={DEFAULT_TORCH}", *editable, *GROUPS["demo"], env=ENV)
    # After Ctrl-C the demo has this long to end its processes.
    session.run("python", "benchmarks/demo.py", *session.posargs, env=ENV, interrupt_timeout=5.0)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run all benchmarks, or ``-- NAME ... [OPTION ...]``: hours; ``-- --quick``: ten minutes."""
    install(session, *GROUPS["demo"], *GROUPS["examples"], *GROUPS["bench"])
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    if "--quick" in session.posargs:
        chosen = [name for name in session.posargs if name != "--quick"]
        session.run("python", "benchmarks/repeat_claims.py", *chosen, env=env)
        return
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(ROOT.glob("benchmarks/bench_*.py"))}
    names = [name for name in session.posargs if name in scripts]
    options = [option for option in session.posargs if option not in names]
    for name in names or scripts:
        session.run("python", str(scripts[name]), *options, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site in docs/_build/html, check links and spelling; ``-- --external``: other hosts, too."""
    install(session, *GROUPS["docs"])
    session.run("codespell", *tracked(session))
    build = ["sphinx-build", "-W", "--keep-going", "--quiet"]
    session.run(*build, "-b", "html", "docs", "docs/_build/html", env=ENV)
    # Code blocks run in ``integration``: see test_pages.py, also for those that run elsewhere.
    session.run("python", "-m", "pytest", "docs/checks", env=ENV)
    if "--external" in session.posargs:
        session.run(*build, "-b", "linkcheck", "docs", "docs/_build/linkcheck", env=ENV)
