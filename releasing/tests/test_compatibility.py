"""The compatibility page agrees with the result files."""

import json
import os
import sys

from releasing import compatibility, recorded
from releasing.commands import run
from releasing.compatibility import PAGE, render
from releasing.workspace import ROOT


def test_page_and_results_agree():
    assert PAGE.read_text() == render(), "nox -s compatibility rewrites the page"


def test_a_broken_pair_and_a_failed_run_are_not_hidden(tmp_path):
    (tmp_path / "unit-torch-2.6.0-python-3.10.json").write_text(
        json.dumps(
            {
                "session": "unit",
                "torch": "2.6.0",
                "python": "3.10.1",
                "exit_status": 1,
                "failed": 2,
                "passed": 5,
                "deselected": 3,
                "selected": "packages/lower/tests/test_a.py",
                "date": "2026-01-01",
                "commit": "abc",
            }
        )
    )
    pair = {"package": "upper", "version": "0.1.0", "sibling": "lower", "range": "<1"}
    siblings = {
        "date": "2026-01-01",
        "commit": "abc",
        "torch": "2.6.0",
        "system": "Linux",
        "pairs": [
            {**pair, "sibling_version": "0.1.0", "result": "ok"},
            {**pair, "sibling_version": "0.2.0", "result": "broken", "reason": "ImportError: a | b"},
            {**pair, "sibling_version": "1.0.0", "result": "excluded by range"},
        ],
        "missing": {"lower 0.0.1": "hatchling | is gone"},
        "side_by_side": [
            {
                "packages": {"lower": "0.1.*", "upper": "0.1.*"},
                "installs": {"lower": "0.1.0", "upper": "0.1.0"},
            },
            {"packages": {"lower": "1.0.*", "upper": "0.1.*"}, "installs": None},
        ],
    }
    (tmp_path / "siblings.json").write_text(json.dumps(siblings))
    tests = {"date": "2026-01-02", "commit": "def", "torch": "2.6.0", "system": "Linux"}
    outcome = {"package": "upper", "version": "0.1.0", "siblings": {"lower": "0.2.0"}, "result": "broken"}
    tests |= {"test_files": ["test_a.py"], "tests": [{**outcome, "summary": "1 failed, 2 passed"}]}
    (tmp_path / "sibling-tests.json").write_text(json.dumps(tests))
    page = render(tmp_path)
    counts = "5 passed, 2 failed, 3 deselected"
    assert f"| unit | 2.6.0, 3.10.1 | **red**: {counts} | 2026-01-01, abc |" in page
    assert "Only a part of unit, torch 2.6.0, Python 3.10.1: `packages/lower/tests/test_a.py`." in page
    assert "Recorded: 2026-01-02, commit def" in page
    assert "Only these files of them: test_a.py." in page
    assert "| upper 0.1.0 | lower 0.2.0 | broken: 1 failed, 2 passed |" in page
    assert "| upper | needs | works with | fails with |" in page
    assert "| 0.1.0 | lower `<1` | 0.1.0 | 0.2.0 |" in page
    assert "- upper 0.1.0 with lower 0.2.0: **broken**. ImportError: a \\| b" in page
    assert "| lower beside upper | 0.1.* |" in page
    assert "| 0.1.* | yes |" in page
    assert "| 1.0.* | no |" in page
    assert "| lower 0.0.1 | hatchling \\| is gone |" in page


def test_the_command_compares_without_writing(monkeypatch, tmp_path):
    page = tmp_path / "compatibility.md"
    page.write_text("old")
    monkeypatch.setattr(compatibility, "PAGE", page)
    assert compatibility.main(["--check"]) == 1
    assert page.read_text() == "old"
    assert compatibility.main([]) == 0
    assert compatibility.main(["--check"]) == 0


def test_a_recorded_run_says_what_was_left_out_with_workers_too(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_left():\n    pass\n\n\ndef test_kept():\n    pass\n")
    before = set(recorded.FOLDER.iterdir())
    program = (
        "import sys\nfrom pathlib import Path\nimport pytest\nfrom releasing import record_tests, recorded\n"
    )
    program += "record_tests.version = lambda name: '2.6.0+cpu'\n"
    program += "recorded.write.__defaults__ = (Path(sys.argv[1]),)\n"
    program += "sys.exit(pytest.main(sys.argv[2:], plugins=[]))\n"
    env = {**os.environ, "NOX_CURRENT_SESSION": "unit(2.6.0)", "PYTHONPATH": str(ROOT)}
    arguments = ["-q", "-p", "releasing.record_tests", "-k", "kept", "test_a.py"]
    for number, more in enumerate(([], ["-n", "2"])):
        env["RECORDED_SELECTION"] = ["", "default"][number]
        run([sys.executable, "-c", program, str(tmp_path), *arguments, *more], tmp_path, env=env)
        (file,) = tmp_path.glob("unit-torch-2.6.0-python-*.json")
        result = json.loads(file.read_text())
        assert {key: result[key] for key in ("passed", "deselected")} == {"passed": 1, "deselected": 1}
        assert result["selected"] == ["-q -p releasing.record_tests -k kept test_a.py", "default"][number]
    assert set(recorded.FOLDER.iterdir()) == before, "a worker has written what it knows"
