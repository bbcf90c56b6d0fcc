"""Imports of the server that starts the ranks of ``run_ranks``, made once for all of them.

Importing this module changes the garbage collector of the process: only that server does it.
"""

import contextlib
import copyreg
import functools
import gc
import importlib

from dist_utils.testing.rank import reduced_outcome

# The first DDP model imports this part of torch.compile, for 1.5 seconds. No public module does.
with contextlib.suppress(ImportError):
    importlib.import_module("torch._dynamo")
# The usual caller is a pytest module, which imports it in any case. The classes of these exceptions claim to
# be built in, where pickle does not find them.
with contextlib.suppress(ImportError):
    import pytest

    for name in ("skip", "fail"):
        copyreg.pickle(getattr(pytest, name).Exception, functools.partial(reduced_outcome, name))

# Without this a rank that collects garbage would visit every object of torch again, and copy the memory that
# it shares with the server: half a second of processor time.
gc.collect()
gc.freeze()
