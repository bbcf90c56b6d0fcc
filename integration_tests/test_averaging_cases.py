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


def _run(program, job):
    """Return what a program was told on this rank; nothing if it was told nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(job)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "".join(
        f"warning: {one.message}" for one in caught if any(word in f"{one.message}" for word in WORDS)
    )


def _all(_, kind):
    """Return what each program of both kinds was told."""
    torch.set_num_threads(1)
    told = {name: _run(program, Job(kind)) for name, (program, _) in TOLD.items()}
    legal = {}
    for name, program in LEGAL.items():
        job = Job(kind)
        legal[name] = _run(program, job)
        if not legal[name] and hasattr(job, "net"):
            require_same_on_all_ranks(job.net)
    return told, legal


@pytest.fixture(scope="module", params=KINDS)
def said(request):
    return run_ranks(_all, 2, request.param, timeout=300)


def test_a_step_without_an_average_is_an_error_that_names_its_cause(said):
    for told, _ in said:
        for name, (_, words) in TOLD.items():
            assert any(some in told[name] for some in words), f"{name}: {told[name]}"
            assert any(part in told[name] for part in ON_PAGE), f"not on the page: {told[name]}"


def test_a_program_that_averages_or_steps_alone_on_purpose_hears_nothing(said):
    for _, legal in said:
        assert {name: text for name, text in legal.items() if text} == {}
