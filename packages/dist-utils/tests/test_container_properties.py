"""Properties that hold for any nesting of containers."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_utils import apply_to_tensors, pack_kwargs, recursive_to, unpack_kwargs

Point = namedtuple("Point", "x y")


class Items(list):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass(slots=True)
class Slots:
    a: Any
    b: Any


tensors = st.builds(lambda n: torch.full((2,), float(n)), st.integers(-5, 5))
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just(torch.float32))
keys = st.text(max_size=3)


def containers_of(children):
    pairs = st.tuples(children, children)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.lists(children, max_size=4).map(Items),
        st.lists(children, max_size=4).map(lambda values: deque(values, maxlen=7)),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=4).map(OrderedDict),
        st.dictionaries(keys, children, max_size=4).map(lambda values: defaultdict(int, values)),
        st.dictionaries(keys, children, max_size=4).map(UserDict),
        pairs.map(lambda values: Point(*values)),
        pairs.map(lambda values: Frozen(*values)),
        pairs.map(lambda values: Slots(*values)),
        pairs.map(lambda values: SimpleNamespace(a=values[0], b=values[1])),
        st.lists(tensors, max_size=3).map(set),
        # The same object twice.
        children.map(lambda value: [value, {"again": value}]),
    )


trees = st.recursive(st.one_of(tensors, atoms), containers_of, max_leaves=25)


def parts(obj):
    """Take a container apart without using the walker: type, details and contents."""
    if isinstance(obj, deque):
        return obj.maxlen, list(obj)
    if isinstance(obj, (list, tuple, set)):
        return None, list(obj)
    if isinstance(obj, (dict, UserDict)):
        return (list(obj), getattr(obj, "default_factory", None)), list(obj.values())
    if isinstance(obj, Slots):
        return None, [obj.a, obj.b]
    if isinstance(obj, (Frozen, SimpleNamespace)):
        return list(vars(obj)), list(vars(obj).values())
    return None


def check(original, changed, expected):
    """Compare two trees in parallel; ``expected`` gives the new tensor of an old one."""
    assert type(original) is type(changed)
    if isinstance(original, torch.Tensor):
        assert torch.equal(changed, expected(original))
        return
    opened = parts(original)
    if opened is None:
        assert changed is original
        return
    details, inside = opened
    new_details, new_inside = parts(changed)
    assert new_details == details
    if isinstance(original, set):  # in any order
        inside, new_inside = (sorted(values, key=lambda t: t[0].item()) for values in (inside, new_inside))
    for old, new in zip(inside, new_inside, strict=True):
        check(old, new, expected)


@settings(deadline=None, max_examples=300)
@given(trees)
def test_structure_types_and_values(tree):
    check(tree, apply_to_tensors(lambda t: t * 2, tree), lambda t: t * 2)


@settings(deadline=None, max_examples=300)
@given(trees)
def test_nothing_changed_means_the_same_object(tree):
    assert apply_to_tensors(lambda t: t, tree) is tree
    assert recursive_to(tree, "cpu", False)[0] is tree


@settings(deadline=None, max_examples=300)
@given(trees)
def test_sharing_is_kept(tree):
    """Each old object becomes one new object: the pairs (old, new) are a function both ways."""
    forwards, backwards, alive = {}, {}, []

    def pair(old, new):
        if isinstance(old, torch.Tensor) or parts(old) is not None:
            alive.extend([old, new])
            assert forwards.setdefault(id(old), id(new)) == id(new)
            assert backwards.setdefault(id(new), id(old)) == id(old)
        opened = parts(old)
        if opened is not None and not isinstance(old, set):
            for a, b in zip(opened[1], parts(new)[1], strict=True):
                pair(a, b)

    pair(tree, apply_to_tensors(lambda t: t + 1, tree))


@settings(deadline=None)
@given(st.lists(trees, max_size=4), st.dictionaries(st.text(max_size=3), trees, max_size=4))
def test_unpack_undoes_pack(args, kwargs):
    new_args, new_kwargs = unpack_kwargs(*pack_kwargs(*args, **kwargs))
    assert all(new is old for new, old in zip(new_args, args, strict=True))
    assert list(new_kwargs) == list(kwargs)
    assert all(new_kwargs[key] is kwargs[key] for key in kwargs)
