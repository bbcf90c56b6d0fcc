"""The page of compatibility is what the result files say."""

import json

from releasing import compatibility
from releasing.compatibility import PAGE, render


def test_page_and_results_agree():
    assert PAGE.read_text() == render(), "nox -s compatibility writes the page anew"


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
                "selected": ["packages/lower/tests/test_a.py"],
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
        "test_files": [],
        "pairs": [
            {**pair, "sibling_version": "0.1.0", "result": "ok"},
            {**pair, "sibling_version": "0.2.0", "result": "broken", "reason": "ImportError: a | b"},
            {**pair, "sibling_version": "1.0.0", "result": "excluded by range"},
        ],
        "missing": {"lower 0.0.1": "hatchling | is gone"},
        "tests": [],
        "side_by_side": [
            {
                "packages": {"lower": "0.1.*", "upper": "0.1.*"},
                "installs": {"lower": "0.1.0", "upper": "0.1.0"},
            },
            {"packages": {"lower": "1.0.*", "upper": "0.1.*"}, "installs": None},
        ],
    }
    (tmp_path / "siblings.json").write_text(json.dumps(siblings))
    page = render(tmp_path)
    assert "| unit | 2.6.0 | 3.10.1 | **red** | 5 passed, 2 failed | test_a.py | 2026-01-01 | abc |" in page
    assert "| upper 0.1.0 | lower 0.1.0 | `<1` | ok |" in page
    assert "| upper 0.1.0 | lower 0.2.0 | `<1` | **broken**: ImportError: a \\| b |" in page
    assert "| upper 0.1.0 | lower`<1` | 1.0.0 |" in page
    assert "| lower 1.0.* | upper 0.1.* | no |" in page
    assert "| lower 0.0.1 | hatchling \\| is gone |" in page


def test_the_command_compares_without_writing(monkeypatch, tmp_path):
    page = tmp_path / "compatibility.md"
    page.write_text("old")
    monkeypatch.setattr(compatibility, "PAGE", page)
    assert compatibility.main(["--check"]) == 1
    assert page.read_text() == "old"
    assert compatibility.main([]) == 0
    assert compatibility.main(["--check"]) == 0
