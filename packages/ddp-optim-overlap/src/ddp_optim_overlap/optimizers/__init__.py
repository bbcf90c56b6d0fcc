"""Optimizers that step a part of their parameters: which do, and how they are made to."""
