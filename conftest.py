"""Property tests of all packages together try the same examples in every run; ``nox -s fuzz`` others."""

import contextlib

with contextlib.suppress(ImportError):  # not every package needs it
    from hypothesis import settings

    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    settings.load_profile("repeatable")
