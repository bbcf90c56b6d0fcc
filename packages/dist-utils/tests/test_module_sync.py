"""Modules are compared on every rank, and end up bitwise equal to the source's."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_utils import (
    TensorMismatchError,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shape_across_processes,
)
from dist_utils.testing import run_ranks, same_bits

BUCKET = 250 << 20


class Everything(torch.nn.Module):
    """Every kind of parameter and buffer, with values that depend on the seed."""

    def __init__(self, seed):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
        sparse = draw(4, 4)
        sparse *= sparse > 0  # a different number of elements for every seed
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
            "negative on one rank": draw(6)[::2] if seed else torch.complex(draw(3), draw(3)).conj().imag,
            "ids": torch.randint(100, (7,), generator=random),
            "bf16": draw(3).bfloat16(),
            "float8": draw(9).to(torch.float8_e4m3fn),
            "fp64": draw(2).double(),
            "empty": draw(0, 4),
            "slice": draw(10)[::2],
            "large slice": draw(200_000)[::2],
            "one of any stride": draw(1).as_strided((1,), (5,)),
            "empty, with strides of zero": torch.empty(3, 2, 0, 2).to(memory_format=torch.channels_last),
            "coo": sparse.to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor([[1, 1, 0]], draw(3), (4,)),
            "csr": sparse.to_sparse_csr(),
            "csc": sparse.to_sparse_csc(),
            "bsr": sparse.to_sparse_bsr((2, 2)),
            "bsc": sparse.to_sparse_bsc((2, 2)),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "ids")


def states(module):
    """Return the values of a module's parameters and buffers by name."""
    return {
        name: tensor.detach().cpu() for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def differing(mine, wanted):
    """Return the names of the tensors that are not bitwise equal."""
    assert mine.keys() == wanted.keys()
    return [name for name in wanted if not same_bits(mine[name], wanted[name])]


def _with_buffers(**buffers):
    module = torch.nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def every_kind(rank, device="cpu"):
    """Return which tensors differ from the source's."""
    left = []
    for bucket in (BUCKET, 64):
        for src in (0, 1):
            module = Everything(rank).to(device)
            layouts = [tensor.stride() for tensor in module.parameters()]
            objects = list(map(id, [*module.parameters(), *module.buffers()]))
            sync_module_states(module, dist.group.WORLD, bucket, src, ())
            assert [tensor.stride() for tensor in module.parameters()] == layouts
            assert list(map(id, [*module.parameters(), *module.buffers()])) == objects
            left += differing(states(module), states(Everything(src)))
    return left


def _without_comparison(rank):
    module = Everything(rank)
    sync_module_states(module, None, BUCKET, 0, (), verify=False)
    sync_params_and_buffers(None, list(module.parameters()), BUCKET, 0, verify=False)
    return differing(states(module), states(Everything(0)))


def _of_a_subgroup(rank):
    """In a group of ranks 1 and 2, src=0 is rank 1."""
    group, lone = dist.new_group([1, 2]), dist.new_group([0])
    module = Everything(rank)
    sync_module_states(module, group if rank else lone, BUCKET, 0, ())
    if rank == 0:
        with pytest.raises(ValueError, match="rank 0 is not a member"):
            sync_module_states(module, group, BUCKET, 0, ())
    return differing(states(module), states(Everything(min(rank, 1))))


def _of_inference_mode(rank):
    """Some or all ranks made their tensors in inference mode."""
    left = []
    for who in ([0, 1, 2], [0], [1]):
        with torch.inference_mode(rank in who):
            tensors = [torch.full((size,), float(rank)) for size in (5, 100_000)]
        sync_params_and_buffers(None, tensors, BUCKET, 0)
        left += [tensor.unique().item() for tensor in tensors if tensor.any()]
    return left


def _with_a_default_device(rank):
    """As in code that makes modules before they have memory: ``with torch.device("meta")``."""
    module = Everything(rank)
    with torch.device("meta"):
        sync_module_states(module, None, BUCKET, 0, ())
    return differing(states(module), states(Everything(0)))


def _with_autocast(rank):
    """Under which torch does not concatenate fp64, nor the other of the two 16-bit dtypes."""
    module = Everything(rank)
    with torch.autocast("cpu", torch.bfloat16):
        sync_module_states(module, None, BUCKET, 0, ())
    return differing(states(module), states(Everything(0)))


SYNCS = (
    every_kind,
    _without_comparison,
    _of_a_subgroup,
    _of_inference_mode,
    _with_a_default_device,
    _with_autocast,
)


def _in_every_way(rank):
    return {sync.__name__: sync(rank) for sync in SYNCS}


def test_every_kind_of_tensor_ends_bitwise_equal_to_the_sources():
    assert run_ranks(_in_every_way, 3) == [{sync.__name__: [] for sync in SYNCS}] * 3


def _choices(rank):
    seen = {}
    source = states(Everything(0))

    module = Everything(rank)
    sync_module_states(module, None, BUCKET, 0, {"linear.bias", "scalar", "flags"})
    seen["ignored"] = differing(states(module), source)
    seen["changed"] = differing(states(module), states(Everything(rank)))[:1]

    module = Everything(rank)
    sync_module_states(module, None, BUCKET, 0, (), False)
    seen["no buffers"] = differing(states(module), source)

    # Autograd notices a write into a tensor's own memory; the source is not written.
    weight = torch.nn.Parameter(torch.full((300, 300), 1.0 + rank))
    loss = (weight @ torch.ones(300, requires_grad=True)).sum()
    sync_params_and_buffers(None, [weight], BUCKET, 0)
    with pytest.raises(RuntimeError, match="inplace operation") if rank else contextlib.nullcontext():
        loss.backward()

    # Tensors may overlap if they do so in the same way on all ranks.
    base = torch.arange(6.0) + 10 * rank
    module = _with_buffers(base=base, part=base[2:4], columns=base.view(3, 2)[:, 1])
    sync_module_states(module, None, BUCKET, 0, ())
    seen["overlap"] = base.tolist()

    # A tied buffer is sent once, and honors each of its names.
    tied = torch.full((2,), float(rank))
    module = _with_buffers(first=tied, second=tied)
    sync_module_states(module, None, BUCKET, 0, {"second"})
    seen["tied"] = tied.tolist()
    sync_module_states(module, None, BUCKET, 0, ())
    seen["tied and sent"] = tied.tolist()
    # What lies between a slice's elements is not written.
    values = torch.arange(10.0) + 100 * rank
    sync_params_and_buffers(None, [values[::2]], BUCKET, 0)
    seen["slice"] = values.tolist()
    sync_module_states(torch.nn.ReLU(), None, BUCKET, 0, ())
    return seen


@pytest.mark.filterwarnings("ignore:Sparse ")
def test_what_is_synchronized_can_be_chosen_and_nothing_else_is_written():
    buffers = [name for name, buffer in Everything(0).named_buffers() if buffer.numel()]
    for rank, seen in enumerate(run_ranks(_choices, 2)):
        assert seen == {
            # "linear.bias" is "tied" under its second name.
            "ignored": ["tied", "scalar", "flags"] if rank else [],
            "changed": ["frozen"] if rank else [],
            "no buffers": buffers if rank else [],
            "overlap": [0, 1, 2, 3, 4, 5],
            "tied": [rank, rank],
            "tied and sent": [0, 0],
            "slice": [place + 100 * rank * (place % 2) for place in range(10)],
        }


LINEAR, ON_META = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")


class Failing(torch.nn.Linear):
    def named_buffers(self, *args, **kwargs):
        raise LookupError("no buffers today")


class NotShownError(LookupError):
    def __str__(self):
        raise KeyError("no text")


class FailingInSilence(torch.nn.Linear):
    def named_buffers(self, *args, **kwargs):
        raise NotShownError


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


def _of_inference():
    with torch.inference_mode():
        return torch.ones(4).to_sparse()


def _sync(module=LINEAR, bucket=BUCKET, src=0, ignored=()):
    return lambda: sync_module_states(module, None, bucket, src, ignored)


def _sync_list(make):
    return lambda: sync_params_and_buffers(None, make(), BUCKET, 0)


def _verify(tensors, names=None):
    return lambda: verify_param_shape_across_processes(None, tensors, names=names)


ONES = [torch.ones(4)]
UNUSABLE = {
    "src": (_sync(src=5), "ValueError: src 5 is out of range for a group of 2 ranks"),
    "type of src": (_sync(src="0"), "TypeError: "),
    "type of bucket": (_sync(bucket=250e6), "TypeError: broadcast_bucket_size and src must be integers"),
    "bucket": (_sync(bucket=0), "ValueError: broadcast_bucket_size must be positive, got 0"),
    "module": (_sync("module"), "TypeError: module is a str"),
    "failing module": (_sync(Failing(2, 2)), "LookupError: no buffers today"),
    "error without a text": (_sync(FailingInSilence(2, 2)), "NotShownError"),
    "one name": (_sync(ignored="weight"), "TypeError: params_and_buffers_to_ignore must be a collection"),
    "iterator": (_sync(ignored=iter(["bias"])), "TypeError: params_and_buffers_to_ignore must be a coll"),
    "lazy": (_sync(torch.nn.LazyLinear(2)), "ValueError: weight is not initialized yet"),
    "meta": (_sync(ON_META), "ValueError: weight is on the meta device"),
    "expanded": (
        _sync_list(lambda: [torch.ones(3).expand(2, 3)]),
        "ValueError: module_states[0] is expanded",
    ),
    "mkldnn": (_sync_list(lambda: [torch.ones(2).to_mkldnn()]), "module_states[0] has layout torch._mkldnn"),
    "freed": (_sync_list(lambda: [_freed()]), "ValueError: module_states[0] has no memory"),
    "inference": (
        _sync_list(lambda: [_of_inference()]),
        "ValueError: module_states[0] is sparse and was made",
    ),
    "subclass": (_sync_list(lambda: [_Wrapped(torch.ones(4))]), "module_states[0] is a _Wrapped"),
    "nested": (_sync_list(lambda: [torch.nested.nested_tensor(ONES)]), "module_states[0] is a nested tensor"),
    "no tensor": (_sync_list(lambda: [1.0]), "TypeError: module_states[0] is a float, not a tensor"),
    "no list": (_sync_list(lambda: None), "TypeError: "),
    "nothing to compare": (_verify(None), "TypeError: "),
    "None among tensors": (_verify([None]), "TypeError: tensors[0] is a NoneType, not a tensor"),
    "names": (_verify(ONES, 3), "TypeError: "),
    "too few names": (_verify(ONES, []), "ValueError: 0 names for 1 tensors"),
}


def _error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__, error_text(error)
    return None


def error_text(error):
    return type(error).__name__ if isinstance(error, NotShownError) else f"{type(error).__name__}: {error}"


def _unusable(rank):
    """The errors where all ranks, or rank 1 alone, call with what cannot be used."""
    seen = {}
    for name, (wrong, _) in UNUSABLE.items():
        for who in ([0, 1], [1]):
            seen[name, len(who)] = _error_of(wrong if rank in who else _sync())
            sync_module_states(LINEAR, None, BUCKET, 0, ())  # the ranks are still in step
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    seen["DTensor"] = _error_of(_sync_list(lambda: [sharded]))
    return seen


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_sent_is_refused_and_the_other_ranks_are_told_at_once():
    first, second = run_ranks(_unusable, 2, timeout=50.0)  # no rank waits for another
    assert "module_states[0] is a DTensor" in first["DTensor"][1]
    for name, (_, expected) in UNUSABLE.items():
        _, own = second[name, 2]
        assert expected in own, name
        assert second[name, 1] == second[name, 2], name
        assert first[name, 2] == second[name, 2], name
        told = "TensorMismatchError", f"TensorMismatchError: rank 1 cannot go on: {own}"
        assert first[name, 1] == told, name


class Logger:
    def set_error_and_log(self, message):
        self.message = message


def _renamed(names):
    """The same parameters, registered in another order or tied differently."""
    module, one, two = (
        torch.nn.Module(),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.zeros(2)),
    )
    for name, parameter in zip(names, (one, two, two), strict=False):
        module.register_parameter(name, parameter)
    return module


