"""Workflows only call nox, and its sessions and versions exist."""

import re
import subprocess
import sys

import pytest
import yaml
from small_repository import commit, write_package

from releasing.commands import git
from releasing.publish import package_of_tag
from releasing.workspace import ROOT, metadata, packages, tomllib

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Sessions whose output a person reads or keeps. ``release`` calls ``wheels``.
BY_HAND = {"bench", "compatibility", "demo", "fuzz", "fuzz_bytes", "release", "soak", "wheels"}
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
INSTALL = 'python -m pip install "nox[uv]"'


def jobs():
    for file in WORKFLOWS:
        for name, job in yaml.safe_load(file.read_text())["jobs"].items():
            yield f"{file.name} {name}", job


def combinations(job):
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    left_out = matrix.pop("exclude", [])
    made = [{}]
    for key, values in matrix.items():
        made = [{**one, key: value} for one in made for value in values]
    return [one for one in made if one not in left_out]


def sessions_named():
    for where, job in jobs():
        for step in job["steps"]:
            for one in combinations(job):
                command = re.sub(
                    r"\$\{\{ matrix\.(\w+) }}", lambda found, one=one: one[found[1]], step.get("run", "")
                )
                if command.startswith("nox -s "):
                    yield from (
                        (where, session) for session in re.findall(r'"([^"$]+)"|(?<=-s )(\w+)', command)
                    )


def test_workflows_run_nox_and_nothing_else():
    assert len(WORKFLOWS) == 2
    for where, job in jobs():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands[0] == INSTALL, where
        assert all(command.startswith("nox -s ") for command in commands[1:]), where
        assert all(
            re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step
        )


def test_workflows_name_every_session_that_exists_and_no_other():
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    known = set(re.findall(r"^[*-] (\S+)", listed, re.MULTILINE))
    sessions = {name.split("(")[0] for name in known}
    named = {quoted or bare for _, (quoted, bare) in sessions_named()}
    assert {"unit(2.6.0)", "integration(2.15.0)"} <= named
    assert named <= known | sessions, named - known - sessions
    assert sessions - {name.split("(")[0] for name in named} == BY_HAND


def test_the_matrix_has_the_torches_and_pythons_that_the_packages_support():
    (matrix,) = (job["strategy"]["matrix"] for where, job in jobs() if where.endswith(" tests"))
    noxfile = (ROOT / "noxfile.py").read_text()
    default = re.search(r'DEFAULT_TORCH = "(.+)"', noxfile)[1]
    supported = re.search(r"SUPPORTED_TORCH = \[(.+)]", noxfile)[1].replace("DEFAULT_TORCH", f'"{default}"')
    assert matrix["torch"] == re.findall(r'"([^"]+)"', supported)
    for package in packages():
        classifiers = metadata((ROOT / package.folder / "pyproject.toml").read_text())["classifiers"]
        pythons = [text.rsplit(" ", 1)[1] for text in classifiers if re.search(r":: 3\.\d+$", text)]
        assert pythons == matrix["python"], package.name


def test_the_compatibility_page_has_the_versions_of_frameworks():
    pins = GROUPS["frameworks"]
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert pins
    assert [pin for pin in pins if f"`{pin}`" not in page] == []


def test_packages_share_the_settings_of_tests_and_the_place_of_the_sources():
    def pytest_settings(folder):
        settings = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["pytest"][
            "ini_options"
        ]
        return {key: value for key, value in settings.items() if key != "testpaths"}

    sources = set()
    for package in packages():
        assert pytest_settings(package.folder) == pytest_settings(""), package.name
        project = metadata((ROOT / package.folder / "pyproject.toml").read_text())
        assert project["authors"]
        sources.add(project["urls"]["Source"].removesuffix(package.folder))
    assert len(sources) == 1, sources


def test_requirements_of_sessions_are_pinned_where_dependabot_looks():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    (folders,) = (update["directories"] for update in updates if update["package-ecosystem"] == "pip")
    assert "/" in folders
    assert '=="' not in re.sub(r'f"torch=="?', "", (ROOT / "noxfile.py").read_text())
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["additional_dependencies"] for hook in hooks] == [GROUPS["lint"]] * len(hooks)


def test_workflows_take_torch_for_cpus_and_one_job_alone_may_upload():
    for file in WORKFLOWS:
        assert yaml.safe_load(file.read_text())["env"]["UV_TORCH_BACKEND"] == "cpu", file.name
    uploading = {where for where, job in jobs() if "id-token" in job.get("permissions", {})}
    assert uploading == {"publish.yml upload"}


def test_files_that_the_weekly_run_names_exist():
    (command,) = (
        step["run"] for _, job in jobs() for step in job["steps"] if "--files" in step.get("run", "")
    )
    names = command.split("--files ")[1].split()
    there = {path.name for path in ROOT.glob("packages/*/tests/test_*.py")}
    assert set(names) <= there


def test_a_tag_must_be_of_a_package_and_of_its_release(repository):
    def refused(tag, problem):
        with pytest.raises(ValueError, match=problem):
            package_of_tag(tag, repository)

    assert package_of_tag("upper-v0.1.0", repository).name == "upper"
    refused("upper-v0.2.0", "version 0.1.0")
    refused("other-v0.1.0", "upper")
    refused("upper-0.1.0", "NAME-v")

    write_package(repository, "upper", "0.2.0", entries="## 0.1.0\n")
    commit(repository, "the number alone")
    refused("upper-v0.2.0", "has no entry")
    write_package(repository, "upper", "0.2.0", entries="## 0.2.0 (2026-01-01)\n")
    released = commit(repository, "upper 0.2.0")
    assert package_of_tag("upper-v0.2.0", repository).name == "upper"
    (repository / "packages/upper/changelog.d/+later.fixed.md").write_text("Later.\n")
    commit(repository, "a note")
    refused("upper-v0.2.0", r"\+later\.fixed\.md came after")
    git(repository, "rm", "--quiet", "packages/upper/changelog.d/+later.fixed.md")
    later = commit(repository, "no note, but later")
    git(repository, "tag", "upper-v0.2.0")
    refused("upper-v0.2.0", f"is on {later[:12]}, but 0.2.0 was released from {released[:12]}")
