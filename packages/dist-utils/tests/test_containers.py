"""Every kind of container keeps its type, its attributes and its identity; nothing is lost silently."""

import dataclasses
import enum
import functools
import gc
import logging
import re
import sys
import time
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pytest
import tensordict
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from dist_utils import apply_to_tensors, cast_forward_inputs, recursive_to, register_container


def double(tensor):
    return tensor * 2


def one():
    return torch.ones(1)


Point = namedtuple("Point", "x y")
Nothing = namedtuple("Nothing", [])


class TypedPoint(NamedTuple):
    x: Any
    y: Any = 3


class ShiftedPoint(Point):
    """A named tuple whose constructor does more than take the fields."""

    def __new__(cls, x):
        return super().__new__(cls, x, "shifted")


class Items(list):
    def __init__(self, values, label):
        super().__init__(values)
        self.label = label


class PairOf(tuple):  # noqa: SLOT001 - it has attributes on purpose
    pass


class Config(dict):
    """A dict subclass with another constructor and a ``__setitem__`` that must not be used."""

    def __init__(self, number):
        super().__init__(tensor=torch.full((1,), float(number)))
        self.number = number

    def __setitem__(self, key, value):
        raise AssertionError("written by hand")


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


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = 2


@dataclasses.dataclass(slots=True)
class Slots:
    a: Any
    b: Any = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any = 2


@dataclasses.dataclass
class Derived:
    """Upstream 2.13 raises on ``init=False`` and runs ``__post_init__`` two more times."""

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


@attrs.frozen(slots=False)
class AttrsFrozen:
    a: Any
    b: Any = 2


KEEPS_TYPE = {
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
    "NamedTuple": TypedPoint,
    "namedtuple with another constructor": ShiftedPoint,
    "structseq": lambda t: torch.return_types.max((t, 5)),
    "list subclass": lambda t: Items([t, 1], "label"),
    "tuple subclass": lambda t: PairOf((t, 1)),
    "UserDict": lambda t: UserDict(a=t),
    "UserList": lambda t: UserList([t, 1]),
    "SimpleNamespace": lambda t: SimpleNamespace(a=t, b=1),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slots dataclass": Slots,
    "frozen slots dataclass": FrozenSlots,
    "dataclass with InitVar": lambda t: Derived(t, 2),
    "ModelOutput": lambda t: Output(loss=t),
    "attrs with slots": AttrsSlots,
    "frozen attrs": AttrsFrozen,
}


def tensors_in(container):
    found = []

    def note(tensor):
        found.append(tensor)
        return tensor

    apply_to_tensors(note, container)
    return found


@pytest.mark.parametrize("name", KEEPS_TYPE)
@pytest.mark.parametrize("nested", [False, True])
def test_type_is_kept_the_tensor_replaced_and_the_original_untouched(name, nested):
    tensor = one()
    original = KEEPS_TYPE[name]((tensor,) if nested else tensor)
    changed = apply_to_tensors(double, original)
    assert type(changed) is type(original)
    assert changed is not original
    assert [t.item() for t in tensors_in(changed)] == [2]
    assert tensors_in(original)[0] is tensor
    assert tensor.item() == 1


@pytest.mark.parametrize("make", KEEPS_TYPE.values(), ids=KEEPS_TYPE)
def test_the_same_object_comes_back_when_nothing_changed(make):
    original = [make(one()), make(None)]
    assert apply_to_tensors(lambda tensor: tensor, original) is original
    assert apply_to_tensors(double, original)[1] is original[1]


def test_details_of_the_standard_containers_are_kept():
    ordered = OrderedDict(a=one(), b=1)
    ordered.move_to_end("a")
    assert list(apply_to_tensors(double, ordered)) == ["b", "a"]
    assert apply_to_tensors(double, defaultdict(list, a=one()))["new"] == []
    assert apply_to_tensors(double, deque([one()], maxlen=3)).maxlen == 3
    assert apply_to_tensors(double, ShiftedPoint(one())).y == "shifted"
    assert apply_to_tensors(double, Nothing()) == Nothing()
    assert type(apply_to_tensors(double, (torch.Size([2]), one()))[0]) is torch.Size
    now = time.localtime()
    assert apply_to_tensors(double, [now, one()])[0] is now


