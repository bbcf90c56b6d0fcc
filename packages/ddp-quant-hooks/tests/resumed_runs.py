"""Shared by the tests of saving and loading: a run that continues, and one that is stopped and resumed."""

import copy
import itertools

import torch
import torch.distributed as dist
from quant_buckets import differences, flat_residuals, through_file
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook


class Net(torch.nn.Module):
    """No size is a multiple of a block; parameters are not used in the order of their registration."""

    def __init__(self):
        super().__init__()
        sizes = (37, 61, 53, 45, 37)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(before, after) for before, after in itertools.pairwise(sizes)
        )
        self.norm = torch.nn.LayerNorm(37)
        self.unused = torch.nn.Linear(37, 41)

    def forward(self, x, *, use=False):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.unused(x) if use else x


COMPLEX = torch.float32 if torch.__version__ < "2.9" else torch.complex64
"""The dtype of complex parameters: DDP broadcasts them, and Gloo takes no complex ones in torch 2.6."""


class Run:
    """A model, its optimizer and the hook's state."""

    def __init__(self, make_state, *, use=True, net=Net, hook=quantized_allreduce_hook, **options):
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(net(), **options)
        self.state = make_state()
        self.ddp.register_comm_hook(self.state.bind(self.ddp), hook)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)
        self.use = use

    def step(self, number):
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, number):
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        use = self.use(number) if callable(self.use) else self.use
        self.ddp(torch.randn(5, 37, generator=generator), use=use).square().mean().backward()

    def save(self):
        """Return a checkpoint as a file would hold it."""
        return through_file(
            {
                "model": self.ddp.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "residuals": self.state.state_dict(),
            }
        )

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.ddp.parameters()])


def resumed(checkpoint, make_state, **options):
    """Return a new run that goes on from a checkpoint, by the documented recipe."""
    run = Run(make_state, **options)
    for number in range(2 if options.get("static_graph") else 1):
        run.backward(number)
        run.optimizer.zero_grad(set_to_none=True)
    run.ddp.module.load_state_dict(checkpoint["model"])
    run.optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # it would use the same tensors
    run.state.load_state_dict(checkpoint["residuals"])
    return run


def differences_after_resume(make_state, *, before=3, after=3, **options):
    """Return where a resumed run differs from one that continued: in weights, then in residuals."""
    run = Run(make_state, **options)
    for number in range(before):
        run.step(number)
    again = resumed(run.save(), make_state, **options)
    found = {}
    for number in range(before, before + after):
        run.step(number)
        again.step(number)
        found |= differences({f"step {number}": run.weights()}, {f"step {number}": again.weights()})
    saved, saved_again = run.state.state_dict(), again.state.state_dict()
    run.state.close()
    again.state.close()
    for kind in ("own", "shard"):
        found |= differences(flat_residuals(saved, kind), flat_residuals(saved_again, kind))
    return found


def state_maker(**options):
    return lambda: QuantizedAllreduceState(**{"min_bytes": 0, **options})
