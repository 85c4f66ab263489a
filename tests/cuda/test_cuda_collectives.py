"""Compressed sums of CUDA tensors: the values of the CPU, and streams of their own.

Two ranks on one GPU, over Gloo: NCCL takes no two ranks of one GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from codec_examples import EXAMPLES, of_each_codec
from mode_cases import CastInTwoStages
from ops_reference import same_bits
from rank_pool import RankPool
from symmetric_ranks import Case
from torch import Tensor, nn

import torch_commhook
from torch_commhook import hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.compressed_call import MessageBuffers
from torch_commhook.collectives.futures import on_side_stream

pytestmark = pytest.mark.cuda

NUMEL = 10_001
HOOKS = [
    "allreduce()",
    "cast(bfloat16)",
    "CastInTwoStages()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(topk(density=0.1))",
    "powersgd(rank=2)",
    "fp8()",
]


def _sums_on_both(rank: int, number: int) -> None:
    case = Case(EXAMPLES[number], 2, NUMEL)
    case.keeps_errors = case.codec.takes_error
    got, right = (case.of_rank(rank, at, buffers=MessageBuffers()) for at in ("cuda", "cpu"))
    assert all(map(same_bits, got, right)), case.codec


@of_each_codec
def test_two_ranks_get_the_sums_of_the_cpu(two_ranks: RankPool, codec: Codec) -> None:
    two_ranks.run(_sums_on_both, EXAMPLES.index(codec), timeout=120)


def _trained(expression: str, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)).to(device)
    names = {name: getattr(hooks, name) for name in dir(hooks)}  # of codecs, too
    names |= {"bfloat16": torch.bfloat16, "CastInTwoStages": CastInTwoStages}
    hook = eval(expression, names)
    handle = torch_commhook.attach(model, hook, bucket_cap_mb=0.005)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randn(8, 40, generator=generator).to(device)
        model.zero_grad()
        model(x).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
    handle.remove()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _trains_alike(rank: int, expression: str) -> None:
    for got, right in zip(_trained(expression, "cuda"), _trained(expression, "cpu"), strict=True):
        torch.testing.assert_close(got, right, rtol=2e-3, atol=2e-3)  # a code may flip


@pytest.mark.parametrize("expression", HOOKS)
def test_two_ranks_train_as_on_the_cpu(two_ranks: RankPool, expression: str) -> None:
    two_ranks.run(_trains_alike, expression, timeout=120)


def test_the_current_stream_goes_on(tmp_path) -> None:
    """Nothing of a sum runs on it; the Future makes it wait."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        codec = CODECS["blockwise"]()
        x, out = torch.randn(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
        buffers = MessageBuffers()
        compressed_all_reduce(x, codec, out=out, buffers=buffers).wait()
        right = out.clone()
        out.zero_()
        torch.cuda.synchronize()
        with on_side_stream(x.device, buffers.stream, []):
            torch.cuda._sleep(1_000_000_000)
            slept = torch.cuda.Event()
            slept.record()
        future = compressed_all_reduce(x, codec, out=out, buffers=buffers)
        passed = torch.cuda.Event()
        passed.record()
        passed.synchronize()
        assert not slept.query()
        assert torch.equal(future.wait(), right)
        assert slept.query()
    finally:
        dist.destroy_process_group()
