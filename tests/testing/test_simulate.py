"""Hooks on given gradients: results, bytes and errors."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import completed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from torch_commhook import collectives, hooks
from torch_commhook.metrics import ring_all_reduce_bytes
from torch_commhook.testing import simulate

SHAPES = ((10, 20), (7,), (3, 4, 5))
ELEMENTS = sum(math.prod(shape) for shape in SHAPES)


def gradients(ranks: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        for _ in range(ranks)
    ]


def mean(grads: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack([g.double() for g in each]).mean(0) for each in zip(*grads, strict=True)]


def relative(result: list[Tensor], exact: list[Tensor]) -> float:
    one, other = (torch.cat([t.double().flatten() for t in ts]) for ts in (result, exact))
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("hook", "width", "error"),
    [
        (hooks.allreduce(), 4, 1e-6),
        (hooks.cast(torch.bfloat16), 2, 2e-2),
        (hooks.cast(torch.float16), 2, 2e-3),
        (default_hooks.allreduce_hook, 4, 1e-6),
        (default_hooks.fp16_compress_hook, 2, 2e-3),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_hooks(hook: Any, width: int, error: float, ranks: int) -> None:
    grads = gradients(ranks)
    before = [[g.clone() for g in each] for each in grads]
    found = simulate(hook, grads)
    assert [(g.shape, g.dtype) for g in found.result] == [(g.shape, g.dtype) for g in grads[0]]
    assert found.error == pytest.approx(relative(found.result, mean(grads)), rel=1e-9)
    assert found.error < error
    elements = ELEMENTS
    if isinstance(hook, hooks.cast) and ranks == 8:  # which sends segments of equal lengths
        elements = 8 * math.ceil(ELEMENTS / 8)
    assert found.wire_bytes == ring_all_reduce_bytes(elements * width, ranks)
    assert found.bytes_sent == [found.wire_bytes] * ranks
    assert len(found.results) == ranks
    for own, untouched in zip(grads, before, strict=True):
        assert all(map(torch.equal, own, untouched))


def test_several_dtypes_and_sparse_gradients() -> None:
    grads = [
        [
            torch.full((4,), 1.0 + rank),
            torch.full((2,), 2.0, dtype=torch.float64),
            torch.sparse_coo_tensor([[rank]], [3.0], (3,), check_invariants=True),
            torch.full((3,), 3.0 * rank),
        ]
        for rank in range(2)
    ]
    seen: list[Any] = []

    def hook(state: object, bucket: Any) -> Tensor:
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().dtype))
        group = bucket.process_group()
        return collectives.all_reduce(bucket.buffer() / dist.get_world_size(), group=group).wait()

    found = simulate(hook, grads)
    means = [[1.5] * 4, [2.0] * 2, [1.5, 1.5, 0.0], [1.5] * 3]
    assert [r.to_dense().tolist() for r in found.result] == means
    assert found.error == 0
    buckets = [(0, False, torch.float32), (1, False, torch.float64), (2, True, torch.float32)]
    assert sorted(seen, key=str) == sorted(2 * buckets, key=str)
    assert found.wire_bytes == 7 * 4 + 2 * 8 + (4 + 8)  # with two ranks, what they have


class Rounds:
    """Sends the rest that it has kept of the step before, as error feedback does."""

    def __init__(self) -> None:
        self.rest: Tensor | None = None

    def __call__(self, state: dict[str, int], bucket: Any) -> Any:
        state["calls"] = state.get("calls", 0) + 1
        assert state["calls"] <= 10
        value = bucket.buffer() + (0 if self.rest is None else self.rest)
        sent = value.round()
        self.rest = value - sent
        return dist.all_reduce(sent.div_(2), async_op=True).get_future()


def test_steps_and_what_a_hook_remembers() -> None:
    """Each rank has a hook and a state of its own, which live for one simulation."""
    hook, state = Rounds(), {"calls": 0}
    grads = [[torch.tensor([0.4, 1.0])], [torch.tensor([0.0, 3.0])]]
    results = [simulate(hook, grads, steps=n, state=state).result[0].tolist() for n in (1, 2, 3)]
    assert results == [[0.0, 2.0], [0.5, 2.0], [0.0, 2.0]]
    assert state == {"calls": 0} and hook.rest is None
    assert simulate(hook, grads, steps=10, state=state).wire_bytes == 8


def test_power_sgd() -> None:
    grads = gradients(4)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, warm_start=False)
    first, second = (
        simulate(powerSGD_hook.powerSGD_hook, grads, state=state, steps=n) for n in (2, 3)
    )
    assert first.wire_bytes == ring_all_reduce_bytes(4 * ELEMENTS, 4)
    # A vector for each side of the two matrices, and the vector.
    assert second.wire_bytes == sum(ring_all_reduce_bytes(4 * n, 4) for n in (7, 13, 40))
    assert first.error < 1e-6 < second.error


def test_ranks_that_disagree() -> None:
    def own(state: object, bucket: Any) -> Tensor:
        x = bucket.buffer()
        if dist.get_rank() == 2:
            x[-1] += 1
        return x

    grads = [[torch.ones(2), torch.tensor([math.nan, 1.0])] for _ in range(3)]
    found = simulate(own, grads)
    with pytest.raises(ValueError, match="gradient 1 must be the same on all ranks, but ranks"):
        _ = found.result
    assert [result[1][1].item() for result in found.results] == [1.0, 1.0, 2.0]
    assert math.isnan(found.error) and found.wire_bytes == 0


def test_not_a_number_is_equal_to_itself() -> None:
    found = simulate(hooks.allreduce(), [[torch.tensor([math.nan])]] * 2)
    assert math.isnan(found.result[0].item()) and math.isnan(found.error)


@pytest.mark.parametrize("shape", [(0,), (0, 1), (1, 0, 3), ()])
def test_gradients_of_no_elements(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape) * 2  # whose strides may be other than those of a new tensor
    for grads in ([[x]] * 2, [[x, torch.full((2,), 2.0)]] * 2):
        for hook in (hooks.allreduce(), hooks.blockwise()):
            assert all(map(torch.equal, simulate(hook, grads).result, grads[0]))


def test_errors_of_zero_gradients() -> None:
    zeros = [[torch.zeros(3)] for _ in range(2)]
    assert simulate(hooks.allreduce(), zeros).error == 0
    assert simulate(lambda state, bucket: bucket.buffer() + 1, zeros).error == math.inf


def test_the_error_is_the_largest_of_the_ranks() -> None:
    def own(state: object, bucket: Any) -> Tensor:
        return bucket.buffer()

    found = simulate(own, [[torch.tensor([value])] for value in (0.0, 3.0, 0.0)])
    assert found.error == pytest.approx(2.0)


def test_groups_that_a_hook_makes() -> None:
    def in_pairs(state: object, bucket: Any) -> Tensor:
        pair, _ = dist.new_subgroups(2)
        x = bucket.buffer() / 4
        dist.all_reduce(x, group=pair)
        dist.destroy_process_group(pair)
        dist.all_reduce(x)
        return x / 2

    found = simulate(in_pairs, gradients(4), seed=3)
    assert found.error < 1e-6
    assert found.wire_bytes == 4 * ELEMENTS + 6 * ELEMENTS


def test_hooks_of_other_kinds() -> None:
    def scaled(factor: float, state: object, bucket: Any) -> Any:
        return completed([bucket.buffer() * factor])

    grads = [[torch.ones(3, dtype=torch.complex64)]]
    found = simulate(functools.partial(scaled, 2), grads)
    assert found.result[0].tolist() == [2, 2, 2] and found.error == pytest.approx(1.0)


def test_what_a_hook_raises() -> None:
    def fail(state: object, bucket: Any) -> Tensor:
        dist.barrier()
        raise KeyError("in the hook")

    with pytest.raises(KeyError, match="in the hook"):
        simulate(fail, gradients(3))
    with pytest.raises(TypeError, match=r"must return a torch.futures.Future"):
        simulate(lambda state, bucket: 3, gradients(2))


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((3, [[torch.ones(1)]]), {}, TypeError, "callable"),
        (("blokwise()", [[torch.ones(1)]]), {}, ValueError, "did you mean 'blockwise'"),
        (("none", [[torch.ones(1)]]), {}, ValueError, "simulate: 'none' is not a hook"),
        ((hooks.allreduce(), []), {}, ValueError, r"at least one rank with one gradient, got \[\]"),
        ((hooks.allreduce(), [[]]), {}, ValueError, r"with one gradient, got \[0\] gradients"),
        ((hooks.allreduce(), [[3]]), {}, TypeError, "must hold tensors, got int"),
        (
            (hooks.allreduce(), [[torch.ones(2)], [torch.ones(3)]]),
            {},
            ValueError,
            r"got \['torch.float32 \[2\]'\] on rank 0 and \['torch.float32 \[3\]'\] on rank 1",
        ),
        ((hooks.allreduce(), gradients(1)), {"steps": 0}, ValueError, "steps must be a positive"),
        ((hooks.allreduce(), gradients(1)), {"timeout": 0}, ValueError, "timeout must be a pos"),
        ((hooks.allreduce(), [[torch.ones(1).int()]]), {}, TypeError, "got torch.int32"),
        (
            (hooks.allreduce(), gradients(1)),
            {"state": (i for i in ())},
            TypeError,
            "must be copyable for each rank, got .* with a state of generator",
        ),
    ],
)
def test_wrong_arguments(
    arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        simulate(*arguments, **options)


def test_a_hook_as_text() -> None:
    as_text, as_object = (
        simulate(hook, gradients(2)) for hook in ("blockwise(bits=4)", hooks.blockwise(bits=4))
    )
    assert as_text.wire_bytes == as_object.wire_bytes
    assert as_text.error == as_object.error > 0


def test_a_line() -> None:
    gradients = [[torch.full((1000,), float(rank + 1))] for rank in range(2)]
    done = simulate(hooks.allreduce(), gradients)
    assert str(done) == (
        "2 ranks, 1 gradient of 1,000 elements: a rank sent 4,000 bytes, relative error 0"
    )
    torch.manual_seed(0)
    gradients = [[torch.randn(1000)] for _ in range(2)]
    plain = simulate(hooks.blockwise(bits=2), gradients, steps=8)
    kept = simulate(hooks.error_feedback(hooks.blockwise(bits=2)), gradients, steps=8)
    assert len(plain.errors) == 8 and plain.errors[-1] == plain.error
    assert plain.mean_error == pytest.approx(plain.error)
    assert kept.mean_error < 0.5 * kept.error
    assert str(kept).endswith(
        f"relative error {kept.error:.3g}, {kept.mean_error:.3g} over 8 steps"
    )


def test_a_tensor_is_no_list_of_gradients() -> None:
    with pytest.raises(TypeError, match="got a tensor for a rank"):
        simulate(hooks.allreduce(), [torch.ones(3), torch.ones(3)])  # type: ignore[list-item]
