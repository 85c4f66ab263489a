"""New ranks whose models do not fit are refused before they take part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_commhook import Elastic, attach


def _model(frozen: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("frozen", nn.Parameter(torch.zeros(frozen), requires_grad=False))
    return model


def test_frozen_parameters_must_be_the_same() -> None:
    settings = Elastic(min_ranks=1, ranks=1, grace=1.0, store=dist.HashStore())
    with (
        attach(_model(3), "allreduce", elastic=settings),
        pytest.raises(RuntimeError, match="parameters that are not trained must be the same"),
    ):
        attach(_model(4), "allreduce", elastic=settings)
