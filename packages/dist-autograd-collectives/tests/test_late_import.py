"""The package may be imported late, and in any mode: nothing at the head of this file imports it."""

import torch

from dist_utils.testing import run_ranks


def _imported_late(rank):
    with torch.inference_mode():
        import dist_autograd_collectives as dac  # noqa: PLC0415 - this is the test
    x = torch.full((3,), 1.0 + rank, requires_grad=True)
    (dac.all_reduce(x, "product") * dac.start(dac.all_gather_stack, x).wait().sum(0)).sum().backward()
    return x.grad.tolist()


def test_gradients_after_an_import_in_inference_mode():
    """The sum of both ranks' losses is 2 p (a + b) with p = a b, of a = 1 and b = 2."""
    assert run_ranks(_imported_late, 2, group_timeout=20) == [[16.0] * 3, [10.0] * 3]
