"""Predicts the cost of hooks in a training step over a link, before training with them."""

from torch_commhook.planning.buckets import BUCKET_CAPS_MB, bucket_sizes
from torch_commhook.planning.cost import Cost, plan, step_seconds
from torch_commhook.planning.hook_work import HookError
from torch_commhook.planning.link import MeasuredLink, measure_link
from torch_commhook.planning.link_file import LinkFile
from torch_commhook.planning.measured import Measured, measure
from torch_commhook.planning.model import Model, Parameter

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
