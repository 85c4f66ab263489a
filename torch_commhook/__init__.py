"""One gradient communication hook for every PyTorch execution mode, at the speed of memory."""

from torch_commhook import _ops as _ops
