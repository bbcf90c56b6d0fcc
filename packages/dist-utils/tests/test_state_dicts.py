"""Prefixes of state dicts change without losing an entry, and the metadata with them."""

import copy
from collections import OrderedDict

import pytest
import torch

from dist_utils import replace_by_prefix


def renamed(state_dict, old, new, **options):
    replace_by_prefix(state_dict, old, new, **options)
    return state_dict


def test_all_keys_are_renamed_at_once_and_in_their_order():
    """PyTorch's function gives {'a.a.a.x': 1}."""
    assert renamed({"a.x": 1, "a.a.x": 2}, "a.", "a.a.") == {"a.a.x": 1, "a.a.a.x": 2}
    assert renamed({"a.a.x": 1, "a.x": 2}, "a.", "") == {"a.x": 1, "x": 2}
    ordered = OrderedDict([("first", 0), ("m.w", 1), (7, 2), ("last", 3)])
    assert list(renamed(ordered, "m.", "")) == ["first", "w", 7, "last"]


def test_a_collision_raises_before_anything_changes_or_does_what_on_collision_says():
    state_dict = {"z": 0, "a.x": 1, "b.x": 2}
    with pytest.raises(ValueError, match=r"key 'a\.x' would become 'b\.x', .* 0 others"):
        replace_by_prefix(state_dict, "a.", "b.")
    assert list(state_dict.items()) == [("z", 0), ("a.x", 1), ("b.x", 2)]
    assert renamed({"a.x": 1, "b.x": 2}, "a.", "b.", on_collision="overwrite") == {"b.x": 1}
    assert renamed({"a.x": 1, "b.x": 2}, "a.", "b.", on_collision="keep") == {"b.x": 2}


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="'drop'"):
        replace_by_prefix({}, "a.", "b.", on_collision="drop")
    with pytest.raises(ValueError, match="both 'a'"):
        replace_by_prefix({}, "a", "a")


class Versioned(torch.nn.Module):
    _version = 5

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def test_the_metadata_of_modules_is_renamed_but_not_that_of_copies_which_share_it():
    plain = torch.nn.Sequential(OrderedDict(layer=Versioned()))
    state_dict = torch.nn.Sequential(OrderedDict(module=plain)).state_dict()
    copied = copy.copy(state_dict)  # as load_state_dict makes one
    before = list(state_dict._metadata)
    for old, new, key, modules in (
        ("module.", "", "layer.weight", ["", "layer"]),
        ("", "module.", "module.layer.weight", ["module", "module.layer"]),
        ("module.lay", "module.play", "module.player.weight", ["module", "module.player"]),
    ):
        replace_by_prefix(copied, old, new)
        assert list(copied) == [key]
        assert sorted(copied._metadata) == modules
        assert copied._metadata[modules[-1]] == {"version": 5}
    assert (list(state_dict), list(state_dict._metadata)) == (["module.layer.weight"], before)


def test_a_renamed_modules_version_replaces_that_of_its_new_name():
    state_dict = OrderedDict([("a.a", 1), ("b.b", 2)])
    state_dict._metadata = OrderedDict(a={"version": 1}, b={"version": 2})
    assert renamed(state_dict, "a.", "b.")._metadata == {"b": {"version": 1}}
