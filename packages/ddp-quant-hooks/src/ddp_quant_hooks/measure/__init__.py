"""Measure links and hooks between the ranks of a job: ``python -m ddp_quant_hooks.measure``."""

from ddp_quant_hooks.measure.advice import Advice, advise
from ddp_quant_hooks.measure.cost_model import Cluster
from ddp_quant_hooks.measure.estimate import Estimate, Model, estimate_steps
from ddp_quant_hooks.measure.links import Link
from ddp_quant_hooks.measure.prediction import Prediction, predict
from ddp_quant_hooks.measure.report import Report, measure
from ddp_quant_hooks.measure.step_model import StepTimes
from ddp_quant_hooks.measure.timing import Beside, Exchange, HookTimes

__all__ = [
    "Advice",
    "Beside",
    "Cluster",
    "Estimate",
    "Exchange",
    "HookTimes",
    "Link",
    "Model",
    "Prediction",
    "Report",
    "StepTimes",
    "advise",
    "estimate_steps",
    "measure",
    "predict",
]
