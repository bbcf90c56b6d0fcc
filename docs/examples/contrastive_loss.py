"""A contrastive (CLIP-style) loss over all ranks' pairs, in both conventions, against one process.

torchrun --nproc-per-node 4 docs/examples/contrastive_loss.py

Every image is compared with every caption of the whole batch, so each rank needs the others' embeddings,
and their gradients must find the way back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from dist_autograd_collectives import all_gather_cat, copy_to_group

STEPS, PAIRS_PER_RANK, WIDTH = 20, 6, 16


class TwoTowers(nn.Module):
    """Embed images and captions; the scale of their similarities is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 8))
        self.captions = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(
        self, images: torch.Tensor, captions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return unit vectors, and the scale."""
        embeddings = self.images(images), self.captions(captions)
        return *(nn.functional.normalize(embedding) for embedding in embeddings), self.scale


def loss_of_rows(
    mine: tuple[torch.Tensor, ...],
    everyone: tuple[torch.Tensor, ...],
    scale: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Return the loss of finding my images' captions among all, and my captions' images."""
    target = torch.arange(first, first + len(mine[0]), device=mine[0].device)
    return sum(
        nn.functional.cross_entropy(scale.exp() * here @ there.T, target)
        for here, there in zip(mine, reversed(everyone), strict=True)
    )


def one_process(
    model: TwoTowers, images: torch.Tensor, captions: torch.Tensor
) -> torch.Tensor:
    """Compare with: the whole batch in one process."""
    *embeddings, scale = model(images, captions)
    return loss_of_rows(tuple(embeddings), tuple(embeddings), scale, 0)


def summed(
    ddp: DistributedDataParallel, images: torch.Tensor, captions: torch.Tensor
) -> torch.Tensor:
    """Each rank has the loss of its own rows; DDP divides their sum by the ranks."""
    *mine, scale = ddp(images, captions)
    everyone = tuple(all_gather_cat(embedding) for embedding in mine)  # grad="sum"
    return loss_of_rows(tuple(mine), everyone, scale, dist.get_rank() * PAIRS_PER_RANK)


def replicated(
    model: TwoTowers, images: torch.Tensor, captions: torch.Tensor
) -> torch.Tensor:
    """Every rank has the same loss, of the whole batch; without DDP.

    The towers' parameters are equal on all ranks, but each rank continues with its own
    pairs: copy_to_group adds up their gradients. The scale is used for the common loss,
    equally on all ranks: there is nothing to add up.
    """
    parameters = {
        name: parameter if name == "scale" else copy_to_group(parameter)
        for name, parameter in model.named_parameters()
    }
    *mine, scale = functional_call(model, parameters, (images, captions))
    everyone = tuple(all_gather_cat(embedding, grad="replicated") for embedding in mine)
    return loss_of_rows(everyone, everyone, scale, 0)


def new_model() -> TwoTowers:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return TwoTowers().double()


def trained(convention: str, rank: int, world_size: int) -> TwoTowers:
    """Train on the same pairs: all in this process, or each rank its own."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    ddp = DistributedDataParallel(model) if convention == "sum" else None
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        images = torch.randn(
            world_size * PAIRS_PER_RANK, WIDTH, generator=random, dtype=torch.float64
        )
        captions = (
            images.roll(1, dims=1)
            + 0.1 * torch.randn(images.shape, generator=random).double()
        )
        mine = slice(rank * PAIRS_PER_RANK, (rank + 1) * PAIRS_PER_RANK)
        if ddp is not None:
            loss = summed(ddp, images[mine], captions[mine])
        elif convention == "replicated":
            loss = replicated(model, images[mine], captions[mine])
        else:
            loss = one_process(model, images, captions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main() -> None:
    """Print how far each convention's parameters are from those of one process."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right = trained("one process", rank, world_size)
    moved = max(
        (p - q).abs().max().item()
        for p, q in zip(right.parameters(), new_model().parameters(), strict=True)
    )
    if rank == 0:
        print(f"one process: parameters moved by up to {moved:.2f} in {STEPS} steps")
    for convention in ("sum", "replicated"):
        model = trained(convention, rank, world_size)
        pairs = zip(model.parameters(), right.parameters(), strict=True)
        difference = torch.stack(
            [(ours - theirs).detach().abs().max() for ours, theirs in pairs]
        ).max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{convention}: differs by up to {difference.item():.1e}")
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
