"""A torch that lacks a private name breaks only what needs it, with an error that names it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import dist_autograd_collectives as dac
from ddp_compress_hooks import all_reduce
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import MissingTorchFeatureError

COMMAND = Path(__file__).resolve().parent.parent / "packages/dist-utils/tests/missing_names.py"
PACKAGES = ["dist_autograd_collectives", "ddp_compress_hooks", "ddp_quant_hooks", "ddp_optim_overlap"]


def test_every_package_can_be_imported_without_any_of_them():
    command = [sys.executable, str(COMMAND), *PACKAGES]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {name: problem for name, problem in found["imports"].items() if problem} == {}
    assert found["bound elsewhere"] == []


def _overlap():
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


USES = {  # by the name, a function that needs it, of each package
    "torch._C._are_functorch_transforms_active": lambda: dac.all_reduce(torch.ones(2)),
    "torch._C._functorch.is_functorch_wrapped_tensor": lambda: all_reduce(torch.ones(2)),
    "torch.distributed.fsdp.FSDPModule.set_all_reduce_hook": lambda: quantize_all_reduce(
        torch.nn.Linear(2, 2), QuantizedAllreduceState()
    ),
    "torch._C._current_graph_task_id": _overlap,
}


def _lack_each(_):
    for name, use in USES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(name, raising=False)  # older versions lack some
            text = rf"\.{name.rpartition('.')[2]}, which is needed for"
            with pytest.raises(MissingTorchFeatureError, match=text):
                use()


def test_a_function_that_needs_one_names_it():
    run_ranks(_lack_each, 1)
