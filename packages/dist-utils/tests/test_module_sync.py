"""Modules are compared on every rank, and end up bitwise equal to the source's."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import utils as pytorch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_utils import (
    TensorMismatchError,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shape_across_processes,
)
from dist_utils.testing import run_ranks

BUCKET = 250 << 20


class Everything(torch.nn.Module):
    """Every kind of parameter and buffer, with values that depend on the seed."""

    def __init__(self, seed):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
        self.linear = torch.nn.Linear(300, 400)  # the weight is large enough for a message of its own
        self.frozen = torch.nn.Parameter(draw(3), requires_grad=False)
        self.tied = self.linear.bias
        self.scalar = torch.nn.Parameter(draw())
        self.fp16 = torch.nn.Parameter(draw(5).half())
        self.transposed = torch.nn.Parameter(draw(4, 3).t())
        self.image = torch.nn.Parameter(draw(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.wide = torch.nn.Parameter(draw(300, 300).t())  # large and not contiguous
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(draw(*parameter.shape))
        buffers = {
            "flags": draw(5) > 0,
            "complex": torch.complex(draw(3), draw(3)),
            "conjugate": torch.complex(draw(3), draw(3)).conj(),
            "negative": torch.complex(draw(3), draw(3)).conj().imag,
            "ids": torch.randint(100, (7,), generator=random),
            "bf16": draw(3).bfloat16(),
            "float8": draw(9).to(torch.float8_e4m3fn),
            "fp64": draw(2).double(),
            "empty": draw(0, 4),
            "coo": _sparse(draw).to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor([[1, 1, 0]], draw(3), (4,)),
            "csr": _sparse(draw).to_sparse_csr(),
            "csc": _sparse(draw).to_sparse_csc(),
            "bsr": _sparse(draw).to_sparse_bsr((2, 2)),
            "bsc": _sparse(draw).to_sparse_bsc((2, 2)),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "ids")


def _sparse(draw):
    dense = draw(4, 4)
    return dense * (dense > 0)  # a different number of elements for every seed


def _states(module):
    return {
        name: tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def _differing(mine, wanted):
    """Names of the tensors that are not bitwise equal."""
    return [
        name
        for name in wanted
        if mine[name].dtype != wanted[name].dtype or not torch.equal(_bits(mine[name]), _bits(wanted[name]))
    ]


def _bits(tensor):
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _caught(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as error:
        return str(error)
    return None


def _sync_everything(rank):
    group = dist.group.WORLD
    seen = {}
    for bucket in (BUCKET, 64, 1):
        for src in (0, 1):
            module = Everything(rank)
            layouts = [t.stride() for t in module.parameters()]
            ids = [id(t) for t in [*module.parameters(), *module.buffers()]]
            sync_module_states(module, group, bucket, src, ())
            assert [t.stride() for t in module.parameters()] == layouts
            assert [id(t) for t in [*module.parameters(), *module.buffers()]] == ids
            assert module.tied is module.linear.bias
            seen[bucket, src] = _differing(_states(module), _states(Everything(src)))
    return seen


def test_every_kind_of_tensor_ends_bitwise_equal_to_the_sources():
    for seen in run_ranks(_sync_everything, 3):
        assert seen == {(bucket, src): [] for bucket in (BUCKET, 64, 1) for src in (0, 1)}


def _dense(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if tensor.layout == torch.strided}


def _made_in_inference_mode(rank):
    """Return how many tensors differ from the source's if some or all ranks made theirs in inference mode."""
    differing = []
    for who in ([0, 1], [0], [1]):
        tensors, wanted = (_dense(Everything(seed)) for seed in (rank, 0))
        with torch.inference_mode(rank in who):
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        sync_params_and_buffers(None, list(tensors.values()), BUCKET, 0)
        differing.append(_differing(tensors, wanted))
    return differing


def test_modules_made_in_inference_mode_are_synchronized_too():
    assert run_ranks(_made_in_inference_mode, 2) == [[[], [], []]] * 2


