"""A state that chooses the communication hook by trying several in the first steps of training."""

from ddp_quant_hooks.auto.choice import Choice
from ddp_quant_hooks.auto.state import AutoState, Candidate, CandidateError, auto_hook, default_candidates

__all__ = ["AutoState", "Candidate", "CandidateError", "Choice", "auto_hook", "default_candidates"]
