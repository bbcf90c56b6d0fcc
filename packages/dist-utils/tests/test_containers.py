"""Every kind of container keeps its type, its attributes and its identity; nothing is lost silently."""

import dataclasses
import enum
import functools
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import attrs
import pydantic
import pytest
import tensordict
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from dist_utils import apply_to_tensors, cast_forward_inputs, recursive_to, register_container
from dist_utils.containers.walk import ATTRIBUTES_ARE_TRACED


def double(tensor):
    return tensor * 2


def one():
    return torch.ones(1)


Point = namedtuple("Point", "x y")


class ShiftedPoint(Point):
    """A named tuple whose constructor does more than take the fields."""

    def __new__(cls, x):
        return super().__new__(cls, x, "shifted")


class Items(list):
    def __init__(self, values, label):
        super().__init__(values)
        self.label = label


class ModelOutput(OrderedDict):
    """Like Hugging Face's: a dataclass, an OrderedDict and attributes that mirror its items."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __delitem__(self, *args, **kwargs):
        raise AssertionError("items cannot be deleted")


@dataclasses.dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any = 2


@dataclasses.dataclass
class Derived:
    """PyTorch's function raises on ``init=False`` and runs ``__post_init__`` two more times."""

    a: Any
    start: dataclasses.InitVar[Any]
    b: Any = dataclasses.field(init=False)
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, start):
        self.b = start * 3
        self.made += 1
        self.extra = "kept"


@attrs.define
class AttrsSlots:
    a: Any
    b: Any = attrs.field(init=False, default=2)


class Inner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)
    image: Any
    _hidden: Any = pydantic.PrivateAttr(default=None)

    @pydantic.model_validator(mode="after")
    def _refuse_results(self):
        assert not isinstance(self.image, torch.Tensor) or self.image.min() > 0, "validated again"
        return self


KINDS = {
    "list": lambda t: [t, 1],
    "tuple": lambda t: (t, "a"),
    "dict": lambda t: {"a": t, 2: None},
    "set": lambda t: {t, "a"},
    "frozenset": lambda t: frozenset([t, "a"]),
    "deque": lambda t: deque([1, t], maxlen=3),
    "OrderedDict": lambda t: OrderedDict(a=t, b=1),
    "defaultdict": lambda t: defaultdict(list, a=t),
    "Counter": lambda t: Counter(a=t),
    "namedtuple": lambda t: Point(t, 2),
    "namedtuple with another constructor": ShiftedPoint,
    "structseq": lambda t: torch.return_types.max((t, 5)),
    "list subclass": lambda t: Items([t, 1], "label"),
    "UserDict": lambda t: UserDict(a=t),
    "UserList": lambda t: UserList([t, 1]),
    "ChainMap": lambda t: ChainMap({"b": 1}, OrderedDict(a=t)),
    "SimpleNamespace": lambda t: SimpleNamespace(a=t, b=1),
    "dataclass": Plain,
    "frozen slots dataclass": FrozenSlots,
    "dataclass with InitVar": lambda t: Derived(t, 2),
    "ModelOutput": lambda t: Output(loss=t),
    "attrs with slots": AttrsSlots,
    "pydantic": lambda t: Inner(image=t),
}


def tensors_in(container):
    found = []

    def note(tensor):
        found.append(tensor)
        return tensor

    apply_to_tensors(note, container)
    return found


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_type_is_kept_the_tensor_replaced_and_the_original_untouched(make):
    for wrap in (lambda tensor: tensor, lambda tensor: (tensor,)):
        tensor = one()
        original, without = make(wrap(tensor)), make(None)
        changed, same = apply_to_tensors(double, [original, without])
        assert type(changed) is type(original)
        assert [t.item() for t in tensors_in(changed)] == [2]
        assert tensors_in(original)[0] is tensor
        assert tensor.item() == 1
        assert same is without
        assert apply_to_tensors(lambda t: t, original) is original