def test_hidden_fields_of_a_structseq_are_kept():
    now = time.localtime()
    with_tensor = time.struct_time([one(), *now[1:]], {"tm_zone": "X", "tm_gmtoff": 5})
    changed = apply_to_tensors(double, with_tensor)
    assert (changed[0].item(), changed.tm_zone, changed.tm_gmtoff) == (2, "X", 5)


def test_attributes_of_subclasses_are_kept_and_walked():
    items = Items([one()], "label")
    items.mask = one()
    pair = PairOf([one()])
    pair.label = "pair"
    config = Config(7)
    changed_items, changed_pair, changed_config = apply_to_tensors(double, [items, pair, config])
    assert (changed_items.label, changed_items.mask.item(), changed_items[0].item()) == ("label", 2, 2)
    assert (changed_pair.label, changed_pair[0].item()) == ("pair", 2)
    assert (changed_config.number, changed_config["tensor"].item()) == (7, 14)


def test_the_attributes_of_a_model_output_follow_its_items():
    output = Output(loss=one(), logits=(one(), one()))
    changed = apply_to_tensors(double, output)
    assert changed.loss is changed["loss"]
    assert changed.logits is changed["logits"]
    assert changed.hidden is None
    assert list(changed) == ["loss", "logits"]
    assert changed.loss.item() == 2


def test_dataclasses_are_copied_without_their_constructor():
    original = Derived(one(), 2)
    original.cache = [one()]
    changed = apply_to_tensors(double, original)
    assert (changed.a.item(), changed.b, changed.made, changed.extra) == (2, 6, 1, "kept")
    assert changed.cache[0].item() == 2
    assert original.cache[0].item() == 1


def test_an_init_false_tensor_of_a_dataclass_is_reached():
    assert apply_to_tensors(double, Derived(1, one())).b.item() == 6


def test_a_slot_that_was_never_set_stays_unset():
    @dataclasses.dataclass(slots=True)
    class Partial:
        a: Any
        b: Any = dataclasses.field(init=False)

    changed = apply_to_tensors(double, Partial(one()))
    assert changed.a.item() == 2
    assert not hasattr(changed, "b")


def test_an_object_with_a_state_that_a_copy_would_lose_is_refused():
    @dataclasses.dataclass
    class Weighted(float):
        value: Any

        def __new__(cls, value):
            return super().__new__(cls, 3.5)

    @dataclasses.dataclass
    class Failure(Exception):  # noqa: N818
        where: Any

    for cls in (Weighted, Failure):
        unchanged = cls(1)
        assert apply_to_tensors(double, [unchanged])[0] is unchanged
        with pytest.raises(TypeError, match=rf"{cls.__name__} needs register_container with two functions"):
            apply_to_tensors(double, cls(one()))
    register_container(Failure, lambda old: [old.where], lambda old, values: Failure(*values))
    assert apply_to_tensors(double, Failure(one())).where.item() == 2


class Delegating:
    """Has slots, and delegates everything else to the object that it wraps."""

    __slots__ = ("inner", "unset")

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)


def test_getattr_is_never_asked():
    register_container(Delegating)
    inner = SimpleNamespace(secret=one(), unset=one())
    changed = apply_to_tensors(double, Delegating(inner))
    assert (changed.inner.secret.item(), inner.secret.item()) == (2, 1)
    with pytest.raises(AttributeError):
        object.__getattribute__(changed, "unset")


def test_properties_and_cached_properties_do_not_run():
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

    checked = Checked(one())
    vars(checked)["hidden"] = one()
    assert apply_to_tensors(double, Lazy(one())).a.item() == 2
    assert vars(apply_to_tensors(double, checked))["hidden"].item() == 2


