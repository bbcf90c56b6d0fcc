"""How the measuring command finds its rank, by options, torchrun or Slurm, and its device."""

import pytest

from ddp_quant_hooks.measure.devices import Claim, uses_gpus
from ddp_quant_hooks.measure.joining import PlaceError, find_place, first_host
from ddp_quant_hooks.measure.nodes import nodes_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node3",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
}


def test_torchrun_tells_rank_and_node():
    place = find_place(TORCHRUN)
    assert (place.rank, place.world_size, place.address, place.port) == (5, 8, "node3", 29400)
    assert place.node == "1"
    without_number = {key: value for key, value in TORCHRUN.items() if key != "GROUP_RANK"}
    assert find_place(without_number).node == "1", "four ranks in a node"


def test_srun_tells_rank_node_and_first_host():
    place = find_place(SLURM)
    assert (place.rank, place.world_size, place.address, place.node) == (3, 4, "node03", "1")
    assert 20000 <= place.port < 30000
    assert find_place({**SLURM, "SLURM_PROCID": "0"}).port == place.port, "the same for all ranks"
    assert find_place({**SLURM, "SLURM_STEP_ID": "3"}).port != place.port, "not for two steps of a job"
    assert find_place({**SLURM, "MASTER_PORT": "1234"}).port == 1234
    assert find_place({**SLURM, **TORCHRUN}).rank == 5, "torchrun under srun starts the ranks"


def test_options_come_before_the_environment():
    place = find_place(TORCHRUN, rank=1, world_size=2, address="10.0.0.1", port=4000)
    assert (place.rank, place.world_size, place.address, place.port) == (1, 2, "10.0.0.1", 4000)
    place = find_place({}, rank=1, world_size=2, address="10.0.0.1")
    assert place.port == 29500
    assert place.node, "the host's name"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login1", "login1"),
        ("gpu1,gpu7", "gpu1"),
        ("gpu[07,09-12],big1", "gpu07"),
        ("a-[003-004]-ib,b", "a-003-ib"),
    ],
)
def test_first_of_slurms_hosts(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({}, {}, r"nothing says RANK \(--rank\), WORLD_SIZE \(--world-size\), MASTER_ADDR"),
        ({}, {}, "torchrun --standalone --nproc-per-node 2 -m ddp_quant_hooks.measure"),
        ({}, {"rank": 0, "world_size": 2}, r"nothing says MASTER_ADDR \(--master-addr\)\. Start"),
        ({"RANK": "0", "MASTER_ADDR": "a"}, {}, "nothing says WORLD_SIZE"),
        # In a batch script, which srun has not started, there is only one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a"}, {}, "srun --nodes 2"),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, {}, "at least two ranks, the world size is 1"),
        ({**TORCHRUN, "RANK": "8"}, {}, "rank 8 is out of range for a world size of 8"),
        ({**TORCHRUN, "RANK": "x"}, {}, "RANK must be a number from 0 on, got 'x'"),
        (TORCHRUN, {"rank": -1}, "RANK must be a number from 0 on, got '-1'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environ, options, message):
    with pytest.raises(PlaceError, match=message):
        find_place(environ, **options)


def test_ranks_of_a_node_need_not_follow_each_other():
    assert nodes_of(["b", "a", "b", "a"]) == [[0, 2], [1, 3]]


def test_gpus_are_used_where_every_rank_has_its_own():
    own = [Claim("a", "gpu 0", nccl=True), Claim("a", "gpu 1", nccl=True), Claim("b", "gpu 0", nccl=True)]
    shared = [own[0], own[0]]
    without = [own[0], Claim("b", "", nccl=True)]
    by_gloo = [claim._replace(nccl=False) for claim in shared]
    assert uses_gpus(own, "auto")
    assert uses_gpus(own, "cuda")
    assert not uses_gpus(shared, "auto")
    assert not uses_gpus(without, "auto")
    assert not uses_gpus(by_gloo, "auto")
    assert uses_gpus(by_gloo, "cuda"), "Gloo serves ranks that share a GPU"
    with pytest.raises(ValueError, match=r"ranks \[1\] have no GPU"):
        uses_gpus(without, "cuda")
    with pytest.raises(ValueError, match="NCCL needs a GPU for each rank"):
        uses_gpus(shared, "cuda")
