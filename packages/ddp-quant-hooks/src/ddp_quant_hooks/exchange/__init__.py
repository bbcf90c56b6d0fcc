"""How ranks average together: an immutable plan, and one loop that follows it."""
