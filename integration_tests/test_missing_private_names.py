"""Every package can be imported with a torch that lacks any of the private names that it uses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_optim_overlap.optimizers.step_hooks import step_pre_hooks
from ddp_optim_overlap.optimizers.trial import require_passed_trial
from dist_autograd_collectives.transforms import function_transforms_active
from dist_utils.torch_compat import MissingTorchFeatureError, private, traceable_collective

COMMAND = Path(__file__).resolve().parent.parent / "packages/dist-utils/tests/missing_names.py"


@pytest.mark.parametrize(
    "package", ["dist_autograd_collectives", "ddp_compress_hooks", "ddp_quant_hooks", "ddp_optim_overlap"]
)
def test_a_package_can_be_imported_without_any_of_them(package):
    run = subprocess.run([sys.executable, str(COMMAND), package], check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert {name: problem for name, problem in found["imports"].items() if problem} == {}
    assert found["bound elsewhere"] == []


SGD = torch.optim.SGD([torch.ones(1, requires_grad=True)])
USES = {
    "_are_functorch_transforms_active": ("torch._C", function_transforms_active),
    "_global_optimizer_pre_hooks": ("torch.optim.optimizer", lambda: step_pre_hooks(SGD)),
    "TorchDispatchMode": ("torch.utils._python_dispatch", lambda: require_passed_trial(SGD, ())),
}


@pytest.mark.parametrize("name", USES)
def test_the_function_that_needs_one_names_it(name, monkeypatch):
    owner, use = USES[name]
    monkeypatch.delattr(sys.modules[owner], name)
    with pytest.raises(MissingTorchFeatureError, match=rf"has no {owner}\.{name}, "):
        use()


def test_an_operator_or_a_module_that_is_missing_is_named(monkeypatch):
    with pytest.raises(MissingTorchFeatureError, match=r"_c10d_functional\.no_such, "):
        traceable_collective("no_such", torch.ones(1))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", None)
    with pytest.raises(MissingTorchFeatureError, match=r"fsdp\.FSDPModule, which is needed for this test"):
        private("torch.distributed.fsdp", "FSDPModule", "this test")
