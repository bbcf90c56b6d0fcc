"""A torch that has renamed one of its private names breaks only what needs it, with an error that says so."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_utils import torch_compat
from dist_utils.torch_compat import MissingTorchFeatureError, private


def test_the_package_can_be_imported_without_any_of_them():
    command = [sys.executable, str(Path(__file__).with_name("missing_names.py")), "dist_utils"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {name: problem for name, problem in found["imports"].items() if problem} == {}
    assert found["bound elsewhere"] == []
    assert "torch._C._current_graph_task_id" in found["imports"]


USES = {
    "_current_graph_task_id": ("torch._C", torch_compat.inside_backward),
    "_current_autograd_node": ("torch._C", torch_compat.in_final_callback),
    "_engine_run_backward": ("torch.autograd.graph", torch_compat.inside_nested_backward),
    "_ExperimentalConfig": ("torch._C._profiler", torch_compat.every_thread),
    "is_batchedtensor": ("torch._C._functorch", lambda: torch_compat.transformed_as(torch.ones(1))),
    "_get_default_store": ("torch.distributed.distributed_c10d", torch_compat.default_store),
}


@pytest.mark.parametrize("name", USES)
def test_the_function_that_needs_one_names_it(name, monkeypatch):
    owner, use = USES[name]
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(MissingTorchFeatureError, match=rf"^torch 2\..* has no {owner}\.{name}, "):
        use()


def test_a_missing_module_and_a_missing_attribute_are_named():
    with pytest.raises(MissingTorchFeatureError, match=r"has no torch\._none\.name, .* needed for a test"):
        private("torch._none", "name", "a test")
    with pytest.raises(MissingTorchFeatureError, match=r"has no Linear\._none, "):
        private(torch.nn.Linear(1, 1), "_none", "a test")
    with pytest.raises(MissingTorchFeatureError, match=r"has no Tensor\._none, "):
        private(torch.Tensor, "_none", "a test")


def test_the_error_reaches_other_processes():
    with pytest.raises(MissingTorchFeatureError) as caught:
        private("torch", "_none", "a test")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