def test_details_of_the_standard_containers_are_kept():
    """Those of other containers are in test_container_properties.py."""
    assert apply_to_tensors(double, ShiftedPoint(one())).y == "shifted"
    assert type(apply_to_tensors(double, (torch.Size([2]), one()))[0]) is torch.Size
    chain = apply_to_tensors(double, ChainMap({}, OrderedDict(a=one())))
    assert [type(part) for part in chain.maps] == [dict, OrderedDict]


def test_attributes_of_subclasses_are_kept_and_walked():
    items = Items([one()], "label")
    items.mask = one()
    changed = apply_to_tensors(double, items)
    assert (changed.label, changed.mask.item(), changed[0].item()) == ("label", 2, 2)
    output = apply_to_tensors(double, Output(loss=one(), logits=(one(), one())))
    assert output.loss is output["loss"]
    assert output.logits is output["logits"]
    assert (output.hidden, list(output), output.loss.item()) == (None, ["loss", "logits"], 2)


def test_a_dictionary_that_is_its_own_dict_stays_so():
    class AttrDict(dict):
        def __init__(self, **items):
            super().__init__(items)
            self.__dict__ = self

    changed = apply_to_tensors(double, AttrDict(x=one()))
    changed.y = 5
    assert (changed.x.item(), changed["x"].item(), changed["y"]) == (2, 2, 5)


def test_dataclasses_are_copied_without_their_constructor():
    original = Derived(one(), one())
    original.cache = [one()]
    changed = apply_to_tensors(double, original)
    assert (changed.a.item(), changed.b.item(), changed.made, changed.extra) == (2, 6, 1, "kept")
    assert (changed.cache[0].item(), original.cache[0].item()) == (2, 1)

    @dataclasses.dataclass(slots=True)
    class Partial:
        a: Any
        b: Any = dataclasses.field(init=False)

    assert not hasattr(apply_to_tensors(double, Partial(one())), "b"), "it was never set"


def test_pydantic_models_are_copied_without_validation():
    inner = Inner(image=torch.ones(2), more=torch.ones(1))
    inner._hidden = [torch.ones(3)]
    result = apply_to_tensors(torch.neg, [inner])[0]
    assert result.model_fields_set == {"image", "more"}
    assert [result.image.sum(), result.more.sum(), result._hidden[0].sum()] == [-2, -1, -3]
    assert inner.image.sum() == 2


def test_an_object_with_a_state_that_a_copy_would_lose_is_refused():
    @dataclasses.dataclass
    class Failure(Exception):  # noqa: N818
        where: Any

    unchanged = Failure(1)
    assert apply_to_tensors(double, [unchanged])[0] is unchanged
    with pytest.raises(TypeError, match=r"Failure needs register_container with two functions"):
        apply_to_tensors(double, Failure(one()))
    register_container(Failure, lambda old: [old.where], lambda old, values: Failure(*values))
    assert apply_to_tensors(double, Failure(one())).where.item() == 2


def test_no_code_of_a_users_class_runs():
    @attrs.define
    class Lazy:
        a: Any

        @functools.cached_property
        def costly(self):
            raise AssertionError("ran")

    @dataclasses.dataclass
    class Checked:
        a: Any

        @property
        def hidden(self):
            raise AssertionError("ran")

        @hidden.setter
        def hidden(self, value):
            raise AssertionError("ran")

        def __getattr__(self, name):
            raise AssertionError("ran")

    checked = Checked(one())
    vars(checked)["hidden"] = one()
    assert apply_to_tensors(double, Lazy(one())).a.item() == 2
    assert vars(apply_to_tensors(double, checked))["hidden"].item() == 2


