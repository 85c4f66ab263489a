"""Uses of the public interface. Static tools accept all of it; nothing runs this file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook import (
    BucketStats,
    Elastic,
    GradBucket,
    HookHandle,
    HookStats,
    NativeLibraryError,
    PeerError,
    TooFewRanksError,
    attach,
    broadcast_coalesced,
    check_hook,
    codecs,
    collectives,
    hooks,
    load_cpp_hooks,
    reshard_states,
    run_hook,
    watch_replicas,
)
from torch_commhook.hooks import Hook, compressed, error_feedback
from torch_commhook.testing import run_ranks


def all_hooks(group: dist.ProcessGroup) -> list[Hook]:
    """Each hook, with each of its arguments."""
    plain: list[Hook] = [
        hooks.allreduce(),
        hooks.allreduce(process_group=group),
        hooks.cast(torch.bfloat16, process_group=group),
        hooks.powersgd(rank=2, min_compression_rate=2.0, seed=1, process_group=group),
        hooks.policy([("dim <= 1", hooks.allreduce())], default=hooks.cast()),
        hooks.adaptive(1 << 20, every=10, block_size=128),
        hooks.auto(max_error=0.05, hooks=[hooks.cast(), hooks.sign()]),
        hooks.local_sgd(10, outer=hooks.outer_sgd(lr=0.7, momentum=0.9, nesterov=True)),
        hooks.local_sgd(H=8, hook=hooks.cast(), fragments=2, delay=1, mix=0.5, error_reset=True),
        hooks.hierarchical(codecs.sign(), levels="host", seed=1),
        hooks.hierarchical(codecs.sign(), intra_group=group, inter_group=group),
        hooks.compressed(codecs.blockwise(bits=4), seed=1, process_group=group),
        hooks.cpp("name", process_group=group, scale=2.0),
    ]
    of_codecs: list[compressed] = [
        hooks.blockwise(4, 64, False, "stochastic", seed=1, process_group=group),
        hooks.blockwise(bits=4, block_size=64, symmetric=False, rounding="nearest"),
        hooks.chunk_topk(k=32, chunk=2048, bits=4, seed=1, process_group=group),
        hooks.fp8(format="e5m2", block_size=64, seed=1, process_group=group),
        hooks.randomk(density=0.1, unbiased=True, seed=1, process_group=group),
        hooks.sign(block_size=32, seed=1, process_group=group),
        hooks.topk(density=0.1, seed=1, process_group=group),
    ]
    wrappers: list[Hook] = [
        error_feedback(hooks.blockwise(bits=4), decay=0.9, dtype=torch.bfloat16),
        hooks.momentum(hooks.chunk_topk(), beta=0.99, dtype=torch.float32),
        hooks.after(100, hooks.sign(), before=hooks.cast()),
        hooks.clip(1.0, hooks.cast()),
    ]
    return [*plain, *of_codecs, *wrappers]


def all_codecs() -> list[codecs.Codec]:
    """Each codec, with each of its arguments."""
    return [
        codecs.blockwise(bits=4, block_size=64, symmetric=False, rounding="stochastic"),
        codecs.chunk_topk(k=32, chunk=2048, bits=4),
        codecs.fp8(format="e4m3", block_size=128),
        codecs.randomk(density=0.1, unbiased=True),
        codecs.sign(block_size=32),
        codecs.topk(density=0.1),
    ]


def messages(codec: codecs.Codec, gradient: Tensor) -> int:
    """A message, and back."""
    message = torch.empty(codec.nbytes(gradient.numel()), dtype=torch.uint8)
    codec.encode([gradient], message, scale=0.5)
    codec.decode(message, [gradient])
    parts: list[codecs.Segment] = codec.segments(gradient.numel(), 2)
    flat: Tensor = codecs.flatten([gradient], scale=0.5)
    codecs.unflatten_into(flat, [gradient])
    form = codecs.BlockForm(block_size=256, bits=4, parameters=1)
    return sum(part.nbytes for part in parts) + form.nbytes(1024) + len(codecs.CODECS)


class signs(codecs.BlockCodec):  # noqa: N801
    """A codec by operators of one's own."""

    def __init__(self, size: int = 64) -> None:
        form = codecs.BlockForm(block_size=size, bits=1, parameters=1)
        super().__init__("signs", form, {"block_size": size}, library="mine")


@codecs.register_codec
class halves(codecs.Codec):  # noqa: N801
    """A codec of one's own."""

    def segments(self, numel: int, segments: int = 1) -> list[codecs.Segment]:
        return [codecs.Segment(numel, 2 * numel)]

    def encode(
        self,
        tensors: Sequence[Tensor],
        message: Tensor,
        *,
        segments: int = 1,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        message.copy_(tensors[0].mul(scale).half().view(torch.uint8))

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        segments: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        tensors[0].copy_(message.view(torch.float16))


class own_hook(Hook):  # noqa: N801
    """A hook of one's own."""

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return collectives.all_reduce(bucket.buffer(), group=self.group(bucket))


def train(model: nn.Module) -> HookStats:
    """Attach a hook, and use its handle."""
    handle: HookHandle = attach(model, hooks.compressed(halves()), bucket_cap_mb=4)
    try:
        model(torch.ones(2, 2)).sum().backward()
    except PeerError as error:
        print(error.rank)
    state = handle.state_dict(gather=True)
    handle.load_state_dict(state)
    handle.replace(own_hook())
    stats = handle.stats()
    buckets: Sequence[BucketStats] = stats.buckets
    print(len(buckets))
    handle.remove()
    return stats


def train_elastically(model: nn.Module) -> HookHandle:
    """Ranks may be lost."""
    try:
        return attach(model, hooks.allreduce(), elastic=Elastic(min_ranks=2, name="run"))
    except TooFewRanksError:
        raise SystemExit(1) from None


def more(bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """Functions beside :func:`attach`."""
    try:
        load_cpp_hooks("libhooks.so")
    except NativeLibraryError as error:
        print(error)
    hook = hooks.fp8()
    check_hook(hook)
    broadcast_coalesced(group, [torch.ones(2)], 1 << 20, rank=0)
    reshard_states([{}], 2)
    with watch_replicas(nn.Linear(2, 2), every=10, on_difference="warn", buffers=True) as watch:
        watch.check()
    return run_hook(hook, None, bucket)


def sums(tensors: list[Tensor]) -> torch.futures.Future[Tensor]:
    """A compressed sum."""
    return collectives.compressed_all_reduce(tensors, codecs.fp8(), scale=0.5)


def rank_of(rank: int, factor: float) -> float:
    """What a rank computes."""
    return rank * factor


def ranks_as_threads() -> list[float]:
    """Ranks as threads."""
    return run_ranks(rank_of, 2, 1.5)
