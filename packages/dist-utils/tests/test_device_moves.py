"""Everything moves to the device, on the side stream if there is one."""

import dataclasses
from collections import Counter, defaultdict, deque
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dist_utils import recursive_to, to_kwargs


@dataclasses.dataclass
class Batch:
    x: Any
    rest: Any


def devices(*tensors):
    return {tensor.device.type for tensor in tensors}


def test_containers_that_pytorch_does_not_move_are_moved():
    batch = Batch(torch.ones(2), deque([torch.ones(2)], maxlen=3))
    (moved,) = recursive_to(batch, "meta", False)
    assert type(moved) is Batch
    assert devices(moved.x, moved.rest[0]) == {"meta"}
    assert moved.rest.maxlen == 3
    (moved,) = recursive_to({torch.ones(2)}, "meta", False)
    assert devices(*moved) == {"meta"}


def test_containers_that_pytorch_damages_are_kept():
    (moved,) = recursive_to([defaultdict(list, a=torch.ones(2)), Counter(a=1)], "meta", False)
    assert moved[0].default_factory is list
    assert moved[1] == Counter(a=1)


def test_what_is_there_already_is_the_same_object():
    for batch in ([torch.ones(2)], (torch.ones(2),), {"a": torch.ones(2)}, Batch(torch.ones(2), None)):
        assert recursive_to(batch, "cpu", True)[0] is batch
    packed = pack_sequence([torch.ones(2)])
    assert recursive_to(packed, torch.device("cpu"), True)[0] is packed


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_cpu_is_the_same_device_with_and_without_its_index(device):
    batch = {"x": [torch.ones(2)], "y": pack_sequence([torch.ones(2)])}
    assert recursive_to(batch, device, False)[0] is batch
    assert recursive_to(batch["x"][0], device, True)[0] is batch["x"][0]
    assert to_kwargs((), batch, device, True)[1][0] is batch
    meta = torch.ones(2, device="meta")
    assert recursive_to(meta, "meta:0", False)[0] is meta


def test_a_call_without_arguments_is_one_call():
    assert to_kwargs((), None, "cpu", False) == (((),), ({},))
    assert to_kwargs((), {}, "cpu", True) == (((),), ({},))
    x = torch.ones(2)
    (args,), (kwargs,) = to_kwargs((), {"x": x}, "cpu", False)
    assert (args, kwargs["x"] is x) == ((), True)


def test_arguments_that_share_a_tensor_share_it_on_the_device():
    x = torch.ones(2)
    (args,), (kwargs,) = to_kwargs((x,), {"x": x}, "meta", False)
    assert args[0] is kwargs["x"]


class Recorder:
    """Replaces the module of an accelerator, and records what happens in order."""

    def __init__(self):
        self.events = []

    def current_device(self):
        return 0

    def current_stream(self, device):
        return RecordedStream("current")

    def Stream(self, device):  # noqa: N802 - torch's name
        return RecordedStream("side")

    def stream(self, stream):
        return stream


RECORDER = Recorder()
"""One for all tests, because the side stream of a device is made once."""


class RecordedStream:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        RECORDER.events.append(f"enter {self.name}")

    def __exit__(self, *_):
        RECORDER.events.append(f"leave {self.name}")

    def wait_stream(self, other):
        RECORDER.events.append(f"{self.name} waits for {other.name}")


class Recorded(torch.Tensor):
    """A CPU tensor that records its copies and the streams that use it."""

    def to(self, *args, **kwargs):
        RECORDER.events.append(f"copy {args[0]} {kwargs}")
        return self

    def is_pinned(self):
        return True

    def record_stream(self, stream):
        RECORDER.events.append(f"used on {stream.name}")


@pytest.fixture
def recorder(monkeypatch):
    RECORDER.events.clear()
    monkeypatch.setattr(torch, "mtia", RECORDER)  # which no machine of ours has
    return RECORDER


def test_copies_to_an_accelerator_use_a_side_stream_that_the_current_stream_waits_for(recorder):
    recursive_to([torch.ones(2).as_subclass(Recorded)], "mtia", True)
    assert recorder.events == [
        "enter side",
        "copy mtia:0 {'non_blocking': True}",  # the memory is pinned
        "leave side",
        "current waits for side",
        "used on current",
    ]


def test_pageable_memory_is_copied_blocking(recorder, monkeypatch):
    monkeypatch.setattr(Recorded, "is_pinned", lambda _: False)
    recursive_to([torch.ones(2).as_subclass(Recorded)], "mtia", True)
    assert recorder.events[1] == "copy mtia:0 {'non_blocking': False}"


def test_only_copies_from_the_cpu_use_the_side_stream(recorder):
    source = torch.ones(2, device="meta").as_subclass(Recorded)
    recursive_to([source], "mtia", True)
    assert recorder.events == ["copy mtia {}"]


def test_an_accelerator_without_streams_gets_plain_copies(recorder, monkeypatch):
    monkeypatch.setattr(torch, "mtia", torch.mps)
    recursive_to([torch.ones(2).as_subclass(Recorded)], "mtia", True)
    assert recorder.events == ["copy mtia {}"]


def test_no_side_stream_unless_asked_for_and_for_an_accelerator(recorder):
    recursive_to([torch.ones(2).as_subclass(Recorded)], "mtia", False)
    assert recorder.events == ["copy mtia {}"]
    recursive_to([torch.ones(2).as_subclass(Recorded)], "meta", True)
    assert recorder.events[1:] == ["copy meta {}"]