class _Wrapped(torch.Tensor):
    """A subclass that handles its own memory, like quantized and distributed tensors."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def _freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _sparse_of_inference():
    with torch.inference_mode():
        return torch.ones(4).to_sparse()


def _unsendable(rank):
    """Return the errors where one rank, or every rank, holds a tensor of a kind that cannot be sent."""
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "DTensor": lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        "_Wrapped": lambda: _Wrapped(torch.ones(4)),
        "freed": _freed,
        "meta": lambda: torch.ones(4, device="meta"),
        "sparse": _sparse_of_inference,
        "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(3)]),
    }
    errors = {}
    for name, make in kinds.items():
        special = make()  # a DTensor is made by all ranks together
        for who in ([0, 1], [0], [1]):
            module = torch.nn.Linear(2, 2)
            module.register_buffer("odd", special if rank in who else torch.ones(4))
            expected = ValueError if rank in who else TensorMismatchError
            errors[(name, *who)] = _caught(expected, sync_module_states, module, None, BUCKET, 0, ())
    return errors


def test_tensors_of_other_kinds_are_refused_on_every_rank():
    for errors in run_ranks(_unsendable, 2):
        for (name, *who), text in errors.items():
            assert {"freed": "freed", "meta": "meta device", "sparse": "inference mode"}.get(
                name, f"odd is a {name}"
            ) in text, (
                name,
                who,
            )
        assert len(errors) == 18


def _choices(rank):
    seen = {}
    mine, source = _states(Everything(rank)), _states(Everything(0))

    module = Everything(rank)
    sync_module_states(module, None, BUCKET, 0, {"linear.bias", "scalar", "flags"})
    states = _states(module)
    # "linear.bias" is "tied" under its second name.
    seen["ignored"] = _differing(states, source) == (["tied", "scalar", "flags"] if rank else [])
    seen["ignored are untouched"] = all(
        torch.equal(states[name], mine[name]) for name in ("tied", "scalar", "flags")
    )

    module = Everything(rank)
    sync_module_states(module, None, BUCKET, 0, (), False)
    buffers = [name for name, _ in module.named_buffers() if name != "empty"]
    seen["no buffers"] = _differing(_states(module), source) == (buffers if rank else [])

    module = Everything(rank)
    sync_params_and_buffers(None, list(module.parameters()), BUCKET, 0)
    parameters = dict(module.named_parameters())
    seen["list"] = not _differing(parameters, {name: source[name] for name in parameters})

    ours, theirs = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    theirs.load_state_dict(ours.state_dict())
    sync_module_states(ours, None, BUCKET, 1, ())
    pytorch._sync_module_states(theirs, dist.group.WORLD, BUCKET, 1, ())
    seen["as PyTorch's"] = torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)

    # In a group of ranks 1 and 2, src=0 is rank 1.
    group = dist.new_group([1, 2])
    lone = dist.new_group([0])
    module = Everything(rank)
    sync_module_states(module, lone if rank == 0 else group, BUCKET, 0, ())
    seen["subgroup"] = not _differing(_states(module), _states(Everything(min(rank, 1))))

    seen["src"] = _caught(ValueError, sync_module_states, module, None, BUCKET, 3, ())
    seen["bucket"] = _caught(ValueError, sync_module_states, module, None, 0, 0, ())
    seen["lazy"] = _caught(ValueError, sync_module_states, torch.nn.LazyLinear(3), None, BUCKET, 0, ())
    on_meta = torch.nn.Linear(2, 2, device="meta")
    seen["meta"] = _caught(ValueError, sync_module_states, on_meta, None, BUCKET, 0, ())
    expanded = torch.nn.Module()
    expanded.register_buffer("rows", torch.ones(3).expand(2, 3))
    seen["expanded"] = _caught(ValueError, sync_module_states, expanded, None, BUCKET, 0, ())
    seen["mkldnn"] = _caught(
        ValueError, sync_params_and_buffers, None, [torch.ones(2).to_mkldnn()], BUCKET, 0
    )
    for verify in (True, False):
        seen["types", verify] = [
            _caught(TypeError, sync_module_states, module, None, 2.5, 0, (), verify=verify),
            _caught(TypeError, sync_module_states, module, None, BUCKET, True, (), verify=verify),
            _caught(TypeError, sync_module_states, module, None, BUCKET, 0, "weight", verify=verify),
            _caught(TypeError, sync_module_states, "module", None, BUCKET, 0, (), verify=verify),
        ]
    seen["no tensor"] = _caught(TypeError, sync_params_and_buffers, None, [1.0], BUCKET, 0)
    if rank == 0:
        seen["left out"] = _caught(ValueError, sync_module_states, module, group, BUCKET, 0, ())
    sync_module_states(torch.nn.ReLU(), None, BUCKET, 0, ())
    return seen


@pytest.fixture(scope="module")
def choices():
    return run_ranks(_choices, 3)


@pytest.mark.parametrize(
    "what", ["ignored", "ignored are untouched", "no buffers", "list", "as PyTorch's", "subgroup"]
)
def test_sync(choices, what):
    assert [seen[what] for seen in choices] == [True] * 3


def test_bad_arguments_are_refused_before_communication(choices):
    for seen in choices:
        assert "src 3 is out of range for a group of 3 ranks" in seen["src"]
        assert "must be positive, got 0" in seen["bucket"]
        assert "weight is not initialized yet" in seen["lazy"]
        assert "weight is on the meta device" in seen["meta"]
        assert "rows is expanded" in seen["expanded"]
        assert "has layout torch._mkldnn" in seen["mkldnn"]
        for verify in (True, False):
            bucket, src, ignore, no_module = seen["types", verify]
            assert bucket == "broadcast_bucket_size must be an int, got 2.5"
            assert src == "src must be an int, got True"
            assert "not one string" in ignore
            assert "module is a str" in no_module
        assert seen["no tensor"] == "module_states[0] is a float, not a tensor"
    assert "rank 0 is not a member" in choices[0]["left out"]


class Logger:
    def set_error_and_log(self, message):
        self.message = message


class Renamed(torch.nn.Module):
    """The same parameters, registered in a different order or tied differently on each rank."""

    def __init__(self, names):
        super().__init__()
        one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
        for name, parameter in zip(names, (one, two, two), strict=False):
            setattr(self, name, parameter)


def _with_buffers(**buffers):
    module = torch.nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


GROUP_TIMEOUT = 50.0


def _one_sided(rank):
    """Ranks that differ in more than shapes, or one rank that cannot take part."""
    linear = torch.nn.Linear(2, 2)
    elsewhere = {
        "lazy": torch.nn.LazyLinear(2),
        "meta": torch.nn.Linear(2, 2, device="meta"),
    }
    calls = {
        "order": (Renamed(["q", "k"] if rank else ["k", "q"]), BUCKET, 0, ()),
        "ties": (Renamed(["x", "y", "z"] if rank else ["y", "z", "x"]), BUCKET, 0, ()),
        "ignored": (Renamed(["a", "b"]), BUCKET, 0, {"a" if rank else "b"}),
        "bucket": (linear, BUCKET + rank, 0, ()),
        "src": (linear, BUCKET, rank % 2, ()),
        "src range": (linear, BUCKET, 5 * rank, ()),
        **{name: (module if rank == 1 else linear, BUCKET, 0, ()) for name, module in elsewhere.items()},
    }
    seen, began = {}, time.monotonic()
    for name, (module, bucket, src, ignore) in calls.items():
        try:
            sync_module_states(module, None, bucket, src, ignore)
        except (TensorMismatchError, ValueError) as error:
            seen[name] = type(error).__name__, str(error)
    lists = [torch.ones(2), torch.ones(3)][:: 1 if rank else -1]
    seen["list"] = _caught(TensorMismatchError, sync_params_and_buffers, None, lists, BUCKET, 0)
    wrong = [torch.ones(1), None if rank == 1 else torch.ones(1)]
    seen["no tensor"] = _caught(
        (TensorMismatchError, TypeError), verify_param_shape_across_processes, None, wrong
    )
    seen["seconds"] = time.monotonic() - began

    # Without the comparison, on matching modules.
    module = Everything(rank)
    sync_module_states(module, None, BUCKET, 0, (), verify=False)
    sync_params_and_buffers(None, list(module.parameters()), BUCKET, 0, verify=False)
    seen["unverified"] = not _differing(_states(module), _states(Everything(0)))

    # Autograd notices a write into a tensor's own memory.
    weight = torch.nn.Parameter(torch.full((300, 300), 1.0 + rank))
    x = torch.ones(300, requires_grad=True)
    loss = (weight @ x).sum()
    sync_params_and_buffers(None, [weight], BUCKET, 0)
    seen["version"] = _caught(RuntimeError, loss.backward)

    # Tensors may overlap if they do so in the same way on all ranks.
    base = torch.arange(6.0) + 10 * rank
    module = _with_buffers(base=base, part=base[2:4], columns=base.view(3, 2)[:, 1])
    sync_module_states(module, None, BUCKET, 0, ())
    seen["overlap alike"] = base.tolist()

    # A tied buffer is sent once and honors each of its names.
    tied = torch.nn.Module()
    tied.register_buffer("first", torch.full((2,), float(rank)))
    tied.register_buffer("second", tied.first)
    sync_module_states(tied, None, BUCKET, 0, {"second"})
    seen["tied buffer"] = tied.first.tolist() == [rank, rank]
    sync_module_states(tied, None, BUCKET, 0, ())
    seen["tied buffer sent"] = tied.first.tolist() == [0, 0] and tied.second is tied.first
    return seen


@pytest.fixture(scope="module")
def one_sided():
    return run_ranks(_one_sided, 2, group_timeout=GROUP_TIMEOUT)


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "order": "rank 0 has k of shape (2,)",
        "ties": "rank 0 has y of shape (2,)",
        "ignored": "rank 0 has a of shape (2,)",
        "bucket": f"rank 0 was called with broadcast_bucket_size {BUCKET}, src 0, rank 1 with",
        "src": "src 0, rank 1 with",
    }.items(),
)
def test_ranks_that_differ_in_more_than_shapes_all_raise(one_sided, what, expected):
    first, second = one_sided
    assert first[what] == second[what]
    assert first[what][0] == "TensorMismatchError"
    assert expected in first[what][1]


@pytest.mark.parametrize("what", ["lazy", "meta", "src range"])
def test_a_rank_that_cannot_take_part_tells_the_others(one_sided, what):
    (kind, message), (own_kind, own) = (seen[what] for seen in one_sided)
    assert (kind, own_kind) == ("TensorMismatchError", "ValueError")
    assert message == f"rank 1 cannot go on: ValueError: {own}"
    assert one_sided[0]["no tensor"] == f"rank 1 cannot go on: TypeError: {one_sided[1]['no tensor']}"


def test_no_rank_waits_for_a_timeout(one_sided):
    assert max(seen["seconds"] for seen in one_sided) < GROUP_TIMEOUT


def test_lists_are_compared_too(one_sided):
    assert all("first at tensor 0: rank 0 has module_states[0] of shape (3,)" in s["list"] for s in one_sided)


def test_tensors_that_overlap_in_the_same_way_are_synchronized(one_sided):
    assert all(seen["overlap alike"] == [0, 1, 2, 3, 4, 5] for seen in one_sided)


def test_without_the_comparison(one_sided):
    assert all(seen["unverified"] for seen in one_sided)


def test_autograd_notices_a_tensor_written_in_its_own_memory(one_sided):
    assert one_sided[0]["version"] is None  # the source is not written
    assert "modified by an inplace operation" in one_sided[1]["version"]


def test_tied_buffers(one_sided):
    assert all(seen["tied buffer"] and seen["tied buffer sent"] for seen in one_sided)


def _messages(rank):
    """Return the bytes of every message of one call, in order."""
    sizes = []
    whole = dist.ProcessGroup.broadcast

    def counted(group, tensor, root):
        sizes.append(tensor.nbytes)
        return whole(group, tensor, root)

    tensors = [torch.ones(10), torch.ones(10), torch.ones(100_000), torch.ones(10).double(), torch.ones(10)]
    tensors += [torch.ones(60_000, dtype=torch.float16)] * 5
    with mock.patch.object(dist.ProcessGroup, "broadcast", counted):
        sync_params_and_buffers(None, tensors, 300_000, 0, verify=False)
    return sizes


def test_small_tensors_share_messages_of_at_most_the_bucket_size():
    assert run_ranks(_messages, 2) == [[300_000, 100_000, 120, 80, 300_000, 300_000]] * 2


MISMATCHES = {
    "shape": lambda rank: [torch.ones(2), torch.ones(2 + rank)],
    "ndim": lambda rank: [torch.ones(2), torch.ones((1,) * (1 + rank))],
    "dtype": lambda rank: [torch.ones(2), torch.ones(2, dtype=[torch.float32, torch.float16][rank % 2])],
    "stride": lambda rank: [torch.ones(2), torch.ones(3, 3) if rank != 1 else torch.ones(3, 3).t()],
    "requires_grad": lambda rank: [torch.ones(2), torch.ones(2, requires_grad=rank == 2)],
    "layout": lambda rank: [torch.ones(2), torch.ones(2).to_sparse() if rank == 1 else torch.ones(2)],
    "count": lambda rank: [torch.ones(2)] * (2 - rank // 2),
    "none there": lambda rank: [torch.ones(2)] * (rank % 2),
    "sparse_dim": lambda rank: [torch.eye(2).to_sparse(1 + rank % 2)],
    "block": lambda rank: [torch.eye(4).to_sparse_bsr((1 + rank % 2, 2))],
    "dense_dim": lambda rank: [torch.ones(2, 2, 2).to_sparse_csr(dense_dim=rank % 2)],
    "index dtype": lambda rank: [_csr(torch.int32 if rank == 1 else torch.int64)],
}


def _csr(dtype):
    rows, columns = torch.tensor([0, 1], dtype=dtype), torch.tensor([0], dtype=dtype)
    return torch.sparse_csr_tensor(rows, columns, torch.ones(1), (1, 1), check_invariants=True)


def _mismatches(rank):
    seen = {}
    for name, make in MISMATCHES.items():
        logger = Logger()
        error = _caught(TensorMismatchError, verify_param_shape_across_processes, None, make(rank), logger)
        assert error == logger.message
        seen[name] = error
        assert _caught(TensorMismatchError, sync_params_and_buffers, None, make(rank), BUCKET, 0) is not None
    tensors = MISMATCHES["shape"](rank)
    seen["names"] = _caught(
        TensorMismatchError, verify_param_shape_across_processes, None, tensors, names=["a.weight", "a.bias"]
    )
    verify_param_shape_across_processes(None, [])
    verify_param_shape_across_processes(dist.group.WORLD, [torch.ones(2, 3), torch.eye(3).to_sparse()])
    seen["type"] = _caught(TypeError, verify_param_shape_across_processes, None, [torch.ones(1), None])
    seen["names do not fit"] = _caught(
        ValueError, verify_param_shape_across_processes, None, [torch.ones(1)], names=[]
    )

    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2 + rank))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    seen["module"] = _caught(TensorMismatchError, sync_module_states, module, None, BUCKET, 0, ())
    seen["untouched"] = all(map(torch.equal, before, module.parameters()))
    # Members of a group are named by their rank in WORLD.
    group = dist.new_group([1, 2])
    if rank:
        seen["subgroup"] = _caught(
            TensorMismatchError, verify_param_shape_across_processes, group, [torch.ones(rank)]
        )
    return seen


@pytest.fixture(scope="module")
def mismatches():
    return run_ranks(_mismatches, 3)


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "shape": "first at tensor 1: rank 0 has shape (2,), torch.float32 on cpu, stride (1,), requires_grad "
        "False (2 tensors); rank 1 has shape (3,), torch.float32",
        "ndim": "first at tensor 1: rank 0 has shape (1,), torch.float32 on cpu, stride (1,)",
        "dtype": "torch.float16",
        "stride": "rank 1 has shape (3, 3), torch.float32 on cpu, stride (1, 3)",
        "requires_grad": "rank 2 has shape (2,), torch.float32 on cpu, stride (1,), requires_grad True",
        "layout": "rank 1 has shape (2,), torch.float32 on cpu, layout torch.sparse_coo",
        "count": "rank 2 has none there (1 tensors)",
        "none there": "first at tensor 0: rank 0 has none there (0 tensors); rank 1 has shape (2,)",
        "sparse_dim": "layout torch.sparse_coo, sparse_dim 2, dense_dim 0",
        "block": "layout torch.sparse_bsr, torch.int64 indices, elements of shape (2, 2)",
        "dense_dim": "layout torch.sparse_csr, torch.int64 indices, elements of shape (2,)",
        "index dtype": "layout torch.sparse_csr, torch.int32 indices, elements of shape ()",
        "names": "first at tensor 1: rank 0 has a.bias of shape (2,)",
        "module": "first at tensor 2: rank 0 has 1.weight of shape (2, 3)",
    }.items(),
)
def test_every_rank_raises_the_same_error_with_both_sides(mismatches, what, expected):
    messages = {seen[what] for seen in mismatches}
    assert len(messages) == 1
    assert expected in messages.pop()


def test_a_mismatch_changes_nothing(mismatches):
    assert [seen["untouched"] for seen in mismatches] == [True] * 3


def test_a_subgroup_names_global_ranks(mismatches):
    assert "rank 1 has shape (1,)" in mismatches[1]["subgroup"]
    assert "rank 2 has shape (2,)" in mismatches[2]["subgroup"]
    assert mismatches[1]["subgroup"] == mismatches[2]["subgroup"]


def test_wrong_types_are_refused_before_communication(mismatches):
    for seen in mismatches:
        assert seen["type"] == "tensors[1] is a NoneType, not a tensor"
        assert seen["names do not fit"] == "0 names for 1 tensors"


def _die(rank):
    dist.barrier()
    if rank == 2:
        dist.ProcessGroup.broadcast = lambda *_, **__: exit_now()
    module = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(20)])
    began = time.monotonic()
    try:
        sync_module_states(module, None, BUCKET, 0, ())
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - began
    return None


def exit_now():
    import os  # noqa: PLC0415 - only the rank that dies

    os._exit(9)


def test_every_survivor_gets_an_error_when_a_rank_dies_during_sync():
    results = run_ranks(_die, 3, may_die=[2], group_timeout=15)
    for result in (results[0], results[1]):
        assert result is not None, "a survivor went on"
        assert result[1] < 60


def _odd_strides(rank):
    """Single tensors with gaps between their elements, or one element of any stride; sparse ones of one."""
    values = torch.arange(10.0) + 100 * rank
    octets = torch.arange(10, dtype=torch.uint8) + 100 * rank
    kinds = {
        "slice": values[::2],
        "bytes": octets[::2],
        "large": (torch.arange(400_000.0) + rank)[::2],
        "column": (torch.arange(20.0).view(5, 4) + rank)[:, 1],
        "real": torch.complex(values.clone(), values.clone()).real,
        "one element": torch.empty_strided((1,), (5,)).fill_(float(rank)),
    }
    between = values[1::2].clone(), octets[1::2].clone()
    sparse = torch.sparse_coo_tensor([[1, 1], [1, 1]], torch.full((2,), 1.0 + rank), (3, 3))
    for tensor in (*kinds.values(), sparse):
        sync_params_and_buffers(None, [tensor], 250 << 20, 1)
    assert torch.equal(values[1::2], between[0])
    assert torch.equal(octets[1::2], between[1])
    sums = {name: tensor.sum().item() for name, tensor in kinds.items()}
    return {**sums, "sparse": sparse.to_dense()[1, 1].item()}


def test_tensors_with_gaps_between_their_elements_are_synchronized():
    first, second = run_ranks(_odd_strides, 2)
    assert first == second
    assert (second["slice"], second["bytes"], second["one element"]) == (520.0, 520, 1.0)
    assert second["sparse"] == 4.0
