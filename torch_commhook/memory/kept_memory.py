"""Copies of a hook's memory, for a step that ranks may have to repeat."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.memory.hook_memory import HookMemory


class KeptMemory:
    """Copies of a hook's memory.

    Args:
        memory: the hook's memory to copy.
    """

    def __init__(self, memory: HookMemory) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._copies: list[tuple[Tensor, Tensor]] = [
                (tensor, tensor.clone()) for tensor in memory.changing_tensors()
            ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the memory."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
