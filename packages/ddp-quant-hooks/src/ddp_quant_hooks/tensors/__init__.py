"""Collectives of plain tensors (not buckets), with 16, 8 or 4 bits a value on the wire."""
