"""Shared by the tests of FSDP2's gathers: the ways to gather, and the weights that all ranks must see."""

import torch
from fsdp_models import batch, whole, with_weights
from kernel_cases import decoded, encoded
from quant_buckets import assert_same

from ddp_quant_hooks.fsdp import quantize_all_gather
from ddp_quant_hooks.kernels import Layout
from dist_utils.testing import same_on_all_ranks

WAYS = {
    "8 bits": {},
    "kept": {"keep_for_backward": True},
    "differences": {"differences": True},
}
INT8 = Layout("int8", 128, rotate=True)
INT4 = Layout("int4", 32, rotate=True)
MOST_ERROR = 0.005


def gather_in_few_bits(net, **options):
    """Gather modules of any size in few bits; return the handle."""
    return quantize_all_gather(net, min_bytes=0, **options)


def run_passes(net, step, width=37):
    """Run a forward and a backward pass on a batch of this rank."""
    net(batch(step, width).requires_grad_()).square().mean().backward()


def assert_right_weights(net, *, rtol=0.02, atol=0.002):
    """Raise unless both passes have last seen the same weights, on all ranks, near those of the shards."""
    for layer, weights in with_weights(net, whole(net)):
        seen = layer.seen["forward"][-1]
        assert_same(seen, layer.seen["backward"][-1])
        torch.testing.assert_close(seen, weights, rtol=rtol, atol=atol)
    assert same_on_all_ranks([layer.seen["forward"][-1] for layer in net])


def _near(copied, part):
    lost = (part.float() - copied.float()).double().norm()
    return bool(lost <= MOST_ERROR * part.double().norm())


class Simulation:
    """What all ranks must gather of a layer, computed from the exact shards of all of them.

    Args:
        differences: Whether each rank sends how its shard differs from what it has sent before.
        dtype: Of the weights that are gathered.
    """

    def __init__(self, *, differences=False, dtype=torch.float32):
        self.differences, self.dtype, self.copies, self.values = differences, dtype, {}, []

    @property
    def exact(self):
        """The ranks that send values."""
        return {rank for rank, places in enumerate(self.values) if places}

    def gathered(self, layer):
        """Return the weights that all ranks must see, and note of which parameters each rank sends values."""
        every = list(layer.parameters())
        ranks = every[0].device_mesh.size()
        chunks = [self._chunks(parameter, ranks) for parameter in every]
        self.values = []
        for rank in range(ranks):
            parts, known = [chunk[rank] for chunk in chunks], self.copies.get(rank)
            old = known or [torch.zeros_like(part) for part in parts]
            new = [
                part if one.dim() == 1 else self._rounded(before, part)
                for one, before, part in zip(every, old, parts, strict=True)
            ]
            self.values.append(
                [place for place, part in enumerate(parts) if known is None or not _near(new[place], part)]
                if self.differences
                else []
            )
            for place in self.values[-1]:
                new[place] = parts[place]
            self.copies[rank] = new
        return [self._whole(place, parameter, ranks) for place, parameter in enumerate(every)]

    def _chunks(self, parameter, ranks):
        exact, dim = parameter.full_tensor().detach().to(self.dtype).cpu(), parameter.placements[0].dim
        size = list(exact.shape)
        size[dim] = -(-size[dim] // ranks)
        chunks = [torch.zeros(size, dtype=self.dtype) for _ in range(ranks)]
        for padded, chunk in zip(chunks, exact.chunk(ranks, dim), strict=False):  # the last may have no rows
            padded.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
        return chunks

    def _rounded(self, copied, part):
        if not self.differences:
            return decoded([encoded(part.flatten(), INT8)], part.numel(), INT8, self.dtype).view(part.shape)
        difference = (part.float() - copied.float()).flatten()
        change = decoded([encoded(difference, INT4)], difference.numel(), INT4)
        return (copied.float() + change.view(part.shape)).to(self.dtype)

    def _whole(self, place, parameter, ranks):
        dim = parameter.placements[0].dim
        rows = torch.cat([self.copies[rank][place] for rank in range(ranks)], dim)
        return rows.narrow(dim, 0, parameter.shape[dim])