def _csr(dtype):
    rows, columns = torch.tensor([0, 1], dtype=dtype), torch.tensor([0], dtype=dtype)
    return torch.sparse_csr_tensor(rows, columns, torch.ones(1), (1, 1), check_invariants=True)


# What three ranks have, and what the error says.
TENSORS = {
    "shape": (
        lambda rank: [torch.ones(2), torch.ones(2 + rank)],
        "stride (1,), requires_grad False (2 tensors); rank 1 has shape (3,), torch.float32 on cpu, stride",
    ),
    "dtype": (lambda rank: [torch.ones(2, dtype=[torch.float32, torch.float16][rank % 2])], "torch.float16"),
    "stride": (lambda rank: [torch.ones(3, 3).t() if rank == 1 else torch.ones(3, 3)], "stride (1, 3)"),
    "requires_grad": (lambda rank: [torch.ones(2, requires_grad=rank == 2)], "requires_grad True"),
    "layout": (lambda rank: [torch.ones(2).to_sparse() if rank == 1 else torch.ones(2)], "sparse_coo"),
    "count": (lambda rank: [torch.ones(2)] * (2 - rank // 2), "rank 2 has none there (1 tensors)"),
    "none": (
        lambda rank: [torch.ones(2)] * (rank % 2),
        "rank 0 has none there (0 tensors); rank 1 has shape",
    ),
    "sparse_dim": (lambda rank: [torch.eye(2).to_sparse(1 + rank % 2)], "sparse_dim 2, dense_dim 0"),
    "block": (lambda rank: [torch.eye(4).to_sparse_bsr((1 + rank % 2, 2))], "elements of shape (2, 2)"),
    "index dtype": (lambda rank: [_csr(torch.int32 if rank == 1 else torch.int64)], "torch.int32 indices"),
}
MODULES = {
    "shape": (
        lambda rank: _sync(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2 + rank))),
        "first at tensor 0: rank 0 has 1.weight of shape (2, 3)",
    ),
    "order": (lambda rank: _sync(_renamed(["q", "k"] if rank else ["k", "q"])), "rank 0 has k of shape (2,)"),
    "ties": (lambda rank: _sync(_renamed(["x", "y", "z"] if rank else ["y", "z", "x"])), "rank 0 has y of"),
    "ignored": (lambda rank: _sync(_renamed(["a", "b"]), ignored={"a" if rank else "b"}), "rank 0 has a of"),
    "bucket": (
        lambda rank: _sync(bucket=BUCKET + rank),
        f"broadcast_bucket_size {BUCKET}, src 0, rank 1 with",
    ),
    "src": (lambda rank: _sync(src=rank % 2), "src 0, rank 1 with"),
    "list": (lambda rank: _sync_list(lambda: [torch.ones(2 + rank)]), "rank 0 has module_states[0] of shape"),
    "names": (
        lambda rank: _verify([torch.ones(1 + rank)], ["a"]),
        "first at tensor 0: rank 0 has a of shape",
    ),
}