def test_a_dictionary_that_is_its_own_dict_stays_so():
    class AttrDict(dict):
        def __init__(self, **items):
            super().__init__(items)
            self.__dict__ = self

    changed = apply_to_tensors(double, AttrDict(x=one()))
    changed.y = 5
    assert (changed.x.item(), changed["x"].item(), changed["y"]) == (2, 2, 5)
    assert changed.__dict__ is changed


def test_subclasses_that_override_the_methods_of_their_base():
    class Liar(set):
        def __iter__(self):
            return iter(())

        def __len__(self):
            return 0

    changed = apply_to_tensors(double, Liar([one()]))
    assert [t.item() for t in set.__iter__(changed)] == [2]


def test_a_named_tuple_with_a_field_of_structseqs_name():
    Odd = namedtuple("Odd", "n_sequence_fields")
    assert apply_to_tensors(double, Odd(one())).n_sequence_fields.item() == 2


def test_short_lived_classes_are_not_kept_forever():
    first = type("Brief", (list,), {})
    gone = weakref.ref(first)
    apply_to_tensors(double, first([one()]))
    del first
    for _ in range(1000):
        apply_to_tensors(double, type("Brief", (list,), {})())
    gc.collect()
    assert gone() is None


def test_classes_modules_and_enum_members_are_never_copied():
    @dataclasses.dataclass
    class Fields:
        tensor: Any = dataclasses.field(default_factory=one)

    class Mode(Fields, enum.Enum):
        A = ()

    module = torch.nn.Linear(1, 1)
    module.register_buffer("more", one())
    Mode.A.tensor = one()
    leaves = [Plain, Point, Mode.A, module, "text", None, 1.5, range(3)]
    changed = apply_to_tensors(double, [*leaves, one()])
    assert all(new is old for new, old in zip(changed, leaves, strict=False))


def test_the_indices_of_a_packed_sequence_follow_its_data():
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    cast = apply_to_tensors(lambda tensor: tensor.to(torch.bfloat16), {"x": packed})["x"]
    assert type(cast) is type(packed)
    assert cast.data.dtype == torch.bfloat16
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)
    assert torch.equal(cast.sorted_indices, packed.sorted_indices)
    assert apply_to_tensors(lambda tensor: tensor, packed) is packed
    moved = apply_to_tensors(lambda tensor: tensor.to("meta"), packed)
    assert (moved.sorted_indices.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert apply_to_tensors(lambda tensor: tensor.shape, packed).data == packed.data.shape


def test_tensordicts_and_tensorclasses_by_the_recipe_of_register_container():
    @tensordict.tensorclass
    class Batch:
        x: torch.Tensor
        name: str

    def unflatten(old, values):
        return tensordict.TensorDict(dict(zip(old.keys(), values, strict=True)), old.batch_size)

    register_container(tensordict.TensorDict, lambda old: old.values(), unflatten)
    inner = tensordict.TensorDict({"b": torch.ones(3, 2)}, batch_size=[3])
    original = tensordict.TensorDict({"a": torch.ones(3), "n": inner}, batch_size=[3], device="cpu")
    changed = apply_to_tensors(double, [original], strict=True)[0]
    assert (changed["a"].sum(), changed["n", "b"].sum(), changed.batch_size) == (6, 12, (3,))
    assert (original["a"].sum(), original["n", "b"].sum()) == (3, 6)
    assert apply_to_tensors(lambda tensor: tensor, original) is original
    (moved,) = recursive_to(original, "meta", False)
    assert {moved["a"].device.type, moved["n", "b"].device.type} == {"meta"}
    batch = apply_to_tensors(double, Batch(torch.ones(3), "n", batch_size=[3]))
    assert (type(batch), batch.x.sum(), batch.name, batch.batch_size) == (Batch, 6, "n", (3,))


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


def test_temporary_children_are_not_mistaken_for_each_other():
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


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: (x,), Plain])
def test_three_hundred_levels(wrap):
    nested = [one()]
    for _ in range(300):
        nested = wrap(nested)
    changed = apply_to_tensors(double, nested)
    for _ in range(300):
        changed = changed.a if isinstance(changed, Plain) else changed["a" if type(changed) is dict else 0]
    assert changed[0].item() == 2


