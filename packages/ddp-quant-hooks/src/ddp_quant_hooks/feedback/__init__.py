"""Error feedback: the rounding errors of a step that counts are added to the values of the next one.

``residuals`` is the memory of a bucket's residuals, in slots with names; ``step`` says which buckets or calls
are one step, and how it ended; ``store`` knows where each owner's residuals are, and lets steps change them.
``state`` is what users call, and ``checkpoint`` what files hold.
"""