def _mismatches(rank):
    seen = {}
    for name, (make, _) in TENSORS.items():
        logger = Logger()
        with pytest.raises(TensorMismatchError) as caught:
            verify_param_shape_across_processes(None, make(rank), logger)
        seen["tensors", name] = str(caught.value), logger.message
    for name, (make, _) in MODULES.items():
        with pytest.raises(TensorMismatchError) as caught:
            make(rank)()
        seen["modules", name] = str(caught.value)
    tensors = [torch.full((2,), float(rank)), torch.ones(2 + rank)]
    with pytest.raises(TensorMismatchError):
        sync_params_and_buffers(None, tensors, BUCKET, 0)
    seen["untouched"] = tensors[0].tolist()
    verify_param_shape_across_processes(None, [])
    verify_param_shape_across_processes(dist.group.WORLD, [torch.ones(2, 3), torch.eye(3).to_sparse()])
    # Members of a group are named by their rank in WORLD.
    group = dist.new_group([1, 2])
    if rank:
        with pytest.raises(TensorMismatchError, match=r"rank 1 has shape \(1,\).*; rank 2 has shape \(2,\)"):
            verify_param_shape_across_processes(group, [torch.ones(rank)])
    return seen


def test_every_rank_raises_the_same_error_with_both_sides_and_nothing_is_changed():
    ranks = run_ranks(_mismatches, 3)
    assert [seen.pop("untouched") for seen in ranks] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert ranks[0] == ranks[1] == ranks[2]
    for name, (_, expected) in TENSORS.items():
        message, logged = ranks[0]["tensors", name]
        assert expected in message, name
        assert logged == message
    for name, (_, expected) in MODULES.items():
        assert expected in ranks[0]["modules", name], name