def test_a_cycle_is_an_error_with_its_path():
    inner = {"name": "x", "parts": [1, 2]}
    inner["parts"].append(inner)
    with pytest.raises(ValueError, match=r"a dict contains itself, at container\[1\]\.a\['parts'\]\[2\]$"):
        apply_to_tensors(double, [0, Plain(inner)])
    myself = SimpleNamespace()
    myself.me = myself
    with pytest.raises(ValueError, match=r"a SimpleNamespace contains itself, at container\.me$"):
        apply_to_tensors(double, myself)


def test_a_set_does_not_shrink_in_silence():
    with pytest.raises(ValueError, match="a set of 2 elements would shrink to 1"):
        apply_to_tensors(lambda tensor: tensor.shape, {one(), one()})
    with pytest.raises(ValueError, match="a frozenset of 2 elements would shrink to 1"):
        apply_to_tensors(lambda _: None, frozenset([one(), one()]))


def test_fn_may_return_anything_and_its_errors_pass_through():
    assert apply_to_tensors(torch.numel, {"a": [torch.ones(3)]}) == {"a": [3]}
    assert apply_to_tensors(torch.numel, torch.ones(3)) == 3
    with pytest.raises(ZeroDivisionError):
        apply_to_tensors(lambda _: 1 / 0, [one()])


class Hidden:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def look(self):
        return self


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight):
        self.weight = weight


HOLDERS = {
    "attributes": lambda t: Hidden(inner=Hidden(weight=t)),
    "items of an attribute": lambda t: Hidden(parts={"a": (0, t)}),
    "key of an attribute": lambda t: Hidden(by_tensor={t: 1}),
    "slot": Slotted,
    "module": lambda _: torch.nn.Linear(1, 1, bias=False),
    "iterator": lambda t: iter([t]),
    "view": lambda t: {1: t}.values(),
    "mapping proxy": lambda t: MappingProxyType({1: t}),
    "partial": lambda t: functools.partial(double, t),
    "generator": lambda t: (x for x in (t,)),
    "closure": lambda t: lambda: t,
    "default": lambda t: lambda x=t: x,
    "method of a tensor": lambda t: t.item,
    "method": lambda t: Hidden(weight=t).look,
}
KEYS_AND_FACTORIES = {
    "key": lambda t: {t: 1},
    "tuple key": lambda t: {(t,): 1},
    "factory": lambda t: defaultdict(lambda: t),
}


@pytest.mark.parametrize("name", [*HOLDERS, *KEYS_AND_FACTORIES])
def test_strict_refuses_tensors_out_of_reach_with_their_path(name):
    if name == "generator" and sys.version_info < (3, 11):
        pytest.skip("the garbage collector does not know a generator's variables")
    holder = {**HOLDERS, **KEYS_AND_FACTORIES}[name](one())
    original = {"k": [0, holder]}
    with pytest.raises(TypeError) as caught:
        apply_to_tensors(double, original, strict=True)
    place = r"container\['k'\]\[1\]" + (r"\.default_factory" if name == "factory" else "")
    text = rf"{place} holds a tensor out of reach \(\w+( -> \w+)* -> (Tensor|Parameter)\): use register"
    assert re.match(text, str(caught.value))
    assert apply_to_tensors(double, original) is original  # without strict it is left alone


def test_strict_refuses_a_root_that_holds_a_tensor():
    with pytest.raises(TypeError, match=r"^container holds a tensor out of reach \(Hidden -> "):
        apply_to_tensors(double, Hidden(w=one()), strict=True)


