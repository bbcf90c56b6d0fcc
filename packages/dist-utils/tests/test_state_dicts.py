"""Prefixes of state dicts change without losing an entry, and the metadata with them."""

from collections import OrderedDict

import pytest
import torch

from dist_utils import replace_by_prefix


def renamed(state_dict, old, new, **options):
    replace_by_prefix(state_dict, old, new, **options)
    return state_dict


def test_all_keys_are_renamed_at_once():
    """PyTorch's function gives {'a.a.a.x': 1}."""
    assert renamed({"a.x": 1, "a.a.x": 2}, "a.", "a.a.") == {"a.a.x": 1, "a.a.a.x": 2}
    assert renamed({"a.a.x": 1, "a.x": 2}, "a.", "") == {"a.x": 1, "x": 2}


def test_a_collision_raises_before_anything_changes():
    state_dict = {"z": 0, "a.x": 1, "b.x": 2}
    with pytest.raises(ValueError, match=r"key 'a\.x' would become 'b\.x', .* 0 others"):
        replace_by_prefix(state_dict, "a.", "b.")
    assert list(state_dict.items()) == [("z", 0), ("a.x", 1), ("b.x", 2)]


def test_on_collision_chooses():
    assert renamed({"a.x": 1, "b.x": 2}, "a.", "b.", on_collision="overwrite") == {"b.x": 1}
    assert renamed({"a.x": 1, "b.x": 2}, "a.", "b.", on_collision="keep") == {"b.x": 2}
    with pytest.raises(ValueError, match="'drop'"):
        renamed({}, "a.", "b.", on_collision="drop")


def test_order_identity_and_other_keys_are_kept():
    state_dict = OrderedDict([("first", 0), ("m.w", 1), (7, 2), ("last", 3)])
    assert list(renamed(state_dict, "m.", "")) == ["first", "w", 7, "last"]


def test_equal_prefixes_are_refused():
    with pytest.raises(ValueError, match="both 'a'"):
        replace_by_prefix({}, "a", "a")


class Versioned(torch.nn.Module):
    _version = 5

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def test_the_metadata_of_modules_is_renamed():
    wrapped = torch.nn.Sequential(OrderedDict(module=torch.nn.Sequential(OrderedDict(layer=Versioned()))))
    plain = wrapped.module
    state_dict = wrapped.state_dict()
    replace_by_prefix(state_dict, "module.", "")
    assert list(state_dict) == ["layer.weight"]
    assert state_dict._metadata == plain.state_dict()._metadata
    assert state_dict._metadata["layer"] == {"version": 5}
    plain.load_state_dict(state_dict)

    replace_by_prefix(state_dict, "", "module.")
    assert list(state_dict) == ["module.layer.weight"]
    assert set(state_dict._metadata) == {"module", "module.layer"}

    replace_by_prefix(state_dict, "module.lay", "module.play")
    assert list(state_dict) == ["module.player.weight"]
    assert set(state_dict._metadata) == {"module", "module.player"}


def test_copies_of_a_state_dict_that_share_its_metadata_are_untouched():
    """A load_state_dict hook gets such a copy; renaming there must not change the user's state dict."""

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Versioned()
            self.register_load_state_dict_pre_hook(
                lambda module, state_dict, prefix, *_: replace_by_prefix(
                    state_dict, prefix, prefix + "inner."
                )
            )

    state_dict = Versioned().state_dict()
    before = dict(state_dict._metadata)
    for _ in range(2):
        Wrapper().load_state_dict(state_dict)
        assert list(state_dict) == ["weight"]
        assert dict(state_dict._metadata) == before


def with_versions(**versions):
    state_dict = OrderedDict((f"{name}.{name}", version) for name, version in versions.items())
    state_dict._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())
    return state_dict


def test_versions_of_different_modules_collide_like_keys():
    with pytest.raises(ValueError, match="version of 'a' would become 'b'"):
        renamed(with_versions(a=1, b=2), "a.", "b.")
    kept = renamed(with_versions(a=1, b=2), "a.", "b.", on_collision="keep")
    assert kept._metadata == {"b": {"version": 2}}
    overwritten = renamed(with_versions(a=1, b=2), "a.", "b.", on_collision="overwrite")
    assert overwritten._metadata == {"b": {"version": 1}}
    assert renamed(with_versions(a=1, b=1), "a.", "b.")._metadata == {"b": {"version": 1}}
