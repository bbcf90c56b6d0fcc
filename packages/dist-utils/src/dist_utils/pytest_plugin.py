"""A pytest fixture that runs a function on several ranks, with options for the backend and their number.

And a marker: ``@pytest.mark.gpu`` skips a test, with the reason, where CUDA finds no GPU (``gpu(2)``: fewer
than two); ``pytest -m gpu`` runs what needs one.

Switch it on with ``-p dist_utils.pytest_plugin`` (in ``addopts``), or with
``pytest_plugins = ["dist_utils.pytest_plugin"]`` in the root ``conftest.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dist_utils.testing import nccl_can_run, run_ranks

__all__ = ["Launch", "launch"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--dist-backend`` and ``--dist-world-size``."""
    group = parser.getgroup("dist_utils", "multi-rank tests")
    group.addoption(
        "--dist-backend",
        choices=["auto", "gloo", "nccl"],
        default="auto",
        help="backend of the launch fixture's ranks; auto: nccl if there are enough GPUs, else gloo",
    )
    group.addoption("--dist-world-size", type=int, default=2, help="how many ranks the launch fixture starts")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and refuse ``--dist-backend nccl`` where NCCL cannot run on all ranks."""
    config.addinivalue_line("markers", "gpu(count=1): needs this many GPUs; skipped where there are fewer")
    ranks: int = config.getoption("--dist-world-size")
    if config.getoption("--dist-backend") == "nccl" and not nccl_can_run(ranks):
        gpus = torch.cuda.device_count()
        raise pytest.UsageError(f"--dist-backend nccl needs {ranks} GPUs, found {gpus}")


def pytest_report_header(config: pytest.Config) -> str:
    """Say what the launch fixture will use."""
    chosen = _launch(config)
    return f"dist_utils: launch starts {chosen.world_size} ranks with {chosen.backend}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    for marker in item.iter_markers("gpu"):
        needed = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} GPU(s), found {torch.cuda.device_count()}")


@dataclass(frozen=True)
class Launch:
    """Start ranks as the command line asks: the value of the ``launch`` fixture.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``.
        world_size: The number of ranks.
    """

    backend: str
    world_size: int

    @property
    def device_type(self) -> str:
        """The kind of device that this backend sends from, ``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.backend == "nccl" else "cpu"

    def __call__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call :func:`dist_utils.testing.run_ranks` with this backend and number of ranks."""
        return run_ranks(fn, self.world_size, *args, backend=self.backend, **options)


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Launch:
    """``launch(fn, *args)`` runs ``fn(rank, *args)`` on every rank and returns their results."""
    return _launch(request.config)


def _launch(config: pytest.Config) -> Launch:
    backend: str = config.getoption("--dist-backend")
    world_size: int = config.getoption("--dist-world-size")
    if backend == "auto":
        backend = "nccl" if nccl_can_run(world_size) else "gloo"
    return Launch(backend, world_size)
