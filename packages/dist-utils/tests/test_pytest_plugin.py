"""The launch fixture, as a user's test suite sees it."""

import subprocess
import sys
import textwrap

import torch

from dist_utils.testing import patience

SUITE = """
    import torch.distributed as dist

    def _rank(rank):
        return dist.get_backend(), dist.get_world_size()

    def test_ranks(launch):
        assert launch(_rank) == [(launch.backend, launch.world_size)] * launch.world_size
        print("ran", launch.backend, launch.world_size, launch.device_type)
"""


OPTIONS_OF_A_USER = """
    def pytest_addoption(parser):
        parser.addoption("--backend")
        parser.addoption("--world-size")
"""


def _pytest(folder, *options):
    (folder / "test_suite_of_a_user.py").write_text(textwrap.dedent(SUITE))
    command = [sys.executable, "-m", "pytest", "-p", "dist_utils.pytest_plugin", "-rAs", *options, "."]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=patience(60.0)
    ).stdout


def test_options_choose_the_backend_and_the_number_of_ranks(tmp_path):
    assert "ran gloo 3 cpu" in _pytest(tmp_path, "--dist-backend", "gloo", "--dist-world-size", "3")


def test_too_few_gpus_skip_with_the_reason(tmp_path):
    gpus = torch.cuda.device_count()
    output = _pytest(tmp_path, "--dist-backend", "nccl", "--dist-world-size", str(gpus + 1))
    assert f"nccl needs {gpus + 1} GPUs, found {gpus}" in output
    assert "1 skipped" in output


def test_the_options_do_not_collide_with_those_of_a_users_conftest(tmp_path):
    (tmp_path / "conftest.py").write_text(textwrap.dedent(OPTIONS_OF_A_USER))
    output = _pytest(tmp_path, "--backend", "theirs", "--dist-backend", "gloo", "--dist-world-size", "1")
    assert "ran gloo 1 cpu" in output


def test_the_only_marker_is_that_for_gpus(tmp_path):
    """Markers of this project would take part in ``--strict-markers`` of another."""
    command = [sys.executable, "-m", "pytest", "--markers"]
    without, with_plugin = (
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for more in ([], ["-p", "dist_utils.pytest_plugin"])
    )
    (added,) = set(with_plugin.splitlines()) - set(without.splitlines())
    assert added.startswith("@pytest.mark.gpu(count=1): ")
