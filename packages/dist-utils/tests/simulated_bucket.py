"""Shared by the tests of what ranks compare: a bucket of any parameters, without a model."""

import torch


class SimulatedBucket:
    """A bucket whose gradients are the parameters.

    Args:
        *parameters: In the order of the bucket.
        index: The number of the bucket.
    """

    def __init__(self, *parameters, index=0):
        self._parameters, self._index = parameters, index

    def index(self):
        return self._index

    def buffer(self):
        return torch.cat([one.detach().flatten() for one in self._parameters])

    def parameters(self):
        return [*self._parameters]