def test_strict_looks_at_no_object_twice():
    graph = [Hidden(name=str(number)) for number in range(2000)]
    holders = [Hidden(graph=graph) for _ in range(2000)]
    began = time.process_time()
    apply_to_tensors(double, holders, strict=True)
    assert time.process_time() - began < 5  # four million visits would take longer


def test_strict_accepts_what_holds_no_tensor():
    logging.getLogger("a").tensor = one()  # not the object's own
    loop = Hidden(
        log=logging.getLogger("a"), name="a", device=torch.device("cpu"), dtype=torch.float32, fn=double
    )
    loop.me = loop
    harmless = [loop, range(3), slice(1), iter("ab"), (x for x in "ab"), len, torch, Plain, print, None]
    assert apply_to_tensors(double, [harmless, one()], strict=True)[0] is harmless


class Lazy:
    __slots__ = ("label", "parts")

    def __init__(self, parts):
        self.parts = parts
        self.label = "lazy"

    def __setattr__(self, name, value):
        if name == "label" and value != "lazy":
            raise AssertionError
        object.__setattr__(self, name, value)


class LazyChild(Lazy):
    def __init__(self):
        super().__init__([torch.full((1,), 3.0)])


def test_a_registered_class_and_its_subclasses_are_walked():
    register_container(Lazy)
    assert apply_to_tensors(double, [Lazy([one()])], strict=True)[0].parts[0].item() == 2
    changed = apply_to_tensors(double, LazyChild())
    assert (type(changed), changed.parts[0].item(), changed.label) == (LazyChild, 6, "lazy")
    register_container(Lazy, lambda lazy: lazy.parts, lambda _, parts: Lazy([*parts, "again"]))
    assert apply_to_tensors(double, Lazy([one()])).parts[1] == "again"
    unchanged = Lazy([1])
    assert apply_to_tensors(double, unchanged) is unchanged


def test_a_path_through_a_registered_class_counts_its_contents():
    class Box:
        def __init__(self, content):
            self.content = content

    register_container(Box, lambda box: box.content, lambda _, content: Box(content))
    box = Box([1])
    box.content.append(box)
    with pytest.raises(ValueError, match=r"Box contains itself, at container\[1\]"):
        apply_to_tensors(double, box)


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

    ids = torch.tensor([3])
    batch = {"x": [one(), (one(), 3, None)], "p": Point(one(), "a"), "ids": ids}
    compiled = torch.compile(moved, backend="eager", fullgraph=True)(batch)
    eager = moved(batch)
    assert [t.dtype for t in tensors_in(compiled)] == [t.dtype for t in tensors_in(eager)]
    assert all(map(torch.equal, tensors_in(compiled), tensors_in(eager)))
    assert [type(part) for part in compiled[0].values()] == [type(part) for part in eager[0].values()]


def test_under_compile_dataclasses_are_part_of_the_graph():
    try:
        torch.compile(lambda x: Plain(x), backend="eager", fullgraph=True)(one())  # noqa: PLW0108 - traced
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch cannot trace the construction of a dataclass")
    fn = torch.compile(lambda batch: apply_to_tensors(double, batch), backend="eager", fullgraph=True)
    changed = fn(Plain(one(), [one()]))
    assert (type(changed), changed.a.item(), changed.b[0].item()) == (Plain, 2, 2)


def test_under_compile_other_containers_break_the_graph_and_are_right():
    fn = torch.compile(lambda batch: apply_to_tensors(double, batch), backend="eager")
    changed = fn(deque([one()], maxlen=3))
    assert (changed[0].item(), changed.maxlen) == (2, 3)


@dataclasses.dataclass
class SetLater:
    a: torch.Tensor
    b: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class WithItems(dict):
    a: torch.Tensor


