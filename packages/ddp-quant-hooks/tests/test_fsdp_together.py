"""All three functions for FSDP2 on one model, on two hosts of two ranks: they train, save and resume."""

import pytest
import torch
import torch.distributed as dist
from fsdp_models import batch, needs_custom_gathers, nodes_and_shards, sharded, train, whole
from host_names import take_host_name
from quant_buckets import assert_same, through_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_gather, quantize_all_reduce, quantize_reduce_scatter
from dist_utils.testing import run_ranks, same_on_all_ranks

pytestmark = needs_custom_gathers
STATES = {
    "8 bits": ({}, {}),
    "4 bits": ({"bits": 4}, {"bits": 4}),
    "16 bits inside": ({"bits": 16}, {"bits": 4}),
}
GATHERS = ({}, {"keep_for_backward": True}, {"differences": True})


class Job:
    """A training job: a model whose parameters and gradients travel in few bits inside and between nodes."""

    def __init__(self, mesh, gathers, inside, between):
        self.net = sharded(mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.gathers = quantize_all_gather(self.net, min_bytes=0, **gathers)
        self.states = [
            QuantizedAllreduceState(mesh[name].get_group(), min_bytes=0, **options)
            for name, options in (("shard", inside), ("node", between))
        ]
        quantize_reduce_scatter(self.net, self.states[0])
        quantize_all_reduce(self.net, self.states[1])

    def train(self, steps, first=0):
        train(self.net, steps, first=first, optimizer=self.optimizer)
        return whole(self.net)

    def save(self, path):
        """Save shards in a checkpoint of torch's, and return this rank's residuals."""
        self.gathers.start_over()
        model, optimizer = get_state_dict(self.net, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        return through_file([state.state_dict() for state in self.states])

    def load(self, path, residuals):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.net, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        for state, saved in zip(self.states, residuals, strict=True):
            state.load_state_dict(saved)


def _loss(net):
    with torch.no_grad():
        loss = net(batch(77)).square().mean()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def _together(rank, folder):
    """Weights are equal on all ranks, near native HSDP, and those of a job that resumes."""
    take_host_name("0011"[rank])
    mesh = nodes_and_shards()
    native = sharded(mesh)
    train(native, 4, optimizer=torch.optim.AdamW(native.parameters(), lr=1e-3))
    for number, ((inside, between), gathers) in enumerate((s, g) for s in STATES.values() for g in GATHERS):
        job = Job(mesh, gathers, inside, between)
        job.train(2)
        path = f"{folder}/{number}"
        residuals = job.save(path)
        expected = job.train(2, first=2)
        assert same_on_all_ranks(expected)
        torch.testing.assert_close(_loss(job.net), _loss(native), rtol=0.02, atol=1e-3)
        assert all(state.statistics.quantized_buckets for state in job.states)
        other = Job(mesh, gathers, inside, between)
        other.load(path, residuals)
        assert_same(other.train(2, first=2), expected, (inside, between, gathers))


@pytest.mark.filterwarnings("ignore")  # of torch's checkpoints
def test_all_of_it_trains_and_resumes_with_the_same_bits(tmp_path):
    run_ranks(_together, 4, str(tmp_path), timeout=200)
