"""A future of several parts: complete when all are, or with the error of one."""

import threading

import pytest
import torch

from dist_utils.comm_hooks import joined_future


def test_it_is_complete_when_all_parts_are():
    parts = [torch.futures.Future() for _ in range(3)]
    joined = joined_future(parts, "value", torch.device("cpu"))
    for part in reversed(parts):
        assert not joined.done()
        thread = threading.Thread(target=part.set_result, args=(torch.ones(1),))
        thread.start()
        thread.join()
    assert joined.wait() == "value"


def test_it_raises_the_first_error():
    parts = [torch.futures.Future() for _ in range(2)]
    joined = joined_future(parts, "value", torch.device("cpu"))
    parts[1].set_exception(ValueError("second"))
    parts[0].set_result(torch.ones(1))
    with pytest.raises(RuntimeError, match="second"):
        joined.wait()
