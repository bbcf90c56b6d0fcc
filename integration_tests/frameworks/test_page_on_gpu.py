"""The snippets of docs/frameworks.md on two nodes with a GPU each, with NCCL."""

import pytest
import torch.distributed as dist
from page import run
from ranks import needs, run_on_gpus

from dist_utils.testing import nccl_can_run, same_on_all_ranks

pytestmark = pytest.mark.gpu


def _section(title):
    found = run(title, on_gpus=True)
    parameters = list(found["net"].parameters())
    assert same_on_all_ranks(parameters)
    sent = found["sent"]
    return parameters[0].device.type, dist.get_backend(), sent.bytes_sent / sent.bytes_of_allreduce


@pytest.mark.parametrize(
    "title",
    [
        pytest.param("Lightning", marks=needs("lightning")),
        pytest.param("Accelerate", marks=needs("accelerate")),
        pytest.param("Transformers", marks=needs("transformers")),
    ],
)
def test_the_snippets_of_a_section_run(title, tmp_path):
    if not nccl_can_run(2):
        pytest.skip("NCCL needs a GPU for each of 2 ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    for device, backend, ratio in run_on_gpus(_section, tmp_path, title):
        assert "nccl" in backend
        assert 0 < ratio < 0.275
        assert device == ("cpu" if title == "Lightning" else "cuda")  # Lightning moves models back
