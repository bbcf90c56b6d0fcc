"""A state that chooses the communication hook by trying several in the first steps of training."""
