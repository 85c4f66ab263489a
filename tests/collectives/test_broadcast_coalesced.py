"""broadcast_coalesced: values on two ranks, what it sends and refuses, and what compilers make."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from broadcast_groups import DTYPES, LAYOUTS, Alone, Counting, base_of, bits, differing, of_layouts
from on_ranks import on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_commhook import _C, broadcast_coalesced
from torch_commhook.process_group import register

# ---- values --------------------------------------------------------------------------------------


@on_processes
@pytest.mark.parametrize("buffer_size", [1, 333, 5000, 1 << 30])
@pytest.mark.parametrize("source", [0, 1])
def test_all_dtypes_and_strides(rank: int, source: int, buffer_size: int) -> None:
    tensors, expected = of_layouts(DTYPES, rank), of_layouts(DTYPES, source)
    before = len(differing(tensors, expected))
    assert before == 0 if rank == source else before > 100
    broadcast_coalesced(None, tensors.values(), buffer_size, source)
    assert differing(tensors, expected) == []


@on_processes
@pytest.mark.parametrize("source", [0, 1])
def test_large_tensors(rank: int, source: int) -> None:
    """Tensors that travel alone, from where they lie and through a buffer, and a list that is more
    than one bucket whatever the buffer's size."""
    generator = torch.Generator().manual_seed(0)
    sent = [torch.randn(700, 1000, generator=generator) for _ in range(2)]
    sent += [torch.randn(60_000, generator=generator) for _ in range(40)]
    sent += [torch.randn(1, 6000, 1500, generator=generator) for _ in range(2)]  # in pieces
    tensors = [tensor.clone() if rank == source else torch.zeros_like(tensor) for tensor in sent]
    if rank == 1:  # where the other rank has it contiguous
        tensors[1] = tensors[1].t().contiguous().t()
        tensors[-1] = tensors[-1].mT.contiguous().mT
    broadcast_coalesced(dist.group.WORLD, tensors, 1 << 30, source)
    assert [i for i, one in enumerate(tensors) if not torch.equal(one, sent[i])] == []


@on_processes
def test_views_are_written_in_place(rank: int) -> None:
    whole, columns = torch.full((2, 3), float(rank)), torch.full((3, 3), float(rank))
    conjugate = torch.full((2,), complex(rank, rank + 1))
    views = [whole[1], columns[:, 1], conjugate.conj(), conjugate.new_ones(2).conj().imag]
    broadcast_coalesced(dist.group.WORLD, views, 1 << 20, 1)
    assert whole.flatten().tolist() == [rank] * 3 + [1] * 3
    assert columns.flatten().tolist() == [rank, 1, rank] * 3
    assert conjugate.tolist() == [1 + 2j] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capability", ["reference", "default", "avx2", "avx512"])
def test_copies_keep_all_bits(dtype: torch.dtype, capability: str) -> None:
    """Signalling NaN and payloads, in short rows and in what is written past the caches."""
    count = (1 << 24) // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    source = source.view(dtype)
    before = torch.ops.commhook.cpu_capability()
    torch.ops.commhook.cpu_capability(capability)
    try:
        for tensors in ([source[1:]], list(source.split(100)[:99]), [source.view(2, -1).t()]):
            buffer = torch.ops.commhook.flatten(tensors)
            back = [torch.empty_like(tensor) for tensor in tensors]
            torch.ops.commhook.unflatten_into(buffer, back)
            for one, other in zip(tensors, back, strict=True):
                assert torch.equal(bits(one), bits(other))
    finally:
        torch.ops.commhook.cpu_capability(before)


# ---- what is sent --------------------------------------------------------------------------------


