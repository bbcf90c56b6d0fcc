"""An assertion that is logged, so that it is seen even where its exception is swallowed."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)


def p_assert(cond: object, s: str, raise_assertion_error: bool = True) -> None:
    """Assert ``cond``; if it is false log ``s`` with the stack, then raise.

    For code that runs in autograd's threads and other callbacks, where an exception can get lost. The
    record goes to the logger ``dist_utils.checks`` with level ERROR.

    Args:
        cond: What must be true.
        s: The message.
        raise_assertion_error: Whether to raise as well.

    Raises:
        AssertionError: ``cond`` is false and ``raise_assertion_error`` is true.

    Source:
        ``torch.distributed.utils._p_assert``, which prints to standard output.

    Example:
        >>> p_assert(True, "never seen")
    """
    if not cond:
        _logger.error(s, stack_info=True, stacklevel=2)
        if raise_assertion_error:
            raise AssertionError(s)
