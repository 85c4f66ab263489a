"""The operator commhook::broadcast_coalesced: opcheck, fakes, and what compilers make of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from broadcast_groups import LAYOUTS, Alone, Counting, base_of, differing, of_layouts
from rank_pool import RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_commhook import broadcast_coalesced
from torch_commhook.process_group import register

operator = torch.ops.commhook.broadcast_coalesced.default
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64),
)


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a group of one rank, through which each bucket is gathered and scattered."""
    group = Alone()
    register(group, "alone")
    yield "alone"
    dist.destroy_process_group(group)


# ---- the operator --------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    tensors = [layout(base_of(dtype, 0).nan_to_num(1.0)) for layout in LAYOUTS.values()]
    torch.library.opcheck(operator, (tensors, 100, 0, name))


@pytest.mark.usefixtures("one_rank")
def test_opcheck_of_short_lists(name: str) -> None:
    for tensors in ([], [torch.ones(0)], [torch.ones(1)], [torch.ones(()), torch.ones(3).long()]):
        torch.library.opcheck(operator, (tensors, 1, 0, name))


@pytest.mark.usefixtures("one_rank")
def test_by_name(name: str) -> None:
    tensor = torch.ones(3)
    assert operator([tensor], 8, 0, name) is None
    assert tensor._version == 1
    with pytest.raises(ValueError, match="rank must be a rank below 1, got 1"):
        operator([tensor], 8, 1, name)
    with pytest.raises(RuntimeError, match="no group of that name"):
        operator([tensor], 8, 0, "no group of that name")
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must not require grad while gradients"):
        operator([torch.ones(3, requires_grad=True)], 8, 0, name)
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must not require grad while gradients"):
        torch.compile(lambda x: operator([x], 8, 0, name), backend="aot_eager")(
            torch.ones(3, requires_grad=True)
        )


WRONG: dict[str, tuple[Callable[[], Tensor], int, int, type[Exception], str]] = {
    "size": (lambda: torch.ones(3), 0, 0, ValueError, "buffer_size must be at least 1 byte, got 0"),
    "rank": (lambda: torch.ones(3), 8, -1, ValueError, "rank must be a rank of the group, got -1"),
    "sparse": (
        lambda: torch.ones(3).to_sparse(),
        *(8, 0, TypeError),
        r"tensors\[0\] must be dense \(torch.strided\), got layout torch.sparse_coo",
    ),
    "expanded": (
        lambda: torch.ones(1).expand(3),
        *(8, 0, ValueError),
        r"tensors\[0\] must reach each of its elements once, got sizes \[3\] with strides \[0\]",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_fake_validates(what: str) -> None:
    make, buffer_size, rank, error, message = WRONG[what]
    with FakeTensorMode() as mode, pytest.raises(error, match=f"broadcast_coalesced: {message}"):
        operator([mode.from_tensor(make())], buffer_size, rank, "any group")
    with FakeTensorMode():
        assert operator([torch.ones(3), torch.ones(2).long()], 8, 0, "any group") is None


def test_meta_tensors() -> None:
    assert operator([torch.ones(3, device="meta")], 8, 0, "any group") is None


@pytest.mark.usefixtures("one_rank")
def test_a_mode_sees_the_operator(name: str) -> None:
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]

    def run(x: Tensor) -> Tensor:
        broadcast_coalesced(group, [x], 8)
        return x + 1

    traced = make_fx(run)(torch.ones(3))
    assert operator in [node.target for node in traced.graph.nodes]


# ---- compiled ------------------------------------------------------------------------------------


def _compile(run: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """As a single graph, compiled anew."""
    torch._dynamo.reset()

    def call(*arguments: Any) -> Any:
        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False),
        ):
            return torch.compile(run, fullgraph=True, backend=backend)(*arguments)

    return call


def _counting(name: str) -> Counting:
    group = Counting(dist.group.WORLD)
    register(group, name)
    return group


def _large(rank: int) -> dict[str, Tensor]:
    """Tensors that travel alone, some in pieces."""
    generator = torch.Generator().manual_seed(rank)
    large = torch.randn(6000, 1500, generator=generator)
    return {"large": large, "small": large[0, :9].clone(), "integers": (1000 * large).int()}


def _as_eager(
    rank: int, is_large: bool, backend: str, source: int, buffer_size: int
) -> dict[str, Any]:
    group = _counting("as eager")

    def run(tensors: list[Tensor]) -> None:
        broadcast_coalesced(group, tensors, buffer_size, source)

    make = _large if is_large else functools.partial(of_layouts, DTYPES)
    tensors, expected = make(rank), make(source)
    _compile(run, backend)(list(tensors.values()))
    compiled = list(group.sent)
    group.sent.clear()
    run(list(expected.values()))  # all ranks have it already
    reply = {
        "differing": differing(tensors, make(source)),
        "same broadcasts": compiled == group.sent,
        "broadcasts": len(compiled),
        "in flight": (group.in_flight, group.most_in_flight),
        "versions": {t._version for t in tensors.values() if t.numel()},
    }
    dist.destroy_process_group(group)
    return reply


