"""What a model calls before its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_commhook.attachment.forward_hook import BeforeForward, register_first


def test_forward_hooks_have_one_order() -> None:
    """Dynamo of torch 2.11 takes that of the underlying dict."""
    module = nn.Linear(2, 2)
    called: list[str] = []

    class Named(BeforeForward):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, module: nn.Module, args: Any) -> None:
            called.append(self.name)

    module.register_forward_pre_hook(Named("second"))
    module.register_forward_pre_hook(Named("third"))
    handle = register_first(module, Named("first"))
    present = module._forward_pre_hooks
    assert list(dict.keys(present)) == list(present)
    module(torch.zeros(1, 2))
    handle.remove()
    module(torch.zeros(1, 2))
    assert called == ["first", "second", "third", "second", "third"]
