"""Property tests try the same examples in every run; ``nox -s fuzz`` lets them try others."""

import contextlib

with contextlib.suppress(ImportError):  # not every package needs it
    from hypothesis import settings

    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
    settings.load_profile("repeatable")