def test_under_compile_dataclasses_keep_what_their_constructors_do_not_take():
    fn = torch.compile(lambda batch: apply_to_tensors(double, batch), backend="eager")
    later, items = SetLater(one()), WithItems(one())
    later.b, items["key"] = one(), one()
    changed, other = fn([later, items])
    assert (changed.a.item(), changed.b.item()) == (2, 2)
    assert (other.a.item(), other["key"].item()) == (2, 2)


def test_under_compile_strict_finds_what_is_out_of_reach():
    hidden = Hidden(weight=one())
    fn = torch.compile(lambda x: apply_to_tensors(double, [x, hidden], strict=True), backend="eager")
    with pytest.raises(TypeError, match="holds a tensor out of reach"):
        fn(one())


class Chained(ChainMap):
    """Has an attribute as well."""


def test_chain_maps_are_walked_map_by_map():
    shared = torch.ones(2)
    first, second = {"a": shared}, OrderedDict(a=torch.zeros(1), b=[shared])
    chain = Chained(first, second)
    chain.extra = shared
    result = apply_to_tensors(torch.neg, chain)
    assert type(result) is Chained
    assert [type(part) for part in result.maps] == [dict, OrderedDict]
    assert torch.equal(result["a"], -shared)
    assert result["a"] is result["b"][0] is result.extra
    assert apply_to_tensors(lambda tensor: tensor, chain) is chain
    assert chain.maps == [first, second]
    assert apply_to_tensors(torch.neg, ChainMap({}, {"x": shared}), strict=True)["x"].tolist() == [-1, -1]


def test_pydantic_models_are_copied_without_validation():
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)
        image: torch.Tensor
        _hidden: Any = pydantic.PrivateAttr(default=None)

    class Outer(pydantic.BaseModel):
        inner: Inner
        name: str

        @pydantic.model_validator(mode="after")
        def _count(self):
            validated.append(self)
            return self

    validated = []
    inner = Inner(image=torch.ones(2), more=torch.ones(1))
    inner._hidden = [torch.ones(3)]
    outer = Outer(inner=inner, name="a")
    result = apply_to_tensors(torch.neg, outer, strict=True)
    assert len(validated) == 1
    assert type(result) is Outer
    assert (result.name, result.model_fields_set) == ("a", {"inner", "name"})
    assert [result.inner.image.sum(), result.inner.more.sum(), result.inner._hidden[0].sum()] == [-2, -1, -3]
    assert outer.inner.image.sum() == 2
    assert apply_to_tensors(lambda tensor: tensor, outer) is outer


def test_what_a_cached_property_has_computed_is_moved_like_an_attribute():
    @dataclasses.dataclass
    class Batch:
        image: Any

        @functools.cached_property
        def norm(self):
            calls.append(self)
            return torch.ones(1)

    calls = []
    for image in (torch.ones(2), "path"):  # with and without another tensor that moves
        batch = Batch(image)
        assert batch.norm.device.type == "cpu"
        (moved,) = recursive_to(batch, "meta", False)
        assert moved.norm.device.type == "meta"
        assert batch.norm.device.type == "cpu"
    assert len(calls) == 2
    (fresh,) = recursive_to(Batch(torch.ones(2)), "meta", False)
    assert "norm" not in vars(fresh)


@dataclasses.dataclass
class _Slotted:
    __slots__ = ("x",)
    x: object


class _HidesSlot(_Slotted):
    __slots__ = ()

    @property
    def x(self):
        raise AssertionError("no code of a user's class runs")


class _SameSlotAgain(_Slotted):
    __slots__ = ("x",)


@pytest.mark.parametrize("cls", [_HidesSlot, _SameSlotAgain])
def test_slots_that_a_subclass_hides_are_walked(cls):
    slot = _Slotted.__dict__["x"]
    obj = cls.__new__(cls)
    slot.__set__(obj, torch.ones(1))
    assert slot.__get__(apply_to_tensors(torch.neg, obj)).item() == -1.0
