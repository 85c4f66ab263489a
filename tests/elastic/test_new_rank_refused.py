"""New ranks whose models do not fit are refused before they take part."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_commhook import Elastic, __version__, attach
from torch_commhook.step.rendezvous import hashed


def _model(frozen: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("frozen", nn.Parameter(torch.zeros(frozen), requires_grad=False))
    return model


def _settings() -> Elastic:
    return Elastic(min_ranks=1, name="run", ranks=1, grace=0.4, store=dist.HashStore())


def test_frozen_parameters_must_be_the_same() -> None:
    settings, model = _settings(), _model(3)  # the training ends with the model
    text = "parameters that are not trained must be the same .* training 'run' .* Elastic.name=."
    with (
        attach(model, "allreduce", elastic=settings),
        pytest.raises(RuntimeError, match=text),
    ):
        attach(_model(4), "allreduce", elastic=settings)


def test_another_version_of_the_library_is_refused() -> None:
    settings, model = _settings(), _model(3)
    with mock.patch("torch_commhook.attachment.printed_hook.__version__", "0.0.9"):
        handle = attach(model, "allreduce", elastic=settings)
    text = f"version of torch_commhook must be .* this one has '{__version__}', .* has '0.0.9'"
    with handle, pytest.raises(RuntimeError, match=text):
        attach(_model(3), "allreduce", elastic=settings)


def test_the_settings_of_a_training_end_with_it() -> None:
    settings = _settings()
    attach(_model(3), "allreduce", elastic=settings).remove()
    with attach(_model(4), "allreduce", elastic=settings) as handle:
        assert handle.steps == 0


def test_a_rank_with_the_settings_of_a_training_that_has_ended_owns_them() -> None:
    """So that a rank with others finds this one before it has requested to join."""
    settings, first = _settings(), []
    assert isinstance(settings.store, dist.Store)
    store = dist.PrefixStore(f"commhook-elastic/{hashed('run')}", settings.store)
    for _ in range(2):
        attach(_model(3), "allreduce", elastic=settings).remove()
        first.append(json.loads(store.get("settings"))["the first rank"])
    assert first == ["1", "2"]


@pytest.mark.parametrize(
    "text", [b"[]", b"[" * 100_000, b'{"the first rank": 1e999}', b"\xff"], ids=range(4)
)
def test_settings_that_another_program_has_written(text: bytes) -> None:
    settings = _settings()
    assert isinstance(settings.store, dist.Store)
    dist.PrefixStore(f"commhook-elastic/{hashed('run')}", settings.store).set("settings", text)
    with pytest.raises(RuntimeError, match="from this version of the library, got '"):
        attach(_model(3), "allreduce", elastic=settings)
