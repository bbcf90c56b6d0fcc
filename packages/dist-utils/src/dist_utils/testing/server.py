"""Imports of the server that starts the ranks of ``run_ranks``, made once for all of them.

Importing this module changes the garbage collector of the process: only that server does it.
"""

import contextlib
import gc
import importlib

# The first DDP model imports this part of torch.compile, for 1.5 seconds. No public module does.
with contextlib.suppress(ImportError):
    importlib.import_module("torch._dynamo")
# The usual caller is a pytest module, which imports it in any case.
with contextlib.suppress(ImportError):
    importlib.import_module("pytest")
importlib.import_module("dist_utils.testing.rank")

# Without this a rank that collects garbage would visit every object of torch again, and copy the memory that
# it shares with the server: half a second of processor time.
gc.collect()
gc.freeze()
