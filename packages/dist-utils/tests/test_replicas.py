"""Ranks that hold different values are told which, and ranks that hold the same are left alone."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dist_utils import AgreementError, require_same_on_all_ranks
from dist_utils.module_state.fingerprint import fingerprint
from dist_utils.testing import run_ranks


def said(values, *arguments, **options):
    """Return the error of a comparison as text; nothing if there is none."""
    try:
        require_same_on_all_ranks(values, *arguments, **options)
    except (AgreementError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass
class Record:
    loss: torch.Tensor
    name: str = "train"


def _trained(rank):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    net.register_buffer("ids", torch.arange(3), persistent=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return net, optimizer


def _same(rank):
    net, optimizer = _trained(rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    ddp = DistributedDataParallel(net)
    for values in (
        net,
        ddp,
        optimizer,
        {"model": ddp, "optimizer": optimizer, "scheduler": scheduler},
        [torch.tensor([float("nan"), -0.0]), "text", 1, None],
        Record(torch.ones(2)),
        {"a", "b", "c", "d"},  # their order differs between processes
        torch.randn(4, 4).to_sparse(),
        torch.ones(4, 3)[:, rank],
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.ones(2, requires_grad=bool(rank)),
        {},
        {"function": lambda: None, "object": object()},  # which are elsewhere on the other rank
    ):
        assert said(values) == ""
    with torch.inference_mode():
        require_same_on_all_ranks(torch.ones(2))
    require_same_on_all_ranks(torch.tensor(rank), step=3, every=2)  # not compared
    with pytest.raises(ValueError, match="every must be positive, got 0"):
        require_same_on_all_ranks(net, step=3, every=0)
    return True


def test_ranks_that_hold_the_same_are_left_alone():
    assert run_ranks(_same, 3) == [True] * 3


def _different(rank):
    net, optimizer = _trained(rank)
    with torch.no_grad():
        net[0].weight[3, 7:9] += rank
        net[1].running_mean[2] += rank
        net.ids[1] += rank
    messages = {"model": said({"model": net}), "parameters": said(net, buffers=False, step=200, every=100)}
    messages["ignored"] = said(net, buffers=False, ignore=["0.weight"])
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    optimizer.state_dict()["state"][2]["exp_avg"].add_(rank)
    messages["optimizer"] = said([optimizer])
    messages["number"] = said({"epoch": rank})
    messages["tensor"] = said(torch.tensor(float(rank)))
    messages["sign of zero"] = said(torch.tensor([0.0, -0.0 if rank else 0.0]))
    messages["dtype"] = said(torch.ones(2, dtype=torch.float32 if rank else torch.float64))
    messages["length"] = said([1] * (1 + rank))
    messages["many"] = said([torch.full((2,), rank) for _ in range(10)])
    messages["step"] = said(1, step=rank)
    messages["a tensor's step"] = said(rank, step=torch.tensor(4) if rank else 4)
    messages["4 bits"] = said({"packed": torch.tensor([3, 16 * rank], dtype=torch.uint8).view(torch.bits4x2)})
    messages["float8"] = said(torch.tensor([1.0, rank]).to(torch.float8_e4m3fn))
    return messages


def test_the_first_entries_that_differ_are_named_with_both_ranks_values():
    first, second = run_ranks(_different, 2)
    assert first == second
    lines = first["model"].splitlines()
    assert lines[0] == "AgreementError: ranks hold different values, first:"
    assert lines[1].startswith("  model.0.weight[3, 7]: rank 0 has 0.0")
    assert lines[1].endswith("(2 of 1200 values differ)")
    assert "rank 1 has 1.0" in lines[1]
    assert lines[2] == "  model.ids (a buffer)[1]: rank 0 has 1, rank 1 has 2 (1 of 3 values differ)"
    assert lines[3].startswith("  model.1.running_mean (a buffer)[2]: rank 0 has 0.0")
    assert "different values at step 200, first:\n  0.weight[3, 7]" in first["parameters"]
    assert "a buffer" not in first["parameters"]
    assert first["ignored"] == ""
    assert "  0.state.2.exp_avg[0]: rank 0 has" in first["optimizer"]
    assert "  0.param_groups.0.lr: rank 0 has 0.1, rank 1 has 0.2" in first["optimizer"]
    assert first["number"].endswith("  epoch: rank 0 has 0, rank 1 has 1")
    assert first["tensor"].endswith("  values: rank 0 has 0.0, rank 1 has 1.0 (1 of 1 values differ)")
    assert first["sign of zero"].endswith("[1]: rank 0 has 0.0, rank 1 has -0.0 (1 of 2 values differ)")
    assert "rank 0 has torch.float64 of shape (2,) on cpu, rank 1 has torch.float32" in first["dtype"]
    assert first["length"].endswith("  rank 0 has nothing more, rank 1 has 1 1")
    assert first["many"].endswith("  and 7 more of 11")
    assert first["step"].endswith("rank 0 compares step 0, rank 1 step 1")
    assert first["a tensor's step"].endswith("values at step 4, first:\n  values: rank 0 has 0, rank 1 has 1")
    assert first["4 bits"].endswith("packed[1]: rank 0 has 0x00, rank 1 has 0x10 (1 of 2 values differ)")
    assert "[1]: rank 0 has 0.0, rank 1 has 1.0" in first["float8"]


def _unusable_on_one_rank(rank):
    mesh = init_device_mesh("cpu", (2,))
    unusable = [
        distribute_tensor(torch.ones(2), mesh, [Replicate()]),
        torch.ones(2, device="meta"),
        iter([1]),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        torch.nn.LazyLinear(2),
    ]
    messages = [said(one if rank else 1) for one in unusable]
    require_same_on_all_ranks(1)  # ranks still come together
    return messages


def test_what_cannot_be_compared_on_one_rank_is_an_error_on_all():
    others, own = run_ranks(_unusable_on_one_rank, 2)
    assert all(text.startswith("TypeError: ") for text in own)
    assert others == [f"AgreementError: rank 1 cannot go on: {text}" for text in own]
    assert "to_local()" in own[0]
    assert "a list_iterator, which a comparison would use up" in own[2]


def _in_a_subgroup(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ValueError, match="rank 0 is not a member"):
            require_same_on_all_ranks(1, group)
        return ""
    return said(torch.tensor(rank), group)


def test_messages_name_global_ranks():
    nothing, first, second = run_ranks(_in_a_subgroup, 3)
    assert nothing == ""
    assert first == second
    assert "rank 1 has 1, rank 2 has 2" in first


def _ddp(rank):
    net = torch.nn.ModuleDict({"kept": torch.nn.Linear(2, 2), "own": torch.nn.Linear(2, 2)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])
    ddp = DistributedDataParallel(net)
    with torch.no_grad():
        net["own"].weight.fill_(rank)
    return said(ddp)


def test_parameters_that_ddp_ignores_may_differ():
    assert run_ranks(_ddp, 2) == ["", ""]


def _alone(rank):
    require_same_on_all_ranks(torch.ones(2))
    with pytest.raises(TypeError, match="every needs the number of the step"):
        require_same_on_all_ranks(1, every=5)
    with pytest.raises(TypeError, match="a is on the meta device and has no values"):
        require_same_on_all_ranks({"a": torch.ones(2, device="meta")})
    return True


def test_one_rank_compares_with_nobody_but_checks_its_arguments():
    assert run_ranks(_alone, 1) == [True]


def changes():
    """Yield pairs of lists of tensors that differ in few bits."""
    torch.manual_seed(0)
    base = [torch.randn(size) for size in (3, 70_000, 200_000)] + [torch.randint(9, (5,), dtype=torch.int8)]
    for index, places in ((0, [2]), (1, [0]), (1, [65_535, 65_536]), (2, [199_999]), (2, [5, 6]), (3, [4])):
        changed = [tensor.clone() for tensor in base]
        for place in places:
            changed[index][place] = -changed[index][place] - 1
        yield base, changed
    signs = [tensor.clone() for tensor in base]
    signs[2][:100_000] *= -1  # an even number of highest bits
    yield base, signs
    swapped = [tensor.clone() for tensor in base]
    swapped[2][[3, 9]] = base[2][[9, 3]]
    yield base, swapped
    yield base, [base[0], base[2], base[1], base[3]]


def test_a_fingerprint_changes_with_any_bits_wherever_they_are():
    for left, right in changes():
        assert fingerprint(left).item() == fingerprint([tensor.clone() for tensor in left]).item()
        assert fingerprint(left).item() != fingerprint(right).item()
    assert len({fingerprint([torch.eye(70)[row]]).item() for row in range(70)}) == 70
