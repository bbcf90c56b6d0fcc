"""Comparisons on a device, with the CPU in its place; test_overlap_on_gpu.py has the rest."""

from types import SimpleNamespace

import pytest
import torch

from ddp_optim_overlap.loop import step_inputs
from ddp_optim_overlap.loop.step_inputs import DeviceSample


@pytest.fixture(autouse=True)
def cpu_as_device(monkeypatch):
    monkeypatch.setattr(step_inputs, "_READ_AT_ONCE", ("meta",))
    monkeypatch.setattr(step_inputs, "_record_event", lambda _: SimpleNamespace(synchronize=lambda: None))


def _tensors():
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 8, 8, generator=generator)
    return [
        torch.randn(1000, generator=generator),
        torch.randn(3, generator=generator).bfloat16(),
        image.to(memory_format=torch.channels_last),
        torch.full((4,), torch.nan),
        torch.zeros(()),
        torch.zeros(0),
        None,
        torch.eye(3).to_sparse(),
        torch.randn(4, 4, generator=generator).t(),
    ]


def test_unwritten_tensors_are_unchanged():
    tensors = _tensors()
    sample = DeviceSample(tensors)
    assert not sample.empty
    assert not sample.compare(tensors).found()
    assert not sample.compare([None if one is None else one.clone() for one in tensors]).found()


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4])
def test_written_tensors_are_found(place):
    tensors = _tensors()
    sample = DeviceSample(tensors)
    torch._foreach_add_([tensors[place]], 1) if place != 3 else tensors[place].fill_(-torch.inf)
    assert sample.compare(tensors).found()


def test_freed_tensors_are_found_and_nothing_is_kept():
    tensors = _tensors()
    sample = DeviceSample(tensors)
    assert sample.compare([None, *tensors[1:]]).found()
    tensors[0].untyped_storage().resize_(0)
    assert sample.compare(tensors).found()
    assert DeviceSample([None, torch.eye(3).to_sparse()]).empty
