"""Gradients as products of two factors in few bits, for slow links."""
