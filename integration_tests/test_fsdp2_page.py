"""The snippets of docs/fsdp2.md run unchanged."""

import re
from pathlib import Path

import pytest
from torch.distributed import fsdp

from dist_utils.testing import run_ranks, same_on_all_ranks

PAGE = Path(__file__).parent.parent / "docs" / "fsdp2.md"


def _run_the_page(_):
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(snippet, str(PAGE), "exec"), names)
    between = names["mesh"]["node"].get_group()
    trained = [parameter.to_local() for parameter in names["model"].parameters()]
    return same_on_all_ranks(trained, between), names["state"].statistics.bytes_ratio


@pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"),
    reason="this torch has no FSDPModule.set_all_reduce_hook",
)
def test_the_page_runs():
    for same, ratio in run_ranks(_run_the_page, 4, timeout=100):
        assert same
        assert ratio < 0.3
