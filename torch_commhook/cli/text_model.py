"""The text, the model and the sharding of ``train``."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's users know
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torch_commhook.attachment.attaching import attach
from torch_commhook.cli.checkpoint import Checkpoint, map_tensors
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import parse_codec, parse_hook
from torch_commhook.metrics import HookStats, ring_all_reduce_bytes

# ---- the text to train on: reads files, holds out a part, and draws each rank's batches ----------


#: Directories of the standard library without text to train on: tests are long tables of data.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
#: One chunk of this size in every _HELD_OUT_EVERY is held out for evaluation.
_CHUNK_BYTES = 16 * 1024
_HELD_OUT_EVERY = 20
_HELD_OUT_WINDOWS = 64


class DataError(ValueError):
    """The text can't be trained on. The message is one sentence."""


@dataclass(frozen=True)
class TextData:
    """Text as bytes.

    Attributes:
        train: uint8 ``[n]``.
        held_out: uint8 ``[m]``, disjoint from ``train``; empty if the text is short.
        fingerprint: 16 hexadecimal digits of a SHA-256 over all bytes.
    """

    train: Tensor
    held_out: Tensor
    fingerprint: str

    def __len__(self) -> int:
        return self.train.numel() + self.held_out.numel()


def standard_library_files() -> list[Path]:
    """The ``.py`` files of Python's standard library without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_DIRECTORIES)
        found.extend(Path(folder) / name for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_bytes(files: Sequence[str | Path], cap_bytes: int | None = None) -> bytes:
    """The concatenated bytes of ``files``, at most ``cap_bytes``.

    Raises:
        DataError: a file is missing, can't be read, or is no regular file. Only one rank could read
            a pipe, and only once.
    """
    parts: list[bytes] = []
    left = sys.maxsize if cap_bytes is None else cap_bytes
    for file in files:
        if left <= 0:
            break
        try:
            status = os.stat(file)  # before open(), which may wait for the writer of a pipe
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise DataError(f"{file} can't be read: it is not a regular file")
            with open(file, "rb") as stream:
                # read(n) allocates n bytes, even for a shorter file.
                part = stream.read(left if left < status.st_size else -1)[:left]
        except OSError as error:
            raise DataError(f"{file} can't be read: {error.strerror or error}") from error
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_text(files: Sequence[str] | None, cap_bytes: int | None, seq: int) -> bytes:
    """The concatenated bytes of ``files``, or of the standard library for None.

    Raises:
        DataError: there is no file, a file can't be read, or the text is not longer than a sequence
            of ``seq`` bytes.
    """
    chosen: Sequence[str | Path] = standard_library_files() if files is None else files
    what = "the standard library" if files is None else "the data"
    text = read_bytes(chosen, cap_bytes)
    if not text:
        hint = " (this Python has no sources: give files)" if files is None else ""
        raise DataError(f"{what} is empty{hint}")
    if len(text) <= seq:
        raise DataError(f"{what} must be longer than a sequence ({seq} bytes), got {len(text)}")
    return text


def split_text(text: bytes, seq: int) -> TextData:
    """Convert ``text`` to tensors, and hold out one chunk of 16 KiB in every 20.

    A text of fewer than 20 chunks has no held-out part, and neither has any text if a sequence of
    ``seq`` bytes does not fit into a chunk.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    fingerprint = hashlib.sha256(text).hexdigest()[:16]
    chunks = data.split(_CHUNK_BYTES)
    if len(chunks) < _HELD_OUT_EVERY or seq >= _CHUNK_BYTES:
        return TextData(data, data[:0], fingerprint)
    middle = _HELD_OUT_EVERY // 2
    held_out = [chunk for i, chunk in enumerate(chunks) if i % _HELD_OUT_EVERY == middle]
    train = [chunk for i, chunk in enumerate(chunks) if i % _HELD_OUT_EVERY != middle]
    return TextData(torch.cat(train), torch.cat(held_out), fingerprint)


def training_batch(
    data: TextData, *, seed: int, step: int, rank: int, batch: int, seq: int
) -> Tensor:
    """The batch of one rank at one step: random windows of ``data.train``.

    It is int64 ``[batch, seq + 1]`` on the CPU, and depends only on the arguments.
    """
    # The hash gives neighbouring steps and ranks unrelated seeds.
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    starts = torch.randint(
        data.train.numel() - seq, (batch,), generator=generator, dtype=torch.int64, device="cpu"
    )
    return _windows(data.train, starts, seq)


def held_out_windows(data: TextData, *, rank: int, world_size: int, seq: int) -> Tensor:
    """This rank's windows for evaluation, at equal distances in the held-out text.

    They are int64 ``[count, seq + 1]``. The counts of two ranks differ by one at most, and are 0 if
    no text is held out.
    """
    last_start = data.held_out.numel() - seq - 1
    if last_start < 0:
        return torch.empty(0, seq + 1, dtype=torch.int64, device="cpu")
    starts = torch.linspace(0, last_start, _HELD_OUT_WINDOWS, dtype=torch.float64, device="cpu")
    starts = starts.long().unique()
    return _windows(data.held_out, starts[rank::world_size], seq)


