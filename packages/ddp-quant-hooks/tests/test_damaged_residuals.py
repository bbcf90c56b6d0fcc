"""Damaged, truncated or forged residuals: a typed error and no change, or everything in them is loaded."""

import copy
import io
import random

import torch
import torch.distributed as dist
from auto_runs import SECONDS, quantized
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resumed_runs import Run, state_maker

from ddp_quant_hooks import AutoState, QuantizedAllreduceState, all_reduce, auto_hook
from dist_utils.testing import run_ranks, same_bits

REFUSED = (TypeError, ValueError)
CASES = 80


def junk(random):
    return random.choice(
        [
            None, True, False, 0, 1, -1, 2**63, -(2**80), 0.5, float("nan"), "", "x", b"x", [], (), {},
            {"": None}, {1: 2}, [[]], [["a", 1]], torch.Size([2]), torch.float32, torch.tensor(1.0),
            torch.zeros(0), torch.full((3,), torch.nan), torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64),
            torch.empty(3, device="meta"), torch.zeros(3).to_sparse(), object(), "layers.0.weight",
        ]
    )  # fmt: skip


def places(saved, path=()):
    """Yield the path of every item in nested dicts, lists and tuples."""
    yield path
    if isinstance(saved, (dict, list, tuple)):
        for key, value in list(saved.items() if isinstance(saved, dict) else enumerate(saved)):
            yield from places(value, (*path, key))


def changed(saved, path, change):
    """Return a copy with the item at a path replaced; ``change`` may also raise ``KeyError``."""
    if not path:
        return change(saved)
    key, *rest = path
    if not isinstance(saved, (dict, list, tuple)):
        raise TypeError(f"an earlier change took {path} away")
    if isinstance(saved, dict):
        copied = dict(saved)
        try:
            copied[key] = changed(saved[key], rest, change)
        except KeyError:
            del copied[key]
        return copied
    values = list(saved)
    try:
        values[key] = changed(saved[key], rest, change)
    except KeyError:
        del values[key]
    return type(saved)(values)


def drop(_):
    raise KeyError


def slightly(random):
    """Return a function that makes an item slightly wrong: another number, dtype, length, order or name."""

    def change(value):
        if isinstance(value, torch.Tensor):
            other = value.clone()
            if other.numel():
                other[random.randrange(other.numel())] = random.choice([torch.nan, torch.inf, 1e30, -1.0])
            resized = [value[:-1], torch.cat([value, value[:1]]), value.double(), value.to(torch.int32)]
            return random.choice([other, *resized, value[:0], value.unsqueeze(0), value.half()])
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)):
            return value + random.choice([-1, 1, 1 << 31, -(1 << 62)])
        if isinstance(value, str):
            return value + random.choice([".", "\ud800", "x" * 1000])
        if isinstance(value, (list, tuple)):
            values = list(value)
            return type(value)(random.choice([values[::-1], values[:-1], values + values, values * 3]))
        if isinstance(value, dict):
            keys = list(value)
            return {**value, random.choice([*keys, "more"]): junk(random)}
        return junk(random)

    return change


def mutants(saved, random):
    """Yield damaged copies: of one or several places, and of the file's bytes."""
    everywhere = [path for path in places(saved) if path]
    for number in range(CASES):
        wrong = saved
        if number % 4 == 3:
            file = io.BytesIO()
            torch.save(saved, file)
            data = bytearray(file.getvalue())
            for _ in range(random.choice([1, 1, 3, 50])):
                data[random.randrange(len(data))] = random.randrange(256)
            cut = random.choice([len(data), len(data), random.randrange(len(data))])
            try:
                wrong = torch.load(io.BytesIO(bytes(data[:cut])), weights_only=True)
            except Exception:  # noqa: BLE001 - torch raises nearly anything for such bytes
                continue
        else:
            for _ in range(random.choice([1, 1, 1, 2, 5])):
                change = random.choice([slightly(random), drop, lambda _: junk(random)])
                try:
                    wrong = changed(wrong, random.choice(everywhere), change)
                except (LookupError, TypeError):  # an earlier change took the place away
                    continue
        yield wrong


def same(one, other):
    try:
        return same_bits(one, other)
    except (AttributeError, TypeError, RuntimeError):
        return one == other


def loads_all_or_nothing(state, saved, random, *, of=("own", "buckets", "steps")):
    """Load damaged copies of what was saved; return how many were refused."""
    refused = 0
    for wrong in mutants(saved, random):
        before = state.state_dict()
        try:
            state.load_state_dict(copy.deepcopy(wrong) if type(wrong) is dict else wrong)
        except REFUSED:
            refused += 1
            assert same_bits(state.state_dict(), before), "a refusal changes nothing"
            continue
        again = state.state_dict()
        for name in of:
            kept, wanted = again[name], wrong[name]
            if name == "own":
                assert kept.keys() == wanted.keys()
                kept = {key: value.double() for key, value in kept.items()}
                wanted = {key: value.bfloat16().double() for key, value in wanted.items()}
            if name == "buckets":
                kept, wanted = ([_plain(row) for row in rows] for rows in (kept, wanted))
            assert same(kept, wanted), (name, kept, wanted)
        state.load_state_dict(saved)
        assert same_bits(state.state_dict(), before)
    return refused


def _plain(row):
    row = {key: row[key] for key in ("parameters", "own", "shard")}
    row["parameters"] = [tuple(pair) for pair in row["parameters"]]
    for kind in ("own", "shard"):
        row[kind] = None if row[kind] is None else row[kind].bfloat16().float()
    return row


def _damaged(rank, seed):
    some = random.Random(seed)
    run = Run(state_maker(error_feedback="both"), bucket_cap_mb=0.012)
    for number in range(3):
        run.step(number)
    refused = [loads_all_or_nothing(run.state, run.save()["residuals"], some)]
    run.step(3)  # all ranks loaded the same again, so they can continue
    tensors = QuantizedAllreduceState(error_feedback="both", min_bytes=0)
    for _ in range(2):
        all_reduce([torch.randn(300), torch.randn(70, 3)], dist.ReduceOp.AVG, tensors, key="change")
    saved = tensors.state_dict()
    refused.append(loads_all_or_nothing(tensors, saved, some, of=("own", "buckets", "steps", "keys")))
    auto = Run(_auto, hook=auto_hook, bucket_cap_mb=0.012)
    while auto.state.choice is None:
        auto.step(0)
    auto.step(1)
    refused.append(loads_all_or_nothing(auto.state, auto.save()["residuals"], some, of=("choice", "passes")))
    return refused


def _auto():
    candidates = {"4 bits": quantized(0.0, bits=4), "8 bits": quantized(SECONDS)}
    return AutoState(candidates=candidates, max_error=None)


@settings(
    deadline=None, derandomize=True, database=None, max_examples=1, phases=[Phase.explicit, Phase.generate]
)  # every example is a launch: shrinking takes too long
@given(seed=st.integers(0, 2**63))
def test_damaged_residuals_are_refused_or_loaded_whole(seed):
    for refused in run_ranks(_damaged, 2, seed, timeout=120):
        assert all(CASES / 4 < number <= CASES for number in refused)