def test_what_a_cached_property_has_computed_is_moved_like_an_attribute():
    @dataclasses.dataclass
    class Batch:
        image: Any

        @functools.cached_property
        def norm(self):
            return torch.ones(1)

    for image in (torch.ones(2), "path"):  # with and without another tensor that moves
        batch = Batch(image)
        assert batch.norm.device.type == "cpu"
        (moved,) = recursive_to(batch, "meta", False)
        assert (vars(moved)["norm"].device.type, batch.norm.device.type) == ("meta", "cpu")
    (fresh,) = recursive_to(Batch(torch.ones(2)), "meta", False)
    assert "norm" not in vars(fresh)


class Mode(enum.Enum):
    A = 1


@pytest.mark.parametrize("leaf", [Plain, Point, Mode.A, torch.nn.Linear(1, 1), "text", None, 1.5, range(3)])
def test_classes_modules_and_enum_members_are_never_copied(leaf):
    if leaf is Mode.A:
        leaf.tensor = one()
    assert apply_to_tensors(double, [leaf, one()])[0] is leaf


def test_the_indices_of_a_packed_sequence_follow_its_data():
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    cast = apply_to_tensors(lambda tensor: tensor.to(torch.bfloat16), {"x": packed})["x"]
    assert (type(cast), cast.data.dtype) == (type(packed), torch.bfloat16)
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)
    assert torch.equal(cast.sorted_indices, packed.sorted_indices)
    assert apply_to_tensors(lambda tensor: tensor, packed) is packed
    moved = apply_to_tensors(lambda tensor: tensor.to("meta"), packed)
    assert (moved.sorted_indices.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_what_is_shared_stays_shared_and_each_tensor_is_seen_once():
    tensor, calls = one(), []
    shared = [tensor]

    def note(value):
        calls.append(value)
        return value * 2

    changed = apply_to_tensors(note, {"a": shared, "b": (shared, tensor)})
    assert len(calls) == 1
    assert changed["a"] is changed["b"][0]
    assert changed["b"][1] is changed["a"][0]
    assert apply_to_tensors(torch.numel, {"a": [torch.ones(3)]}) == {"a": [3]}, "fn may return anything"


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: (x,), Plain])
def test_three_hundred_levels(wrap):
    nested = [one()]
    for _ in range(300):
        nested = wrap(nested)
    assert [tensor.item() for tensor in tensors_in(apply_to_tensors(double, nested))] == [2]


def test_a_cycle_is_an_error():
    inner = {"name": "x", "parts": [1, 2]}
    inner["parts"].append(inner)
    with pytest.raises(ValueError, match=r"^a dict contains itself$"):
        apply_to_tensors(double, [0, Plain(inner)])


class Hidden:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


