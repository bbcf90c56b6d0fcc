"""The program of docs/resume.md goes on where it ended: with the same bits, or with more ranks."""

import re

from pages import DOCS, run_program, snippets


def _train(folder, steps, ranks=2):
    """Run the program up to a step, from its last checkpoint; return what each rank has printed."""
    folder.mkdir(exist_ok=True)
    (program,) = snippets(DOCS / "resume.md")
    (folder / "example.py").write_text(program.text)
    output, _ = run_program(folder / "example.py", ranks=ranks, folder=folder, STEPS=str(steps))
    return dict(re.findall(r"rank (\d): (-?[\d.]+)", output))


def test_a_job_that_ended_goes_on(tmp_path):
    _train(tmp_path / "interrupted", 6)
    resumed = _train(tmp_path / "interrupted", 12)
    assert sorted(resumed) == ["0", "1"]
    assert len(set(resumed.values())) == 1
    assert resumed == _train(tmp_path / "through", 12)
    more_ranks = _train(tmp_path / "interrupted", 15, ranks=3)
    assert sorted(more_ranks) == ["0", "1", "2"]
    assert len(set(more_ranks.values())) == 1
