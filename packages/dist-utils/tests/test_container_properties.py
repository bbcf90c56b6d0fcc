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


@dataclasses.dataclass(slots=True)
class Slots:
    a: Any
    b: Any


tensors = st.builds(lambda n: torch.full((2,), float(n)), st.integers(-5, 5))
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just(torch.float32))
keys = st.text(max_size=3)


def containers_of(children):
    lists, pairs = st.lists(children, max_size=4), st.tuples(children, children)
    dictionaries = st.dictionaries(keys, children, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(lambda values: deque(values, maxlen=7)),
        dictionaries,
        dictionaries.map(OrderedDict),
        dictionaries.map(lambda values: defaultdict(int, values)),
        dictionaries.map(UserDict),
        pairs.map(lambda values: Point(*values)),
        pairs.map(lambda values: Slots(*values)),
        pairs.map(lambda values: SimpleNamespace(a=values[0], b=values[1])),
        # The same object twice.
        children.map(lambda value: [value, {"again": value}]),
    )


trees = st.recursive(st.one_of(tensors, atoms), containers_of, max_leaves=25)


def parts(obj):
    """Take a container apart without using the walker: its details and its contents."""
    if isinstance(obj, deque):
        return obj.maxlen, list(obj)
    if isinstance(obj, (list, tuple)):
        return None, list(obj)
    if isinstance(obj, (dict, UserDict)):
        return (list(obj), getattr(obj, "default_factory", None)), list(obj.values())
    if isinstance(obj, Slots):
        return None, [obj.a, obj.b]
    if isinstance(obj, SimpleNamespace):
        return list(vars(obj)), list(vars(obj).values())
    return None


@settings(deadline=None, max_examples=200)
@given(trees)
def test_structure_values_and_sharing_are_kept(tree):
    """Each old object becomes one new object: the pairs (old, new) are a function both ways."""
    new_of, old_of, alive = {}, {}, []

    def check(old, new):
        assert type(new) is type(old)
        opened = parts(old)
        if isinstance(old, torch.Tensor):
            assert torch.equal(new, old * 2)
        elif opened is None:
            assert new is old
            return
        alive.extend([old, new])
        assert new_of.setdefault(id(old), id(new)) == id(new)
        assert old_of.setdefault(id(new), id(old)) == id(old)
        if opened is not None:
            details, inside = parts(new)
            assert details == opened[0]
            for one, other in zip(opened[1], inside, strict=True):
                check(one, other)

    check(tree, apply_to_tensors(lambda t: t * 2, tree))


@settings(deadline=None, max_examples=200)
@given(trees)
def test_nothing_changed_means_the_same_object(tree):
    assert apply_to_tensors(lambda t: t, tree) is tree
    assert recursive_to(tree, "cpu", False)[0] is tree


@settings(deadline=None)
@given(st.lists(trees, max_size=4), st.dictionaries(keys, trees, max_size=4))
def test_unpack_undoes_pack(args, kwargs):
    new_args, new_kwargs = unpack_kwargs(*pack_kwargs(*args, **kwargs))
    assert list(map(id, new_args)) == list(map(id, args))
    assert [(key, id(value)) for key, value in new_kwargs.items()] == [(k, id(v)) for k, v in kwargs.items()]
