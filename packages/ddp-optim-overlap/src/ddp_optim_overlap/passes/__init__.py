"""One backward pass: its buckets are averaged, gathered and stepped, and its end is the same on all ranks."""
