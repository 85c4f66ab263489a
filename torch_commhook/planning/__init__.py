"""Predicts the cost of hooks in a training step over a link, before training with them."""

from torch_commhook.planning.link_file import LinkFile
from torch_commhook.planning.measured import Cost, Measured, measure, plan, step_seconds
from torch_commhook.planning.model import BUCKET_CAPS_MB, HookError, Model, Parameter, bucket_sizes
from torch_commhook.step.link import MeasuredLink, measure_link

__all__ = [
    "BUCKET_CAPS_MB",
    "Cost",
    "HookError",
    "LinkFile",
    "Measured",
    "MeasuredLink",
    "Model",
    "Parameter",
    "bucket_sizes",
    "measure",
    "measure_link",
    "plan",
    "step_seconds",
]
