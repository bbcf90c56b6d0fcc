"""Hooks, overlapped steps and checkpoints together: bitwise the same training in every composition."""

import functools
import io

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from trainings import HOOKS, assert_resumes, assert_same_bits, with_hook

from dist_utils import resolve_group


def _begin(hook="8 bits, feedback", overlap=None, **options):
    return with_hook(resolve_group(), HOOKS[hook], overlap, **options)


def _overlap(_):
    for hook in ("8 bits, feedback", "low rank"):
        ordinary = _begin(hook).train(range(10)).parameters()
        for overlap in ({}, {"release_gradients": True}):
            assert_same_bits(_begin(hook, overlap).train(range(10)).parameters(), ordinary)


def test_the_bits_of_the_ordinary_loop_with_a_quantized_hook(launch):
    launch(_overlap, timeout=120)


def _choose(_):
    """Train with a hook alone, and with a choice between two copies of it, without and with the overlap."""
    alone = _begin("8 bits").train(range(70)).parameters()
    choices = []
    for overlap in (None, {}):
        training = _begin("auto", overlap)
        assert_same_bits(training.train(range(70)).parameters(), alone)  # 31 of which are the trial
        choices.append(training.state.choice.candidate)
        training.close()
    return choices


def test_a_choice_with_the_overlap_has_the_bits_of_the_chosen_hook(launch):
    first, *others = launch(_choose, timeout=120)
    assert others == [first] * len(others)


def _resume(_):
    for overlap in (None, {}):
        for options in ({}, {"static_graph": True}):
            for hook in ("8 bits, feedback", "low rank"):
                begin = functools.partial(_begin, hook, overlap, **options)
                assert_resumes(begin, passes=1 + bool(options))


def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(launch):
    launch(_resume, timeout=120)


def _parts(training, residuals):
    """Return what a distributed checkpoint holds; each rank has its own residuals, under its own name."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer, "residuals": {f"rank {dist.get_rank()}": residuals}}


def _distributed_checkpoint(rank, folder):
    through, resumed = (_begin("4 bits, feedback", {}) for _ in range(2))
    through.train(range(3)).handle.wait()
    residuals = io.BytesIO()
    torch.save(through.state.state_dict(), residuals)
    dcp.save(_parts(through, residuals.getvalue()), checkpoint_id=folder)
    resumed.make_final_buckets()
    parts = _parts(resumed, b"")
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        resumed.model,
        resumed.optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )
    loaded = io.BytesIO(parts["residuals"][f"rank {rank}"])
    resumed.state.load_state_dict(torch.load(loaded, weights_only=True))
    assert_same_bits(resumed.train(range(3, 6)).parameters(), through.train(range(3, 6)).parameters())
    assert_same_bits(resumed.optimizer.state_dict(), through.optimizer.state_dict())


def test_a_job_resumed_from_a_distributed_checkpoint_has_the_bits_of_the_uninterrupted_one(launch, tmp_path):
    launch(_distributed_checkpoint, str(tmp_path), timeout=240)
