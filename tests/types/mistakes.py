"""Mistakes that static tools refuse, each on a line marked as wrong. Nothing runs this file."""

from __future__ import annotations

import torch
from torch import nn

from torch_commhook import attach, codecs, hooks
from torch_commhook.hooks import blokwise  # wrong: a misspelt name


def misspelt_names() -> None:
    """Hooks, codecs and functions that do not exist."""
    hooks.blokwise(bits=4)  # wrong
    hooks.allreduced()  # wrong
    codecs.blokwise()  # wrong
    codecs.register_codecs(codecs.sign)  # wrong
    blokwise()


def misspelt_arguments() -> None:
    """Arguments that a hook or codec does not have."""
    hooks.blockwise(bit=4)  # wrong
    hooks.chunk_topk(chunks=64)  # wrong
    hooks.fp8(fmt="e4m3")  # wrong
    hooks.randomk(biased=True)  # wrong
    hooks.sign(block=64)  # wrong
    hooks.topk(densty=0.1)  # wrong
    hooks.cast(dtyp=torch.float16)  # wrong
    hooks.powersgd(ranks=2)  # wrong
    hooks.error_feedback(hooks.sign(), decy=0.5)  # wrong
    hooks.local_sgd(8, fragment=2)  # wrong
    hooks.adaptive(100, budgets=1)  # wrong
    hooks.auto(error=0.1)  # wrong
    hooks.outer_sgd(learning_rate=0.1)  # wrong
    codecs.blockwise(bit=4)  # wrong
    codecs.chunk_topk(chunks=64)  # wrong
    codecs.fp8(fmt="e4m3")  # wrong
    codecs.randomk(biased=True)  # wrong
    codecs.sign(block=64)  # wrong
    codecs.topk(densty=0.1)  # wrong


def wrong_types(model: nn.Module) -> None:
    """Values of other types."""
    hooks.blockwise(bits="4")  # wrong
    hooks.blockwise(4, seed="1")  # wrong
    hooks.blockwise(4, 64, True, "nearest", 1)  # wrong: the seed has a name
    hooks.error_feedback(codecs.sign())  # wrong: a codec, and no hook
    hooks.compressed(hooks.sign())  # wrong: a hook, and no codec
    hooks.clip("1.0")  # wrong
    hooks.momentum(hooks.sign())  # wrong: no beta
    hooks.policy([("dim <= 1", codecs.sign())])  # wrong
    attach(model, hooks.sign(), buckets=3)  # wrong
    attach(model, hooks.sign()).stat()  # wrong
