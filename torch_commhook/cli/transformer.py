"""A small GPT over bytes, with pre-norm blocks, rotary positions and causal attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's users know
from torch import Tensor, nn

#: Every byte is a token.
VOCABULARY = 256
_ROTARY_BASE = 10000.0


class Block(nn.Module):
    """Attention and a feed-forward network of width ``4 * dim``, each after a LayerNorm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_output = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward_up = nn.Linear(dim, 4 * dim, bias=False)
        self.feed_forward_down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, dim = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        split = projected.view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(query, cosine, sine), rotate(key, cosine, sine), value, is_causal=True
        )
        x = x + self.attention_output(attended.transpose(1, 2).reshape(batch, length, dim))
        hidden = F.gelu(self.feed_forward_up(self.feed_forward_norm(x)))
        forwarded: Tensor = self.feed_forward_down(hidden)
        return x + forwarded


class ByteTransformer(nn.Module):
    """A decoder that predicts the next byte.

    Args:
        layers: number of blocks, at least 1.
        dim: width, a multiple of ``2 * heads``, because rotary positions rotate pairs of channels.
        heads: number of attention heads.

    Raises:
        ValueError: ``dim`` is not a multiple of ``2 * heads``.
    """

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        if dim % (2 * heads) != 0:
            raise ValueError(
                f"ByteTransformer: dim must be a multiple of 2 * heads = {2 * heads}, got {dim}"
            )
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head_dim = dim // heads
        self._initialize(layers)

    def _initialize(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02
            if name.endswith(("attention_output.weight", "feed_forward_down.weight")):
                std /= math.sqrt(2 * layers)  # the residual stream keeps its scale at any depth
            nn.init.normal_(parameter, std=std)
        # With 0.02 here, the loss stays at the entropy of a byte's frequency (2.8) for 100 steps.
        nn.init.normal_(self.embedding.weight, std=1.0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats per byte.

        Args:
            inputs: int64 ``[batch, length]``, bytes.
            targets: int64 ``[batch, length]``, the bytes that follow.

        Returns:
            A scalar, in the parameters' dtype.
        """
        # These are no buffers, because DDP broadcasts buffers before every step.
        cosine, sine = rotary_tables(self.head_dim, inputs.shape[1], inputs.device)
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The matrices, for weight decay, and the vectors."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        return matrices, vectors

    def parameter_count(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def rotary_tables(head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary positions (RoFormer, arXiv:2104.09864).

    Returns:
        Two fp32 tensors ``[length, head_dim / 2]``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, _ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of channels ``(i, i + head_dim / 2)`` of ``x`` by its position's angle.

    Args:
        x: ``[batch, heads, length, head_dim]``.
        cosine: ``[length, head_dim / 2]``.
        sine: ``[length, head_dim / 2]``.

    Returns:
        A tensor of the shape of ``x``.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
