"""What a rank can know alone is refused there, before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor

import dist_autograd_collectives as dac
from dist_utils import free_storage
from dist_utils.testing import run_ranks

X = torch.ones(2)
# On three ranks.
REFUSED = [
    (ValueError, "src 7 is not a member", lambda: dac.broadcast(X, 7)),
    (ValueError, "give either src or group_src", lambda: dac.broadcast(X, 0, group_src=0)),
    (ValueError, "give either dst or group_dst", lambda: dac.reduce(X)),
    (ValueError, "group_dst 3 is not a member", lambda: dac.gather(X, group_dst=3)),
    (ValueError, "grad must be 'sum' or 'replicated', got 'mean'", lambda: dac.all_reduce(X, grad="mean")),
    (TypeError, "op must be a ReduceOp", lambda: dac.all_reduce(X, dist.ReduceOp.PREMUL_SUM)),
    (TypeError, "multiple values for argument 'tensor'", lambda: dac.all_reduce(X, tensor=X)),
    (TypeError, "op must be a ReduceOp", lambda: dac.all_reduce(X, ["sum"])),
    (TypeError, "unexpected keyword argument", lambda: dac.reduce_scatter_dim(X, grad="sum")),
    (TypeError, "a tensor, got NoneType", lambda: dac.all_reduce(None)),
    (TypeError, "must be a list or tuple of tensors", lambda: dac.reduce_scatter(X, X)),
    (ValueError, "must be 4 tensors", lambda: dac.reduce_scatter(X, [X])),
    (ValueError, r"\(3,\)", lambda: dac.reduce_scatter(X, [X, X, torch.ones(3)])),
    (ValueError, "is expanded", lambda: dac.reduce_scatter(torch.ones(1).expand(2), [X] * 3)),
    (
        ValueError,
        "float64 .6,. on cpu, torch.float32",
        lambda: dac.all_gather_base(torch.ones(6).double(), X),
    ),
    (ValueError, "4 elements, but 3 ranks send 2 each", lambda: dac.all_gather_base(torch.ones(4), X)),
    (ValueError, "add up to 2, got", lambda: dac.all_to_all_single(X, X, [1, 1, 1], [1, 1, 0])),
    (ValueError, "cannot be split into 3 equal parts", lambda: dac.all_to_all_single(X, X)),
    (TypeError, "perm must be a list of pairs", lambda: dac.permute(X, [1, 0])),
    (TypeError, "perm must be a list of pairs", lambda: dac.permute(X, [(1, 0.5)])),
    (TypeError, "must be integers", lambda: dac.all_to_all_single(X, X, [1.0, 0, 1], [1, 0, 1])),
    (ValueError, "must be 3 tensors", lambda: dac.scatter([X, X], dist.get_rank())),
    (ValueError, "list of 3 tensors, other ranks a list or like=", lambda: dac.scatter(None, 0)),
    (IndexError, "dim 1 is out of range for a tensor of 1 dim", lambda: dac.all_gather_cat(X, 1)),
    (IndexError, "of 0 dimensions", lambda: dac.all_gather_cat(X.sum())),
    (ValueError, r"sizes must be 3 lengths, got \[2, 2\]", lambda: dac.all_gather_cat(X, sizes=[2, 2])),
    (TypeError, "integers, got 'Auto'", lambda: dac.all_gather_cat(X, sizes="Auto")),
    (ValueError, "say 1 for rank ., which has 2", lambda: dac.all_gather_cat(X, sizes=[1, 1, 1])),
    (ValueError, "which has 2", lambda: dac.all_to_all_dim(torch.ones(3, 2), 0, 1, output_sizes=[1, 1, 1])),
    (ValueError, "each source in perm must be another", lambda: dac.permute(X, [(0, 1), (0, 2)])),
    (ValueError, "each destination in perm", lambda: dac.permute(X, [(0, 3)])),
    (TypeError, "perm must be a list of pairs", lambda: dac.permute(X, None)),
    (ValueError, "torch.float64", lambda: dac.all_reduce_coalesced([X, X.double()])),
    (ValueError, "got none", lambda: dac.all_reduce_coalesced([])),
    (TypeError, "start takes a collective of this package", lambda: dac.start(torch.add, 1, 2)),
    (TypeError, "each output must be a tensor, got int", lambda: dac.connect(X.sum(), 3)),
]


def _refused(rank):
    dac.all_reduce(X)  # has a plan
    for kind, text, call in REFUSED:
        with pytest.raises(kind, match=text):
            call()
    pair = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="rank 2 is not a member"):
            dac.all_reduce(X, group=pair)
    # A part that a rank keeps has one length.
    own, kept = {"input_sizes": [1, 2, 0], "output_sizes": [2, 1, 1]}, "of the group keeps"
    for call in (
        lambda: dac.all_to_all([torch.zeros(rank)] * 3, [X, X, torch.ones(1)]),
        lambda: dac.all_to_all_single(torch.zeros(4), torch.ones(3), [2, 1, 1], [1, 2, 0]),
    ):
        with pytest.raises(ValueError, match=kept):
            call()
    with pytest.raises(ValueError, match="which has"):
        dac.all_to_all_dim(torch.ones(3), 0, 0, **own)
    return dac.all_reduce(torch.ones(1)).item()


def test_bad_arguments_are_refused_before_communication():
    assert run_ranks(_refused, 3, group_timeout=30) == [3] * 3


class _OwnMethods(torch.Tensor):
    def flatten(self, *_):
        return None

    @classmethod
    def __torch_function__(cls, *_):
        raise ValueError("the class's own")


def _kinds(rank):
    """No other rank takes part in the calls that are refused."""
    mesh = init_device_mesh("cpu", (2,))
    of_others = "tensor must be a tensor of this rank with memory of its own, got a"
    handle = dac.start(dac.all_reduce, X)
    kinds = [
        (distribute_tensor(torch.ones(4), mesh, [Shard(0)]), f"{of_others} DTensor: see its to_local"),
        (masked_tensor(X, torch.tensor([True, False])), f"{of_others} MaskedTensor"),
        (torch.nested.nested_tensor([torch.ones(1), X]), "a nested one"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), "a quantized one"),
        (torch.eye(2).to_sparse(), "must be a dense tensor, got torch.sparse_coo"),
    ]
    for tensor, text in kinds if rank else []:
        with pytest.raises(TypeError, match=text):
            dac.all_reduce(tensor)
    for call in (
        dac.all_reduce,
        lambda x: dac.scatter([x, x], 0),
        lambda x: dac.all_to_all_single(x, torch.ones(80_000)),
    ):
        freed = torch.ones(80_000)
        free_storage(freed)
        with pytest.raises(ValueError, match="storage was freed"):
            call(freed)
    own = torch.full((2,), 1.0 + rank).as_subclass(_OwnMethods)
    gathered = dac.all_gather_base(torch.empty(4), own)
    return handle.wait().tolist(), dac.all_reduce(own, "max").tolist(), gathered.tolist()


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage")
def test_tensors_of_other_kinds_are_refused_and_a_users_subclass_is_a_plain_tensor():
    assert run_ranks(_kinds, 2, timeout=60, group_timeout=20) == [([2, 2], [2, 2], [1, 1, 2, 2])] * 2
