"""Containers of tensors: their contents are changed, moved or found, and their types are kept."""