def _windows(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    return text[starts[:, None] + torch.arange(seq + 1, dtype=torch.int64, device="cpu")].long()


# ---- a small GPT over bytes, with pre-norm blocks, rotary positions and causal attention ---------


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
        """The mean cross-entropy in nats per byte, a scalar in the parameters' dtype.

        ``inputs`` and ``targets``, the bytes that follow, are int64 ``[batch, length]``.
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

    Both are float32 tensors of shape ``[length, head_dim / 2]``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, _ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of channels ``(i, i + head_dim / 2)`` of ``x`` by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


# ---- shards the model of train: its traffic without a hook, and its state in whole tensors -------


_FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends.

    Attributes:
        bytes_sent: bytes of the hook's messages: in all-reduces, in the reduce-scatters of
            ``fsdp``, or between the replicas of ``hsdp``. None if the hook does not tell.
        bytes_scattered: bytes of reduce-scatters of gradients within a replica of ``hsdp``.
        bytes_gathered: bytes of all-gathers of parameters.
    """

    bytes_sent: int | None = 0
    bytes_scattered: int = 0
    bytes_gathered: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        is_known = self.bytes_sent is not None and other.bytes_sent is not None
        return Traffic(
            (self.bytes_sent or 0) + (other.bytes_sent or 0) if is_known else None,
            self.bytes_scattered + other.bytes_scattered,
            self.bytes_gathered + other.bytes_gathered,
        )

    def times(self, count: int) -> Traffic:
        """The traffic of ``count`` steps like this one."""
        sent = None if self.bytes_sent is None else count * self.bytes_sent
        return Traffic(sent, count * self.bytes_scattered, count * self.bytes_gathered)

    @classmethod
    def of(cls, counts: HookStats | Checkpoint) -> Traffic:
        """The traffic that a hook has counted since it was attached, or that a checkpoint has."""
        return cls(counts.bytes_sent, counts.bytes_scattered, counts.bytes_gathered)


def plain_traffic(model: ByteTransformer, config: TrainConfig) -> Traffic:
    """The traffic of a step without a hook, in float32 and with ring collectives.

    ``fully_shard`` pads each parameter to equal shards. It gathers the parameters of a block in the
    forward and again in the backward, and the others once.
    """
    ranks, replicas = config.shard_ranks, config.replicas
    if config.parallel == "ddp":
        return Traffic(ring_all_reduce_bytes(_FP32_BYTES * model.parameter_count(), config.ranks))
    blocks = [_shard_bytes(block.parameters(), ranks) for block in model.blocks]
    in_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    others = (each for each in model.parameters() if id(each) not in in_blocks)
    rest = _shard_bytes(others, ranks)
    scattered = (sum(blocks) + rest) * (ranks - 1)
    gathered = (2 * sum(blocks) + rest) * (ranks - 1)
    if config.parallel == "fsdp":
        return Traffic(scattered, 0, gathered)
    reduced = sum(ring_all_reduce_bytes(each, replicas) for each in (*blocks, rest))
    return Traffic(reduced, scattered, gathered)


def _shard_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """The bytes of a rank's padded shards."""
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return sum(_FP32_BYTES * -(-rows // ranks) * math.prod(rest) for rows, *rest in shapes)


def shard(model: ByteTransformer, config: TrainConfig, device: torch.device) -> None:
    """Apply ``fully_shard`` to each block, and to the model for its other parameters."""
    from torch.distributed.fsdp import fully_shard  # takes most of a second

    if config.parallel == "fsdp":
        mesh = init_device_mesh(device.type, (config.ranks,))
    else:
        sizes, names = (config.replicas, config.shard_ranks), ("replicas", "shards")
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)  # FSDP2 requires names
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def attach_hook(model: nn.Module, config: TrainConfig) -> Any:
    """Attach the configuration's hook, shard hook and codec; returns the handle, or None."""
    hook = parse_hook(config.hook)
    if hook is None:
        return None
    options = {}
    if config.shard_hook is not None:
        options["shard_hook"] = parse_hook(config.shard_hook)
    if config.weights is not None:
        options["weights"] = parse_codec(config.weights)
    return attach(model, hook, **options)


# ---- the whole state -----------------------------------------------------------------------------


def whole_state(state: Any) -> Any:
    """A copy of a state with whole tensors instead of shards. All ranks must call this function.

    Without shards it sends nothing and copies no tensor.
    """
    return map_tensors(
        state, lambda each: each.full_tensor() if hasattr(each, "full_tensor") else each
    )


def whole_model(model: ByteTransformer, config: TrainConfig) -> ByteTransformer:
    """The model with whole parameters on each rank. All ranks must call this function."""
    if config.parallel == "ddp":
        return model
    with torch.device("meta"):
        whole = ByteTransformer(config.layers, config.dim, config.heads)
    whole.load_state_dict(whole_state(model.state_dict()), assign=True)
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[int, Any]) -> None:
    """Load a state of whole parameters, by their numbers, into an optimizer, sharded or not.

    The optimizer keeps its settings, and the function does not change ``state``.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    own = {
        number: {name: _like(value, parameters[number]) for name, value in values.items()}
        for number, values in state.items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def _like(value: Any, parameter: Tensor) -> Any:
    """Copy a tensor of a state. The copy is sharded as its parameter if it has the same shape."""
    if not isinstance(value, Tensor):
        return value
    if not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value.clone()
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole = value.to(mesh.device_type, copy=True)
    # Each rank has the whole tensor, so no rank sends it.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