def test_buckets() -> None:
    def make(sizes: list[int], kinds: list[int], limit: int) -> list[list[int]]:
        return _C.broadcast_buckets(sizes, kinds, limit)

    assert make([4, 4, 4], [0, 0, 0], 8) == [[0, 1], [2]]
    assert make([4, 4, 4], [0, 0, 0], 7) == [[0], [1], [2]]
    assert make([4, 8, 4], [0, 0, 0], 8) == [[0, 2], [1]]
    assert make([4, 4, 4, 4], [0, 1, 0, 1], 8) == [[0, 2], [1, 3]]
    assert make([0, 3, 0, 9, 3], [0] * 5, 8) == [[1, 4], [3]]
    assert make([1] * 3, [2, 1, 0], 100) == [[0], [1], [2]]
    assert make([], [], 1) == []
    # What is large travels alone, and buckets are no larger than they need be.
    assert make([10, 1 << 20, 10], [0] * 3, 1 << 30) == [[0, 2], [1]]
    assert len(make([1 << 19] * 64, [0] * 64, 1 << 30)) == 4


def test_cuts() -> None:
    """Into pieces of 32 MiB, along the first dimension that has more than one element."""
    assert _C.broadcast_cut([1 << 23], 4) is None
    assert _C.broadcast_cut([(1 << 23) + 1], 4) == (0, 1 << 23)
    assert _C.broadcast_cut([1, 1, 50257, 768], 4) == (2, 10922)
    assert _C.broadcast_cut([3, 1 << 24], 4) == (0, 1)
    assert _C.broadcast_cut([0, 1 << 40], 4) is None
    assert _C.broadcast_cut([], 16) is None


