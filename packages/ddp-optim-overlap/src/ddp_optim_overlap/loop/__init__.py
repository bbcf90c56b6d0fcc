"""The training loop around the passes: what ``optimizer.step()`` means, and what was changed too late."""
