"""A step with gradients that were not averaged is an error in true words; a legal program hears nothing."""

import re
import warnings

import pytest
import torch
from averaging_cases import KINDS, LEGAL, TOLD, Job
from pages import DOCS

from dist_utils import require_same_on_all_ranks
from dist_utils.testing import run_ranks

WORDS = ("bucket", "average", "hook")

ON_PAGE = [
    part.strip()
    for message in re.findall(r"`([^`\n]+)`", (DOCS / "errors.md").read_text())
    for part in message.split("…")
    if len(part.split()) > 3
]
"""What can be searched for on the page of errors."""


def _run(program, kind):
    """Return what a program was told on this rank; nothing if it was told nothing."""
    job = Job(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(job)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "".join(
        f"warning: {one.message}" for one in caught if any(word in f"{one.message}" for word in WORDS)
    )


def _all_told(rank, kind, names):
    torch.set_num_threads(1)
    return {name: _run(TOLD[name][0], kind) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_an_average_is_an_error_that_names_its_cause(kind):
    for said in run_ranks(_all_told, 2, kind, list(TOLD), timeout=300):
        for name, (_, words) in TOLD.items():
            assert any(some in said[name] for some in words), f"{name}: {said[name]}"
            assert any(part in said[name] for part in ON_PAGE), f"not on the page: {said[name]}"


def _all_legal(rank, kind, names):
    torch.set_num_threads(1)
    found = {}
    for name in names:
        job = Job(kind)
        said = _run(lambda _, name=name, job=job: LEGAL[name](job), kind)
        if not said and hasattr(job, "net"):
            require_same_on_all_ranks(job.net)
        found[name] = said
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_averages_or_steps_alone_on_purpose_hears_nothing(kind):
    for said in run_ranks(_all_legal, 2, kind, list(LEGAL), timeout=300):
        assert {name: text for name, text in said.items() if text} == {}
