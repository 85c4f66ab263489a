"""What a hook remembers, as it was before a step that may have to be taken again."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.memory.hook_memory import HookMemory


class KeptMemory:
    """Copies of what a hook remembers.

    Args:
        memory: of the hook, at the moment.
    """

    def __init__(self, memory: HookMemory) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._copies: list[tuple[Tensor, Tensor]] = [
                (tensor, tensor.clone()) for tensor in memory.changing_tensors()
            ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the hook remember what it did then."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
