"""Real training jobs with several packages, on the backend that the host offers."""

import torch
import torch.distributed as dist
from trainings import HOOKS, WIDTH, assert_same_bits, few_bits, no_hook, rank_device, with_hook

from dist_utils import OrderedWorker, resolve_group
from dist_utils.testing import same_on_all_ranks


def _train(_):
    """Return each hook's loss at the end relative to that at the beginning."""
    found = {}
    for name, hook in {"none": no_hook, **HOOKS}.items():
        training = with_hook(resolve_group(), hook)
        losses = [training.step(number).item() for number in range(50)]
        assert same_on_all_ranks(training.parameters()), name
        found[name] = sum(losses[-5:]) / sum(losses[:5])
        training.close()
    return found


def test_training_converges_as_without_a_hook_and_ranks_stay_equal(launch):
    for losses in launch(_train, timeout=180):
        assert losses["none"] < 0.7
        assert {name: loss for name, loss in losses.items() if not loss < 1.1 * losses["none"]} == {}


def _two_models(rank):
    """Two models in one backward pass, each with its own worker, and a third worker of the user."""
    trainings = [with_hook(resolve_group(), HOOKS[hook]) for hook in ("bf16, fp32 sums", "8 bits")]
    device, worker = rank_device(), OrderedWorker()
    total = torch.zeros(1, device=device)

    def count(group):
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=group)
        return total.add_(one)

    for step in range(40):
        counted = worker.submit(count, device=device)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
        trainings[1].model(trainings[0].model(x)).square().mean().backward()
        for training in trainings:
            training.optimizer.step()
            training.optimizer.zero_grad()
    counted.wait()
    assert same_on_all_ranks([training.parameters() for training in trainings])
    return total.item()


def test_two_models_and_a_worker_share_the_ranks(launch):
    assert launch(_two_models, timeout=120) == [40 * launch.world_size] * launch.world_size


def _overflow(rank):
    """An infinity on the last rank alone: every rank must skip the step and halve the scale."""
    names = ("fp16", "bf16, fp32 sums", "8 bits", "per tensor", "per channel", "low rank")
    for name, hook in {
        **{name: HOOKS[name] for name in names},
        "8 bits, exact_1d": few_bits(exact_1d=True),
    }.items():
        training = with_hook(resolve_group(), hook)
        scaler = torch.amp.GradScaler(rank_device().type, init_scale=1024.0)
        before = [parameter.clone() for parameter in training.parameters()]
        x = torch.ones(4, WIDTH, device=rank_device())
        if rank == dist.get_world_size() - 1:
            x[0, 0] = float("inf")
        scaler.scale(training.model(x).sum()).backward()
        scaler.step(training.optimizer)
        scaler.update()
        assert_same_bits(training.parameters(), before)
        assert scaler.get_scale() == 512.0, name


def test_grad_scaler_sees_an_infinity_of_one_rank_everywhere(launch):
    launch(_overflow)
