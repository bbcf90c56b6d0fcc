"""A run that is saved and resumed has the bits of one that was never stopped."""

import pytest
import torch
from quant_buckets import LEAVES_OUT_BUCKETS, differences
from resumed_runs import COMPLEX, Net, Run, differences_after_resume, resumed, state_maker
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import HierarchicalAllreduceState
from dist_utils.testing import run_ranks


class Mixed(Net):
    """Parameters of several types, and so several buckets from the first pass on."""

    def __init__(self):
        super().__init__()
        self.layers[1].double()
        self.layers[2].bfloat16()
        self.layers[3].to(COMPLEX)  # DDP's buckets of them are real, and twice as long

    def forward(self, x, *, use):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)).real)
        return x.float()


class Reentrant(Net):
    """Buckets arrive in backward passes inside the pass."""

    def forward(self, x, *, use):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.unused(x)


BOTH = {"error_feedback": "both"}
SEVERAL = {"bucket_cap_mb": 0.012}
CASES = {  # the options of the state, and of the model
    "8 bits": (BOTH, SEVERAL),
    "8 bits, means only": ({"error_feedback": "shard"}, SEVERAL),
    "4 bits": ({"bits": 4}, SEVERAL),
    "4 bits, means only, static graph": (
        {"bits": 4, "error_feedback": "shard"},
        {**SEVERAL, "static_graph": True},
    ),
    "small buckets plain": ({**BOTH, "min_bytes": 12_000}, SEVERAL),
    "exact 1d, 16 bits back": ({**BOTH, "exact_1d": True, "gather": "fp16"}, SEVERAL),
    "one bucket": (BOTH, {}),
    "views": (BOTH, {**SEVERAL, "gradient_as_bucket_view": True}),
    "unused": (BOTH, {**SEVERAL, "find_unused_parameters": True, "use": False}),
    # In the first pass of a static graph all buckets arrive as bucket 0, none as the last.
    "types, static graph": (BOTH, {**SEVERAL, "net": Mixed, "use": False, "static_graph": True}),
    "types": (BOTH, {**SEVERAL, "net": Mixed, "use": False, "find_unused_parameters": True}),
    "checkpoints": (BOTH, {**SEVERAL, "net": Reentrant}),
    "checkpoints, static graph": (BOTH, {**SEVERAL, "net": Reentrant, "static_graph": True}),
    # Buckets that no rank uses do not arrive.
    "never used": (BOTH, {**SEVERAL, **LEAVES_OUT_BUCKETS, "use": False}),
    "used in turns": (BOTH, {**SEVERAL, **LEAVES_OUT_BUCKETS, "use": lambda number: number % 2 == 0}),
}


def _resumes(_, names):
    return {name: differences_after_resume(state_maker(**CASES[name][0]), **CASES[name][1]) for name in names}


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["4 bits"]),
        (3, ["exact 1d, 16 bits back", "unused", "types", "checkpoints, static graph", "used in turns"]),
        pytest.param(3, list(CASES), marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(world_size, names):
    for found in run_ranks(_resumes, world_size, names, timeout=240):
        assert {name: difference for name, difference in found.items() if difference} == {}


def _resumes_on_nodes(_):
    def make_on(mesh):
        return lambda: HierarchicalAllreduceState(mesh=mesh, min_bytes=0, **BOTH)

    makers = {
        "nodes": make_on(init_device_mesh("cpu", (2, 2))),
        "nodes with shards": make_on(init_device_mesh("cpu", (4, 1))),  # which two nodes do not have
        "levels": state_maker(**BOTH, levels=(2, 2)),
    }
    return {name: differences_after_resume(make, **SEVERAL) for name, make in makers.items()}


def test_a_resumed_run_on_nodes_or_in_levels_is_the_uninterrupted_one():
    for found in run_ranks(_resumes_on_nodes, 4, timeout=240):
        assert found == {"nodes": {}, "nodes with shards": {}, "levels": {}}


def _joins(rank):
    """Ranks with less data take part outside of backward()."""
    runs = [Run(state_maker(bits=4), **SEVERAL)]
    for number in range(3):
        runs[0].step(number)
    runs.append(resumed(runs[0].save(), state_maker(bits=4), **SEVERAL))
    for run in runs:
        with run.ddp.join():
            for number in range(3, 5 + (rank > 0)):
                run.step(number)
    steps = [run.state.state_dict()["steps"] for run in runs]
    return differences(*([run.weights()] for run in runs)), steps


def test_ranks_that_have_joined_resume_in_the_same_way():
    assert run_ranks(_joins, 3, timeout=90) == [({}, [6, 6])] * 3
