"""The documentation's examples, run as a reader would: they end, and print what the pages say."""

import os
import re
import signal
import sys
from pathlib import Path

import pages
import pytest
import torch

from dist_utils.testing import same_bits

EXAMPLES = pages.DOCS / "examples"


def _run(script, *arguments, **options):
    return pages.run_program(EXAMPLES / script, *arguments, **options)


def _warnings(errors):
    """Return the warnings but torch's, that a barrier without a ``device_id`` guesses the rank's GPU."""
    return [line for line in errors.splitlines() if "Warning" in line and "distributed_c10d.py" not in line]


def _numbers(pattern, text):
    found = re.search(pattern, text)
    assert found is not None, text
    return [float(number) for number in found.groups()]


def test_four_ranks_learn_a_contrastive_loss_like_one_process_in_both_conventions():
    output, _ = _run("contrastive_loss.py", ranks=4)
    (moved,) = _numbers(r"one process: parameters moved by up to (\S+) in 20 steps", output)
    assert moved > 1  # so a difference is possible
    differences = {name: float(value) for name, value in re.findall(r"(\w+): differs by up to (\S+)", output)}
    # 20 steps, each with sums of fewer than 100 products, in a different order.
    limit = pytest.approx(0, abs=2e3 * 2**-52)
    assert differences == {"sum": limit, "replicated": limit}


def test_a_ddp_job_trains_on_dataclass_batches_in_bf16(launch):
    output, _ = _run("dataclass_batches.py", ranks=launch.world_size)
    assert "Batch in torch.bfloat16, labels in torch.int64" in output
    (accuracy,) = _numbers(r"accuracy (\d\.\d+)", output)
    assert accuracy > 0.9


def test_statistics_are_logged_as_numbers(launch, tmp_path):
    _, errors = _run("logged_training.py", tmp_path / "runs", ranks=launch.world_size)
    lines = re.findall(r"^training: step (\d+), (\w+): (.*)$", errors, re.MULTILINE)
    assert [(step, title) for step, title, _ in lines] == [
        (str(step), title) for step in (10, 20, 30) for title in ("gradients", "overlap")
    ]
    for step, title, text in lines:
        values = {name: float(value) for name, value in (pair.split(" ") for pair in text.split(", "))}
        if title == "overlap":
            assert values["number"] == int(step)
            assert values["stepped"] == values["buckets"] > 1
        else:
            assert 10 < values["quantized_buckets"] < 100  # for ten steps, not for all so far
            assert 0 < values["relative_error"] < 3e-2
            assert 0.25 < values["bytes_ratio"] < 0.5  # includes an exact all-reduce for every sample


def test_a_quantized_hook_an_overlapped_step_a_schedule_and_a_restart(launch):
    output, errors = _run("overlapped_training.py", ranks=launch.world_size)
    assert _warnings(errors) == []
    first, last, rate = _numbers(r"loss (\S+) -> (\S+), learning rate (\S+)", output)
    assert last < 0.6 * first
    assert rate < 1e-5
    stepped, buckets = _numbers(r"(\d+) of (\d+) buckets stepped", output)
    assert stepped == buckets > 1
    assert "the same bits" in output


def _checkpoint(folder):
    """Return all files of the last checkpoint of train_ddp.py."""
    files = sorted((folder / (folder / "latest").read_text()).iterdir())
    return {file.name: torch.load(file, weights_only=True) for file in files}


@pytest.mark.parametrize(
    ("bits", "feedback"), [(8, "none"), pytest.param(4, "both", marks=pytest.mark.exhaustive)]
)
def test_the_program_to_copy_goes_on_from_its_checkpoint_with_the_same_bits(bits, feedback, launch, tmp_path):
    def train(folder):
        options = ["--steps", "40", "--every", "10", "--bits", bits, "--error-feedback", feedback]
        return _run("train_ddp.py", folder, *options, ranks=launch.world_size)[0]

    output = train(tmp_path / "through")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+),", output)]
    assert "from step 0" in output
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    through = _checkpoint(tmp_path / "through")
    (tmp_path / "resumed").mkdir()
    (tmp_path / "through" / "step-20").rename(tmp_path / "resumed" / "step-20")
    (tmp_path / "resumed" / "latest").write_text("step-20")
    assert "from step 20" in train(tmp_path / "resumed")
    resumed = _checkpoint(tmp_path / "resumed")
    assert through.keys() == {*(f"rank-{rank}.pt" for rank in range(launch.world_size)), "shared.pt"}
    assert through["shared.pt"]["steps"] == 40
    assert same_bits(resumed, through), "the checkpoints differ"


