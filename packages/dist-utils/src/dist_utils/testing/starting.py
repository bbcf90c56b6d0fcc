"""How ranks are started: forked from a server that has imported torch, where the system supports it."""

import multiprocessing

__all__ = ["start_method"]


def start_method() -> str:
    """Return how ranks are started: by a server that has imported torch, where the system supports it.

    It forks itself before anything has run in it, so ranks are as fresh as spawned ones.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["dist_utils.testing.server"])
    return "forkserver"
