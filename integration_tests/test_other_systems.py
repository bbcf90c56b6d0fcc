"""All packages import where Linux's modules and functions are missing, and without compiled kernels."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
import torch, torch.distributed, torch.nn.parallel, torch.utils.checkpoint  # for this system
sys.platform = "win32"
for missing in ("geteuid", "getuid", "sched_getaffinity", "register_at_fork"):
    if hasattr(os, missing):
        delattr(os, missing)
for missing in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[missing] = None
import dist_utils, dist_utils.comm_hooks, dist_autograd_collectives, ddp_compress_hooks, ddp_optim_overlap
import ddp_quant_hooks
from ddp_quant_hooks import kernels
message, values = torch.empty(144, dtype=torch.uint8), torch.full((100,), 3.0)
kernels.encode(values, message, kernels.Layout("int8", 128))
kernels.decode([message], kernels.Layout("int8", 128), torch.empty_like(values))
print(kernels.describe())
"""


def test_all_packages_import_without_what_only_linux_has(tmp_path: Path):
    environ = {**os.environ, "DDP_QUANT_HOOKS_LIBRARY": str(tmp_path / "none.so")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    assert ended.returncode == 0, ended.stderr
    assert "cpu: torch operators" in ended.stdout