@pytest.mark.parametrize(
    ("is_large", "backend", "source", "buffer_size"),
    [
        (False, "inductor", 0, 500),
        (False, "aot_eager", 1, 1 << 20),
        (False, "eager", 0, 100),
        (True, "inductor", 1, 1 << 30),
    ],
)
def test_as_eager(
    two_ranks: RankPool, is_large: bool, backend: str, source: int, buffer_size: int
) -> None:
    for reply in two_ranks.run(_as_eager, is_large, backend, source, buffer_size, timeout=200):
        assert reply["differing"] == []
        assert reply["same broadcasts"] and reply["broadcasts"] > 0
        assert reply["broadcasts"] == 5 or not is_large
        assert reply["in flight"] == (0, 2)
        assert 0 not in reply["versions"]


def _tied_and_negated(rank: int, backend: str) -> tuple[list[int], list[float], list[float]]:
    group = _counting("tied")
    weight = torch.full((3,), float(rank))
    negated = torch.full((3,), complex(0, rank + 1.0)).conj().imag
    assert negated.is_neg()

    def run(tensors: list[Tensor]) -> None:
        made = tensors[0] * 2
        broadcast_coalesced(group, [*tensors, tensors[0], made, made], 100, 1)

    _compile(run, backend)([weight, weight, negated])
    dist.destroy_process_group(group)
    return [numel for _, numel in group.sent], weight.tolist(), negated.tolist()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_tied_weights_travel_once_and_negated_tensors(two_ranks: RankPool, backend: str) -> None:
    replies = two_ranks.run(_tied_and_negated, backend, timeout=200)
    assert replies == [([9], [1.0] * 3, [-2.0] * 3)] * 2


def _one_rank_compiled(rank: int) -> list[list[float]]:
    """Ranks need not agree on who compiles, nor on who looks at the tensors again."""
    group = _counting("one rank")

    def run(x: Tensor, y: Tensor) -> Tensor | None:
        sent = x * 2
        broadcast_coalesced(group, [sent], 8)
        broadcast_coalesced(group, [y], 8)
        if rank == 0:
            return None  # nothing is left to see of `sent`
        return sent + 1

    x, y = torch.full((3,), rank + 1.0), torch.full((2,), rank, dtype=torch.int16)
    got = (_compile(run) if rank == 0 else run)(x, y)
    dist.destroy_process_group(group)
    return [y.tolist(), [] if got is None else got.tolist()]


def test_what_nobody_looks_at_is_sent(two_ranks: RankPool) -> None:
    replies = two_ranks.run(_one_rank_compiled, timeout=200)
    assert replies == [[[0, 0], []], [[0, 0], [3, 3, 3]]]


def _ordered(rank: int) -> tuple[list[int], list[int]]:
    """Buckets that have nothing to do with each other, with other collectives between."""
    group = _counting("ordered")
    lengths = [5, 3, 40, 2, 7, 30, 6]

    def run(tensors: list[Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            if i % 3 == 2:  # a functional collective
                sent = torch.ops._c10d_functional.broadcast(tensor * 1, 0, group.group_name)
                tensor.copy_(torch.ops._c10d_functional.wait_tensor(sent))
            else:
                broadcast_coalesced(group, [tensor], 8)

    _compile(run)([torch.ones(length) for length in lengths])
    dist.destroy_process_group(group)
    return [numel for _, numel in group.sent], lengths


def test_collectives_keep_their_order(two_ranks: RankPool) -> None:
    for sent, lengths in two_ranks.run(_ordered, timeout=200):
        assert sent == lengths


@pytest.mark.usefixtures("one_rank")
def test_errors_while_compiling() -> None:
    group = dist.group.WORLD
    for arguments, error, message in (
        (([torch.ones(3)], 0), ValueError, "buffer_size must be at least 1 byte"),
        (([torch.ones(3)], 8, 1), ValueError, "rank must be a rank below 1, got 1"),
        (([torch.ones(1).expand(3)], 8), ValueError, "must reach each of its elements once"),
    ):
        with pytest.raises(Exception, match=message) as caught:
            _compile(broadcast_coalesced, "aot_eager")(group, *arguments)
        assert isinstance(caught.value, error) or error.__name__ in str(caught.value)