def test_the_program_to_copy_goes_on_with_another_number_of_ranks(launch, tmp_path):
    ranks, folder = launch.world_size, tmp_path / "runs"
    options = ["--every", "10", "--bits", "4", "--error-feedback", "both"]
    _run("train_ddp.py", folder, "--steps", "20", *options, ranks=ranks)
    output, _ = _run("train_ddp.py", folder, "--steps", "33", *options, ranks=ranks + 1)
    assert f"world size {ranks + 1}" in output
    assert "from step 20" in output
    assert _checkpoint(folder)["shared.pt"]["steps"] == 33, "the end is saved, too"


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_the_program_to_copy_survives_a_killed_rank(tmp_path):
    folder, options = tmp_path / "killed", ["--steps", "300", "--every", "10"]
    with pages.program(EXAMPLES / "train_ddp.py", folder, *options, restarts=1) as job:
        printed = [job.stdout.readline() for _ in range(3)]  # two checkpoints are written
        assert "step 20" in printed[-1], printed
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        output, _ = pages.end_of(job)
    (first,) = _numbers(r"from step (\d+)", output)
    assert 20 <= first < 300
    _run("train_ddp.py", tmp_path / "through", *options)
    assert same_bits(_checkpoint(folder), _checkpoint(tmp_path / "through")), "the checkpoints differ"


@pytest.mark.parametrize(
    ("script", "options", "share"),
    [
        # Relative to fp32: 8 or 4 bits per value, and 4 bytes for the scale of every 128 or 32 values; 5 %
        # more for the shorter blocks at the ends of tensors, and for layers that are sent once more at the
        # end.
        pytest.param("diloco.py", ["--bits", "8"], (1 + 4 / 128) / 4, marks=pytest.mark.exhaustive),
        ("diloco.py", ["--bits", "4", "--streaming"], (0.5 + 4 / 32) / 4),
        pytest.param("model_averaging.py", [], (1 + 4 / 128) / 4, marks=pytest.mark.exhaustive),
    ],
)
def test_rare_synchronization_learns_and_sends_little(script, options, share):
    output, errors = _run(script, *options)
    assert _warnings(errors) == []
    loss, sent = _numbers(r"loss (\S+), (\d+) bytes sent, the same parameters on all ranks", output)
    assert loss < 0.02  # 0.17 before the first step
    parameters, rounds = 64 * 256 + 256 + 256 * 16 + 16, 20
    assert 0.9 * share < sent / (4 * parameters * rounds) < 1.05 * share


ROW = re.compile(
    r"^(\S+(?: \S+)*) +(\S+) +(\S+) +(\d+\.\d+) +(\d\.\d+) +(\d\.\de[+-]\d+) +(yes|NO)$", re.MULTILINE
)


@pytest.mark.parametrize(
    ("hooks", "count"),
    [
        (["--hook=quantized_allreduce_hook"], 2),
        pytest.param([], 14, marks=pytest.mark.exhaustive),
    ],
)
def test_every_hook_learns_digits_and_sends_what_it_says(tmp_path, hooks, count):
    for needed in ("sklearn", "tqdm"):
        pytest.importorskip(needed)
    output, errors = _run("train_digits.py", "--epochs=6", *hooks, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    rows = {row[0]: row[1:] for row in ROW.findall(output)}
    assert len(rows) == count, output + errors
    for hook, (_, share, _, accuracy, error, equal) in rows.items():
        assert equal == "yes", hook
        assert float(accuracy) > 0.9, hook
        # Residuals of earlier, larger gradients are sent too, so 4 bits have no useful bound.
        assert float(error) < (1 if "4 bits" in hook or "feedback" in hook else 0.15), hook
        if sys.platform == "linux" and "quanti" in hook:
            # A byte of four, scales, and the headers of Gloo's messages, for buckets of a few KiB here.
            assert float(share) < 0.31, hook
