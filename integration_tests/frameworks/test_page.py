"""Every snippet of docs/frameworks.md runs, section by section, on two ranks."""

import pytest
from page import ON_GPUS, PAGE, run, sections
from ranks import needs, run_as_torchrun

from dist_utils.testing import same_on_all_ranks

_PACKAGES = {"Lightning": "lightning", "Accelerate": "accelerate", "Transformers": "transformers"}


def _section(title):
    found = run(title)
    if title in _PACKAGES:
        assert same_on_all_ranks(list(found["net"].parameters()))
    return found.get("sent")


@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=needs(_PACKAGES.get(title, "torch"))) for title in sections()],
)
def test_the_snippets_of_a_section_run(title, tmp_path):
    for sent in run_as_torchrun(_section, tmp_path, title):
        if title in _PACKAGES:
            assert 0 < 4 * sent.bytes_sent < 1.1 * sent.bytes_of_allreduce


def test_what_differs_on_gpus_is_on_the_page():
    text = PAGE.read_text()
    assert [change for change in ON_GPUS if change not in text] == []
