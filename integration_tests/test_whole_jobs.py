"""Hooks, overlapped steps and checkpoints together: bitwise the same training in every composition."""

import io

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from whole_jobs import Job

from ddp_quant_hooks import AutoState, QuantizedAllreduceState, auto_hook, quantized_allreduce_hook


def _assert_same_bits(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _overlapped(_):
    ordinary = Job().train(range(10)).values()
    for overlap in ({}, {"release_gradients": True}):
        _assert_same_bits(Job(overlap=overlap).train(range(10)).values(), ordinary)


def test_the_bits_of_the_ordinary_loop_with_a_quantized_hook(launch):
    launch(_overlapped, timeout=120)


def _chosen(_):
    """Train with a hook alone, and with a choice between two copies of it, without and with the overlap."""
    alone = Job(state=QuantizedAllreduceState(min_bytes=0)).train(range(70)).values()
    choices = []
    for overlap in (None, {}):
        alike = [QuantizedAllreduceState(min_bytes=0) for _ in range(2)]
        candidates = {str(number): (one, quantized_allreduce_hook) for number, one in enumerate(alike)}
        job = Job(state=AutoState(candidates=candidates), hook=auto_hook, overlap=overlap)
        _assert_same_bits(job.train(range(70)).values(), alone)  # 31 of which are the trial
        choices.append(job.state.choice.candidate)
        job.state.close()
    return choices


def test_a_choice_with_the_overlap_has_the_bits_of_the_chosen_hook(launch):
    first, *others = launch(_chosen, timeout=120)
    assert others == [first] * len(others)


def _resumed(_):
    """Resume from the residuals of all ranks, which one of them saves."""
    for overlap in (None, {}):
        for options in ({}, {"static_graph": True}):
            through = Job(overlap=overlap, **options).train(range(3))
            everyone = through.state.gather_state_dict()
            file = io.BytesIO()
            torch.save(
                {"model": through.ddp.module.state_dict(), "optimizer": through.optimizer.state_dict()}, file
            )
            file.seek(0)
            checkpoint = torch.load(file, weights_only=True)
            resumed = Job(overlap=overlap, **options)
            resumed.make_final_buckets(1 + bool(options))
            resumed.ddp.module.load_state_dict(checkpoint["model"])
            resumed.optimizer.load_state_dict(checkpoint["optimizer"])
            resumed.state.scatter_state_dict(everyone)
            _assert_same_bits(resumed.train(range(3, 6)).values(), through.train(range(3, 6)).values())


def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(launch):
    launch(_resumed, timeout=120)


def _parts(job, residuals):
    """Return what a distributed checkpoint holds; each rank has its own residuals, under its own name."""
    model, optimizer = get_state_dict(job.ddp, job.optimizer)
    return {"model": model, "optimizer": optimizer, "residuals": {f"rank {dist.get_rank()}": residuals}}


def _four_bits(make_optimizer):
    state = QuantizedAllreduceState(bits=4, min_bytes=0)
    return Job(state=state, overlap={}, make_optimizer=make_optimizer)


def _momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _distributed_checkpoint(rank, folder):
    for make_optimizer in (torch.optim.AdamW, _momentum):
        place = f"{folder}/{make_optimizer.__name__}"
        through = _four_bits(make_optimizer).train(range(3))
        through.handle.wait()
        residuals = io.BytesIO()
        torch.save(through.state.state_dict(), residuals)
        dcp.save(_parts(through, residuals.getvalue()), checkpoint_id=place)
        resumed = _four_bits(make_optimizer)
        resumed.make_final_buckets()
        parts = _parts(resumed, b"")
        dcp.load(parts, checkpoint_id=place)
        set_state_dict(
            resumed.ddp,
            resumed.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        loaded = io.BytesIO(parts["residuals"][f"rank {rank}"])
        resumed.state.load_state_dict(torch.load(loaded, weights_only=True))
        _assert_same_bits(resumed.train(range(3, 6)).values(), through.train(range(3, 6)).values())
        _assert_same_bits(resumed.optimizer.state_dict(), through.optimizer.state_dict())


def test_a_job_resumed_from_a_distributed_checkpoint_has_the_bits_of_the_uninterrupted_one(launch, tmp_path):
    launch(_distributed_checkpoint, str(tmp_path), timeout=240)
