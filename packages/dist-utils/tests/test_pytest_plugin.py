"""The launch fixture and the marker, as a user's test suite sees them."""

import subprocess
import sys
import textwrap

import pytest
import torch

from dist_utils.testing import patience

SUITE = """
    import pytest
    import torch.distributed as dist

    def _rank(rank):
        return dist.get_backend(), dist.get_world_size()

    def test_ranks(launch):
        assert launch(_rank) == [(launch.backend, launch.world_size)] * launch.world_size
        print("ran", launch.backend, launch.world_size, launch.device_type)

    @pytest.mark.gpu(1000)
    def test_on_many_gpus():
        pass
"""
CONFTEST = """
    def pytest_addoption(parser):
        parser.addoption("--backend")
        parser.addoption("--world-size")
"""


# One process: most of the time is for the import of torch.
COMMAND = """
import pytest
options = ["-p", "dist_utils.pytest_plugin", "-rAs", "--strict-markers"]
gloo = ["--backend", "theirs", "--dist-backend", "gloo", "--dist-world-size", "3"]
for more in (gloo, ["--dist-backend", "nccl", "--dist-world-size", "{ranks}"]):
    print("exit code", int(pytest.main(options + more)))
"""


def test_options_choose_the_backend_and_the_number_of_ranks_and_too_few_gpus_are_an_error(tmp_path):
    """In the suite of a user, whose own options have names like the plugin's."""
    (tmp_path / "test_suite_of_a_user.py").write_text(textwrap.dedent(SUITE))
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    gpus = torch.cuda.device_count()
    command = [sys.executable, "-c", COMMAND.format(ranks=gpus + 1)]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patience(60.0)
    )
    first, second, _ = ended.stdout.split("exit code ")
    assert "dist_utils: launch starts 3 ranks with gloo" in first
    assert "ran gloo 3 cpu" in first
    assert "needs 1000 GPU(s), found" in first
    assert second.startswith("0")
    assert ended.stdout.rstrip().endswith(f"exit code {int(pytest.ExitCode.USAGE_ERROR)}")
    assert f"--dist-backend nccl needs {gpus + 1} GPUs, found {gpus}" in ended.stderr
