"""What modules hold: parameters and buffers identical on all ranks, state dicts, the memory of tensors."""