def _calls(run: Callable[[], object]) -> tuple[int, int, int]:
    """How often it flattens, broadcasts and unflattens."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    counts = {event.key: event.count for event in profile.key_averages()}
    names = ("commhook::flatten", "c10d::broadcast_", "commhook::unflatten_into")
    return tuple(counts.get(name, 0) for name in names)  # type: ignore[return-value]


@on_processes
def test_copies_and_broadcasts(rank: int) -> None:
    """Through a Python group each bucket is gathered and scattered once; on Gloo, gathered on the
    source and scattered elsewhere. What is contiguous and alone is not copied; what is alone and
    not contiguous is copied by ATen."""
    group = Counting(dist.group.WORLD)
    tensors = [torch.ones(10) for _ in range(20)] + [torch.ones(40), torch.ones(40, 2)[:, 0]]
    tensors += [torch.ones(9, dtype=torch.int64)]
    alone = [t.data_ptr() for t in (tensors[20], tensors[22])]
    wrapped = _calls(lambda: broadcast_coalesced(group, tensors, 100, 0))
    gloo = _calls(lambda: broadcast_coalesced(dist.group.WORLD, tensors, 100, 0))
    assert wrapped == (10, 13, 10)
    assert gloo == ((10, 13, 0) if rank == 0 else (0, 13, 10))
    small, large, number = (torch.float32, 20), (torch.float32, 40), (torch.int64, 9)
    assert group.sent == [small] * 10 + [large] * 2 + [number]
    assert (group.in_flight, group.most_in_flight) == (0, 2)
    assert [place in alone for place in group.places] == [False] * 10 + [True, False, True]
    # Two of a bucket's size, and one for the tensor that is larger.
    assert len(set(group.places) - set(alone)) <= 3


def test_one_rank_copies_nothing(one_rank: None) -> None:
    tensor = torch.ones(3, 3).t()
    calls = _calls(lambda: broadcast_coalesced(dist.group.WORLD, [tensor, tensor + 1], 100))
    assert calls == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
def test_a_group_may_leave_the_contents(dtype: torch.dtype) -> None:
    tensors = [layout(base_of(dtype, 0)) for layout in LAYOUTS.values()]
    before = [bits(tensor).clone() for tensor in tensors]
    for source in (0, 1):
        broadcast_coalesced(Alone(2), tensors, 1 << 20, source)
        assert all(map(torch.equal, before, map(bits, tensors)))


# ---- versions ------------------------------------------------------------------------------------


@on_processes
def test_autograd_notices(rank: int) -> None:
    """On all ranks alike, or they would go on differently."""
    base = torch.zeros(4, 4)
    tensors = [torch.zeros(3), base[1], base[:, 3][2:], torch.zeros(1 << 19), torch.zeros(0)]
    saved = torch.zeros(3)
    loss = (torch.ones(3, requires_grad=True) * saved).sum()
    with torch.no_grad():
        leaf = torch.zeros(3, requires_grad=True)
        broadcast_coalesced(dist.group.WORLD, [*tensors, saved, leaf], 1 << 20)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert [tensor._version for tensor in (*tensors, leaf)] == [1, 2, 2, 1, 0, 1]


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failing", "error", "started", "waited"),
    [
        ({0: "start"}, "broadcast 0", 0, 0),
        ({1: "start"}, "broadcast 1", 1, 1),
        ({2: "start"}, "broadcast 2", 2, 2),
        ({0: "wait"}, "wait 0", 2, 2),
        ({0: "wait", 1: "wait"}, "wait 0", 2, 2),
        ({1: "wait"}, "wait 1", 3, 3),
        ({3: "wait"}, "wait 3", 4, 4),
        ({1: "wait", 2: "start"}, "broadcast 2", 2, 2),
    ],
    ids=json.dumps,
)
def test_an_error_leaves_nothing_in_flight(
    failing: dict[int, str], error: str, started: int, waited: int
) -> None:
    group = Alone(2, failing)
    with pytest.raises(KeyError, match=error):
        broadcast_coalesced(group, [torch.ones(2) for _ in range(4)], 8)
    assert (group.started, group.waited) == (started, waited)
    broadcast_coalesced(Alone(2), [torch.ones(2)], 8)


@on_ranks(2)
def test_tied_weights_travel_once(rank: int) -> None:
    group = Counting(dist.group.WORLD)
    weight = torch.full((4, 2), 1.0 + rank)
    broadcast_coalesced(group, [weight, weight.detach(), torch.ones(3), weight], 1000)
    assert group.sent == [(torch.float32, 11)]
    assert weight.flatten().tolist() == [1.0] * 8


class _Unlike(dist.ProcessGroup):  # PyTorch's own class
    def __init__(self, returned: object) -> None:
        super().__init__(0, 2)
        self.returned = returned

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [None, 3], ids=repr)
def test_a_group_that_returns_no_work(returned: object) -> None:
    group = _Unlike(returned)
    if dist.ProcessGroup.size(group) != 2:
        pytest.skip("this torch knows no sizes of such groups")
    with pytest.raises(TypeError, match=r"_Unlike\.broadcast: must return a torch"):
        broadcast_coalesced(group, [torch.ones(2)], 8)


X, FREED = torch.ones(4), torch.ones(4)
FREED.untyped_storage().resize_(0)
RECORDED = torch.ones(3, requires_grad=True)
#: An argument, its wrong value, and the message.
WRONG: dict[type[Exception], list[tuple[str, Any, str]]] = {
    TypeError: [
        ("process_group", 3, "process_group must be a ProcessGroup, got int"),
        ("tensors", X, "tensors must be a list of tensors, got Tensor"),
        ("tensors", 3, "tensors must be a list of tensors, got int"),
        ("tensors", [X, 3], r"tensors\[1\] must be a tensor, got int"),
        ("tensors", [None], r"tensors\[0\] must be a tensor, got None"),
        ("buffer_size", 1e6, "buffer_size must be an int, got float"),
        ("buffer_size", True, "buffer_size must be an int, got bool"),
        ("rank", "0", "rank must be an int, got str"),
        (
            "tensors",
            [X, X.to_sparse()],
            r"tensors\[1\] must be dense \(torch.strided\), got layout torch.sparse_coo",
        ),
        (
            "tensors",
            [X, torch.nested.nested_tensor([X, X[:2]])],
            r"tensors\[1\] must be a dense tensor, got a nested one",
        ),
    ],
    ValueError: [
        (
            "process_group",
            dist.GroupMember.NON_GROUP_MEMBER,
            "not a member of the given process group",
        ),
        ("buffer_size", 0, "buffer_size must be at least 1 byte, got 0"),
        ("buffer_size", -1, "buffer_size must be at least 1 byte, got -1"),
        ("buffer_size", 1 << 64, "buffer_size must be an int of 64 bits"),
        ("rank", 2, "rank must be a rank below 2, got 2"),
        ("rank", -1, "rank must be a rank of the group, got -1"),
        (
            "tensors",
            [X, torch.ones(1).expand(3)],
            r"tensors\[1\] must reach each of its elements once, got sizes \[3\] with strides "
            r"\[0\]; pass tensor.contiguous\(\)",
        ),
        (
            "tensors",
            [torch.ones(1), X[:3], X[2:]],
            r"must share no memory with each other, got tensors\[1\] and tensors\[2\] that overlap",
        ),
        ("tensors", [FREED], r"tensors\[0\] must have a storage of 16 bytes or more"),
        (
            "tensors",
            [torch.ones(3, device="meta")],
            r"tensors\[0\] must have memory, got one on the meta device",
        ),
    ],
    RuntimeError: [
        ("process_group", None, "a process group is needed"),
        (
            "tensors",
            [RECORDED],
            r"tensors\[0\] must not require grad while gradients are recorded, got a leaf tensor "
            r"that does; pass tensor.detach\(\), or call it under torch.no_grad\(\)",
        ),
        ("tensors", [RECORDED * 2], "got a non-leaf tensor that does; pass"),
    ],
}


@pytest.mark.parametrize(
    ("error", "argument", "value", "message"),
    [(error, *wrong) for error, every in WRONG.items() for wrong in every],
)
def test_wrong_arguments(
    error: type[Exception], argument: str, value: object, message: str
) -> None:
    group, version = Alone(2), X._version
    arguments = {"process_group": group, "tensors": [X], "buffer_size": 8, argument: value}
    with pytest.raises(error, match=message):
        broadcast_coalesced(**arguments)
    assert (group.started, X._version) == (0, version)


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_a_quantized_tensor() -> None:
    if not hasattr(torch, "_empty_affine_quantized"):
        pytest.skip("this torch has none")
    tensor = torch._empty_affine_quantized([4], scale=1.0, dtype=torch.qint8)
    with pytest.raises(TypeError, match=r"\[0\] must not be quantized, got dtype torch.qint8"):
        broadcast_coalesced(Alone(2), [tensor], 8)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
        broadcast_coalesced(Alone(2), [tensor], 8)
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must not be an inference tensor outside"):
        broadcast_coalesced(Alone(2), [tensor], 8)


def test_nothing_to_do() -> None:
    group = Alone(2)
    broadcast_coalesced(group, [], 1)
    broadcast_coalesced(group, (torch.ones(0), torch.ones(3, 0)), 1, rank=1)
    assert group.started == 0


# ---- the operator --------------------------------------------------------------------------------

operator = torch.ops.commhook.broadcast_coalesced.default
OPERATOR_DTYPES = (
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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", OPERATOR_DTYPES, ids=lambda dtype: str(dtype)[6:])
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


WRONG_CALLS: dict[str, tuple[Callable[[], Tensor], int, int, type[Exception], str]] = {
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


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_the_fake_validates(what: str) -> None:
    make, buffer_size, rank, error, message = WRONG_CALLS[what]
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

    dtypes = list(OPERATOR_DTYPES)
    if backend == "inductor" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        dtypes.remove(torch.bool)  # with bools, Inductor's kernel ends the process (torch 2.13)
    make = _large if is_large else functools.partial(of_layouts, dtypes)
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