HOLDERS = {
    "attributes": lambda t: Hidden(inner=Hidden(weight=t)),
    "module": lambda _: torch.nn.Linear(1, 1, bias=False),
    "iterator": lambda t: iter([t]),
    "view": lambda t: {1: t}.values(),
    "closure": lambda t: lambda: t,
    "key": lambda t: {(t,): 1},
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_no_container_is_left_alone(name):
    original = {"k": [0, HOLDERS[name](one())]}
    assert apply_to_tensors(double, original) is original


class Lazy:
    __slots__ = ("label", "parts")

    def __init__(self, parts):
        self.parts = parts
        self.label = "lazy"


class LazyChild(Lazy):
    def __init__(self):
        super().__init__([torch.full((1,), 3.0)])


def test_a_registered_class_and_its_subclasses_are_walked():
    register_container(Lazy)
    assert apply_to_tensors(double, [Lazy([one()])])[0].parts[0].item() == 2
    changed = apply_to_tensors(double, LazyChild())
    assert (type(changed), changed.parts[0].item(), changed.label) == (LazyChild, 6, "lazy")
    register_container(Lazy, lambda lazy: lazy.parts, lambda _, parts: Lazy([*parts, "again"]))
    assert apply_to_tensors(double, Lazy([one()])).parts[1] == "again"
    unchanged = Lazy([1])
    assert apply_to_tensors(double, unchanged) is unchanged
    looped = Lazy([1])
    looped.parts.append(looped)
    with pytest.raises(ValueError, match="Lazy contains itself"):
        apply_to_tensors(double, looped)


def test_contents_that_exist_only_while_they_are_walked_are_not_mistaken_for_each_other():
    class Fresh:
        """Makes new tensors at every access: their addresses repeat unless they are kept."""

        def __init__(self, number):
            self.number = number

    register_container(
        Fresh,
        lambda fresh: [torch.full((1,), float(fresh.number))],
        lambda _, values: Fresh(int(values[0].item())),
    )
    changed = apply_to_tensors(double, [Fresh(number) for number in range(100)])
    assert [fresh.number for fresh in changed] == [2 * number for number in range(100)]


def test_tensordicts_and_tensorclasses_by_the_recipe_of_register_container():
    @tensordict.tensorclass
    class Batch:
        x: torch.Tensor
        name: str

    def unflatten(old, values):
        return tensordict.TensorDict(dict(zip(old.keys(), values, strict=True)), old.batch_size)

    register_container(tensordict.TensorDict, lambda old: old.values(), unflatten)
    inner = tensordict.TensorDict({"b": torch.ones(3, 2)}, batch_size=[3])
    original = tensordict.TensorDict({"a": torch.ones(3), "n": inner}, batch_size=[3])
    changed, batch = apply_to_tensors(double, [original, Batch(torch.ones(3), "n", batch_size=[3])])
    assert (changed["a"].sum(), changed["n", "b"].sum(), changed.batch_size) == (6, 12, (3,))
    assert (type(batch), batch.x.sum(), batch.name, batch.batch_size) == (Batch, 6, "n", (3,))


def test_register_container_refuses_what_it_cannot_use():
    with pytest.raises(TypeError, match="needs a class"):
        register_container("Lazy")
    with pytest.raises(TypeError, match="both flatten and unflatten"):
        register_container(Hidden, lambda hidden: [hidden])


def test_under_compile_plain_containers_are_part_of_the_graph():
    def moved(batch):
        (there,) = recursive_to(batch, "cpu", False)
        (cast,), kwargs = cast_forward_inputs(torch.float64, there, k=[1])
        return apply_to_tensors(double, [cast, kwargs])

    batch = {"x": [one(), (one(), 3, None)], "p": Point(one(), "a"), "ids": torch.tensor([3])}
    compiled = torch.compile(moved, backend="eager", fullgraph=True)(batch)
    assert repr(compiled) == repr(moved(batch))


def test_under_compile_dataclasses_are_part_of_the_graph():
    try:
        torch.compile(lambda x: Plain(x), backend="eager", fullgraph=True)(one())  # noqa: PLW0108 - traced
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch cannot trace the construction of a dataclass")
    fn = torch.compile(lambda batch: apply_to_tensors(double, batch), backend="eager", fullgraph=True)
    assert repr(fn(Plain(one(), [one()]))) == "Plain(a=tensor([2.]), b=[tensor([2.])])"


def test_under_compile_other_containers_break_the_graph_and_are_right():
    hidden = Hidden(weight=one())
    derived = Derived(one(), one())
    derived.late = one()
    plain, packed = Plain(one()), torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    plain.late = one()
    fn = torch.compile(lambda batch: apply_to_tensors(double, batch), backend="eager")
    queue, changed, other, sequences = fn([deque([one()], maxlen=3), derived, plain, packed])
    assert other.a.item() == 2
    if ATTRIBUTES_ARE_TRACED:
        assert other.late.item() == 2
    assert (sequences.data.tolist(), sequences.batch_sizes.tolist()) == ([2.0] * 3, [2, 1])
    assert repr(queue) == "deque([tensor([2.])], maxlen=3)"
    assert (changed.a.item(), changed.b.item(), changed.late.item()) == (2, 6, 2)
    assert fn([one(), hidden])[1] is hidden
