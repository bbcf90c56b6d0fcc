"""Arguments are moved (on a side stream if there is one), cast, packed and unpacked without a loss."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dist_utils import cast_forward_inputs, pack_kwargs, recursive_to, to_kwargs, unpack_kwargs


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    rest: Any = None


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_what_is_on_the_device_already_is_the_same_object(device):
    """With and without the device's index."""
    for batch in (
        [torch.ones(2)],
        {"a": torch.ones(2)},
        Batch(torch.ones(2)),
        pack_sequence([torch.ones(2)]),
    ):
        assert recursive_to(batch, device, False)[0] is batch
        assert recursive_to(batch, device, True)[0] is batch
        assert to_kwargs((), {"k": batch}, device, True)[1][0]["k"] is batch
    meta = torch.ones(2, device="meta")
    assert recursive_to(meta, "meta:0", False)[0] is meta


def test_to_kwargs_returns_one_call_and_keeps_what_is_shared():
    assert to_kwargs((), None, "cpu", False) == (((),), ({},))
    assert to_kwargs((), {}, "cpu", True) == (((),), ({},))
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
    """A tensor that records its copies and the streams that use it."""

    pinned = True

    def to(self, *args, **kwargs):
        RECORDER.events.append(f"copy {args[0]} {kwargs}")
        return self

    def is_pinned(self):
        return self.pinned

    def record_stream(self, stream):
        RECORDER.events.append(f"used on {stream.name}")


class Pageable(Recorded):
    pinned = False


@pytest.mark.parametrize("kind", [Recorded, Pageable])
def test_copies_to_an_accelerator_use_a_side_stream_that_the_current_stream_waits_for(kind, monkeypatch):
    RECORDER.events.clear()
    monkeypatch.setattr(torch, "mtia", RECORDER)  # which no machine of ours has
    recursive_to([torch.ones(2).as_subclass(kind)], "mtia", True)
    assert RECORDER.events == [
        "enter side",
        f"copy mtia:0 {{'non_blocking': {kind.pinned}}}",
        "leave side",
        "current waits for side",
        "used on current",
    ]


@pytest.mark.parametrize(
    ("module", "source", "device", "asked"),
    [
        (RECORDER, "cpu", "mtia", False),
        (RECORDER, "meta", "mtia", True),
        (RECORDER, "cpu", "meta", True),
        (torch.mps, "cpu", "mtia", True),
    ],
    ids=["not asked for", "not from the CPU", "no accelerator", "accelerator without streams"],
)
def test_other_copies_are_plain_ones(module, source, device, asked, monkeypatch):
    RECORDER.events.clear()
    monkeypatch.setattr(torch, "mtia", module)
    recursive_to([torch.ones(2, device=source).as_subclass(Recorded)], device, asked)
    assert RECORDER.events == [f"copy {device} {{}}"]


def test_only_floating_point_tensors_are_cast():
    ids, mask, z = torch.tensor([1]), torch.tensor([True]), torch.ones(1, dtype=torch.complex64)
    packed = pack_sequence([torch.ones(2)])
    args, kwargs = cast_forward_inputs(torch.bfloat16, Batch(torch.ones(1)), ids, packed, m=[mask, z])
    assert (args[0].x.dtype, args[2].data.dtype) == (torch.bfloat16, torch.bfloat16)
    assert args[1] is ids
    assert kwargs["m"][0] is mask
    assert kwargs["m"][1] is z


def test_a_dtype_argument_of_the_call_itself_passes_through():
    args, kwargs = cast_forward_inputs(torch.float16, torch.ones(1), dtype=torch.float64)
    assert args[0].dtype == torch.float16
    assert kwargs == {"dtype": torch.float64}
    with pytest.raises(TypeError, match="must be a dtype, got tensor"):
        cast_forward_inputs(torch.ones(1))


def test_gradients_flow_through_the_cast_and_what_has_the_dtype_is_the_same_object():
    x = torch.ones(2, requires_grad=True)
    (y,), _ = cast_forward_inputs(torch.float64, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
    batch = [torch.ones(1), {"a": torch.ones(1)}]
    (same,), kwargs = cast_forward_inputs(torch.float32, batch, k=batch)
    assert same is kwargs["k"] is batch


def test_unpack_takes_lists_and_refuses_what_pack_never_made():
    assert unpack_kwargs([1, 2, 3], ["a"]) == ((1, 2), {"a": 3})
    assert unpack_kwargs(*pack_kwargs()) == ((), {})
    with pytest.raises(ValueError, match="3 keyword names for 2 arguments"):
        unpack_kwargs((1, 2), ("a", "b", "c"))
    with pytest.raises(ValueError, match="occurs twice"):
        unpack_kwargs((1, 2), ("a", "a"))
