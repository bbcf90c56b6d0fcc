"""A run that is saved and resumed has the bits of one that was never stopped."""

import pytest
import torch
from quant_buckets import LEAVES_OUT_BUCKETS
from resumed_runs import Net, Run, complex_if_sent, difference_after_resume, resumed, state_maker
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import HierarchicalAllreduceState
from dist_utils.testing import run_ranks

STATES = {
    "int8 both": {"error_feedback": "both"},
    "int8 shard": {"error_feedback": "shard"},
    "int4 both": {"bits": 4},
    "int4 shard": {"bits": 4, "error_feedback": "shard"},
    "int8 both, small buckets plain": {"error_feedback": "both", "min_bytes": 12_000},
    "int8 shard, small buckets plain": {"error_feedback": "shard", "min_bytes": 12_000},
    "int8 both, exact 1d, 16 bits back": {"error_feedback": "both", "exact_1d": True, "gather": "fp16"},
}
MODELS = {
    "plain": {"bucket_cap_mb": 0.012},
    "other cap": {"bucket_cap_mb": 0.02},
    "one bucket": {},
    "views": {"bucket_cap_mb": 0.012, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": 0.012, "static_graph": True},
    "unused": {"bucket_cap_mb": 0.012, "find_unused_parameters": True, "use": False},
}


def _resumes(rank):
    found = {}
    for name, options in STATES.items():
        # All models for the two most important options; one with several buckets for the others.
        models = MODELS if name in {"int8 both", "int4 shard"} else {"plain": MODELS["plain"]}
        for kind, model in models.items():
            found[name, kind] = difference_after_resume(state_maker(**options), **model)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(world_size):
    for found in run_ranks(_resumes, world_size, timeout=240):
        assert {case: step for case, step in found.items() if step is not None} == {}


def _resumes_on_nodes(rank):
    mesh = init_device_mesh("cpu", (2, 2))

    def make(feedback):
        return lambda: HierarchicalAllreduceState(mesh=mesh, min_bytes=0, error_feedback=feedback)

    nodes = {
        (feedback, kind): difference_after_resume(make(feedback), **MODELS[kind])
        for feedback in ("both", "shard")
        for kind in ("plain", "static graph")
    }
    across = init_device_mesh("cpu", (4, 1))  # with shards, which two nodes would not have
    nodes["shards"] = difference_after_resume(
        lambda: HierarchicalAllreduceState(mesh=across, min_bytes=0, error_feedback="both"), **MODELS["plain"]
    )
    return nodes


def test_a_resumed_run_on_nodes_is_the_uninterrupted_one():
    for found in run_ranks(_resumes_on_nodes, 4, timeout=240):
        assert {case: step for case, step in found.items() if step is not None} == {}


class Mixed(Net):
    """Parameters of several types, and so several buckets from the first pass on."""

    def __init__(self):
        super().__init__()
        self.layers[1].double()
        self.layers[2].bfloat16()

    def forward(self, x, *, use):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


class Complex(Net):
    """DDP's buckets of complex parameters are real, and twice as long."""

    def __init__(self):
        super().__init__()
        self.layers[1].to(complex_if_sent())

    def forward(self, x, *, use):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)).real)
        return x


class Reentrant(Net):
    """Buckets arrive in backward passes inside the pass."""

    def forward(self, x, *, use):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.unused(x)


def _nets(rank):
    """In the first pass of a static graph all buckets arrive as bucket 0, none as the last."""
    make = state_maker(error_feedback="both")
    found = [
        difference_after_resume(make, net=net, use=False, bucket_cap_mb=0.012, **options)
        for net, options in (
            (Mixed, {"static_graph": True}),
            (Mixed, {"find_unused_parameters": True}),
            (Complex, {"find_unused_parameters": True}),
            (Reentrant, {}),
            (Reentrant, {"static_graph": True}),
        )
    ]
    # Buckets that no rank uses do not arrive.
    options = LEAVES_OUT_BUCKETS
    found += [
        difference_after_resume(make, use=use, bucket_cap_mb=0.012, **options)
        for use in (False, lambda number: number % 2 == 0, lambda number: number < 3)
    ]
    return found


def test_types_checkpoints_and_unused_parameters_change_no_bit():
    assert run_ranks(_nets, 3, timeout=150) == [[None] * 8] * 3


def _joins(rank):
    """Ranks with less data take part outside of backward()."""
    runs = [Run(state_maker(bits=4), bucket_cap_mb=0.012)]
    for number in range(3):
        runs[0].step(number)
    runs.append(resumed(runs[0].save(), state_maker(bits=4), bucket_cap_mb=0.012))
    for run in runs:
        with run.ddp.join():
            for number in range(3, 5 + (rank > 0)):
                run.step(number)
    steps = [run.state.state_dict()["steps"] for run in runs]
    return torch.equal(runs[0].weights(), runs[1].weights()), steps


def test_ranks_that_have_joined_resume_in_the_same_way():
    assert run_ranks(_joins, 3, timeout=90) == [(True, [6, 6])] * 3
