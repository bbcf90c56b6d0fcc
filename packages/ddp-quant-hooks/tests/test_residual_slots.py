"""Slots by name: what belongs to owners changes with steps that count, moves with them and is saved."""

import pytest
import torch
from quant_buckets import through_file

from ddp_quant_hooks.exchange.plan import Span
from ddp_quant_hooks.feedback import checkpoint
from ddp_quant_hooks.feedback.residuals import Key, Slot
from ddp_quant_hooks.feedback.store import Feedback

CPU = torch.device("cpu")
A, B, C = (Key(name, shape) for name, shape in (("a", (4, 3)), ("b", (2, 2)), ("c", (5, 2))))
RANK = 2


class Worker:
    """Has run all jobs."""

    def wait(self):
        pass


WORKER = Worker()


def _feedback(*kept):
    return Feedback(kept or ("own", "factor"), wait=WORKER.wait)


def _slots(owners):
    """Return residuals of the values, and for each owner of m x n values a factor of n x 2 numbers."""
    lengths = [owner.shape[1] * RANK for owner in owners]

    def fill(index, factor):
        factor.fill_(-len(owners[index].name) - owners[index].shape[1])

    own = Slot((Span(0, sum(owner.count for owner in owners), 0.5),))
    return {"own": own, "factor": Slot((Span(0, sum(lengths)),), torch.float32, lengths, fill)}


def _step(feedback, owners, number=None, *, finite=True):
    """Make a step that writes a number into all that it keeps, and return the factors that it reads."""
    step = feedback.begin_step()
    bucket, factors = feedback.residuals(step, owners, _slots(owners), CPU), []
    for index, owner in enumerate(owners):
        start, length = sum(one.shape[1] for one in owners[:index]) * RANK, owner.shape[1] * RANK
        last, _ = bucket.span("factor", start, length)
        factors.append(last.unique().tolist())
    for residual in bucket.slots.values():
        residual.next.fill_(number or 0.0)
    step.outcome.not_finite(torch.tensor(not finite))
    step.end_part()
    if number is None:
        feedback.discard()
    return factors


def test_a_factor_begins_as_it_is_filled_and_changes_with_steps_that_count():
    feedback = _feedback()
    assert _step(feedback, [A, B], 1 / 3) == [[-4.0], [-3.0]]
    third = torch.tensor(1 / 3).item()  # in fp32, which bf16 has not
    assert _step(feedback, [A, B]) == [[third], [third]]
    assert _step(feedback, [A, B], 7.0, finite=False) == [[third], [third]]
    assert _step(feedback, [A, B], 9.0) == [[third], [third]]
    assert _step(feedback, [A, B]) == [[9.0], [9.0]]


def test_a_factor_moves_with_its_owner_unless_it_has_another_shape():
    feedback = _feedback()
    _step(feedback, [A, B], 2.0)
    assert _step(feedback, [C, B, A]) == [[-3.0], [2.0], [2.0]]
    feedback.keys["a"] = A
    turned = feedback.key_of("a", torch.empty(3, 4))
    assert turned is A
    try:
        assert _step(feedback, [C, B, A]) == [[-3.0], [2.0], [-5.0]]
    finally:
        A.shape = torch.Size((4, 3))


def test_slots_that_nobody_keeps_are_left_out():
    feedback = _feedback("own")
    bucket = feedback.residuals(feedback.begin_step(), [A], _slots([A]), CPU)
    assert bucket.span("factor", 0, 6) == (None, None)
    assert [part.tolist() for part in bucket.span("own", 2, 3)] == [[0.0] * 3] * 2


def test_slots_are_saved_with_their_names_and_dtypes():
    feedback, other = _feedback(), _feedback()
    _step(feedback, [A, B], 1 / 3)
    entries = {owner.name: checkpoint.entry_of(owner, kept) for owner, kept in feedback.snapshot()}
    slots = entries["a"]["slots"]
    assert {name: (slot["length"], slot["pieces"][0][2].dtype) for name, slot in slots.items()} == {
        "own": (12, torch.bfloat16),
        "factor": (6, torch.float32),
    }
    file = {"version": 5, "coordinates": None, "steps": 1, "parameters": {}, "keys": entries}
    saved = checkpoint.read(through_file(file), {}, {}, None, 0)
    other.load(saved.residuals, saved.steps)
    again = {owner.name: checkpoint.entry_of(owner, kept) for owner, kept in other.snapshot()}
    assert repr(again) == repr(entries)
    keys = [other.key_of(owner.name, torch.empty(owner.shape)) for owner in (A, B)]
    assert _step(other, keys) == [[torch.tensor(1 / 3).item()]] * 2
    slots["factor"]["pieces"].append((0, 0.0, torch.ones(2, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match="pieces of several dtypes"):
        checkpoint.read(file, {}, {}, None, 0)
