"""Measure links and hooks between the ranks of a job: ``torchrun ... -m ddp_quant_hooks.measure``."""

from ddp_quant_hooks.measure.advice import Advice, Estimate, Model, StepTimes, advise, estimate_steps
from ddp_quant_hooks.measure.links import Link
from ddp_quant_hooks.measure.report import Report, measure
from ddp_quant_hooks.measure.trials import Exchange

__all__ = [
    "Advice",
    "Estimate",
    "Exchange",
    "Link",
    "Model",
    "Report",
    "StepTimes",
    "advise",
    "estimate_steps",
    "measure",
]
