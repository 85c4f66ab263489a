"""What hooks compute and send, as ``measure`` finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_commhook import codecs, hooks
from torch_commhook.planning import HookError, bucket_sizes, measure

HOOKS = ["allreduce()", "cast()", "blockwise()", "topk(0.01)"]


def test_bytes() -> None:
    found = measure(HOOKS, elements=1_000_000, world_size=2)
    assert [each.hook for each in found] == HOOKS
    sent = [each.bytes_sent for each in found]
    assert sent[:2] == [4_000_000, 2_000_000]
    assert sent[2] == pytest.approx(1_016_000, rel=0.01)
    assert sent[3] == pytest.approx(80_000, rel=0.01)
    assert all(each.compute_seconds >= 0 for each in found)


@pytest.mark.parametrize(("ranks", "bytes_each"), [(7, 24 / 7), (8, 3.5), (64, 3.9375)])
def test_a_cast_sends_its_formula(ranks: int, bytes_each: float) -> None:
    (found,) = measure(["cast()"], elements=20_000, world_size=ranks)
    assert found.bytes_sent / 20_000 == pytest.approx(bytes_each, rel=2e-3)  # and padding


def test_low_rank_factors_are_those_of_matrices_as_models_have_them() -> None:
    (found,) = measure(["powersgd(rank=2)"], elements=480_000, world_size=2)
    # 48 matrices of 100 by 100, whose factors are summed over a ring
    assert found.bytes_sent == 48 * 2 * (100 + 100) * 4


def test_gathered_messages_grow_with_the_ranks() -> None:
    two, eight = (
        measure(["topk(0.01)"], elements=100_000, world_size=ranks)[0] for ranks in (2, 8)
    )
    assert eight.bytes_sent == 7 * two.bytes_sent


def test_hooks_are_planned_as_they_are_in_the_long_run() -> None:
    texts = [
        "after(1000, topk(0.01))",
        "local_sgd(8, hook=after(5, topk(0.01), before=blockwise()))",
        "clip(1.0, topk(0.01))",
        "topk(0.01)",
    ]
    *found, topk = measure(texts, elements=100_000, world_size=2)
    assert [each.bytes_sent / topk.bytes_sent for each in found] == [1.0, 1 / 8, 1.0]
    assert [each.overlaps for each in found] == [True, False, True]


def test_hooks_are_given_as_objects_too() -> None:
    """They are copied, and remember nothing of it."""
    kept = hooks.error_feedback(hooks.topk(0.01))
    (of_object,) = measure([kept], elements=10_000, world_size=2)
    (of_text,) = measure([str(kept)], elements=10_000, world_size=2)
    assert of_object.hook == of_text.hook == str(kept)
    assert of_object.bytes_sent == of_text.bytes_sent


def test_an_object_keeps_its_levels() -> None:
    hook = hooks.hierarchical(codecs.blockwise())
    (found,) = measure([hook], elements=10_000, world_size=4, nodes=2)
    assert len(found.members) == 2
    assert hook.levels == hooks.hierarchical(codecs.blockwise()).levels


def test_a_plain_function_is_a_hook() -> None:
    def mean(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().div_(2)
        future = torch.distributed.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    (found,) = measure([mean], elements=10_000, world_size=2)
    assert found.bytes_sent == 40_000
    assert "mean" in found.hook


def test_plain_ddp_is_an_all_reduce() -> None:
    none, plain = measure(["none", "allreduce()"], elements=10_000, world_size=2)
    assert none.hook == "none"
    assert none.issued == plain.issued
    assert none.is_ddp and not plain.is_ddp


def test_hooks_that_cannot_be_measured() -> None:
    with pytest.raises(TypeError, match="hook must be callable"):
        measure([3], elements=10, world_size=2)  # type: ignore[list-item]

    def fails(state: Any, bucket: Any) -> Any:
        raise OSError("no cable")

    with pytest.raises(HookError, match="can't be planned: OSError: no cable"):
        measure([fails], elements=10, world_size=2)


def test_bucket_sizes() -> None:
    of_mebibyte = 1 << 18
    assert bucket_sizes(1, [25]) == [1]
    assert bucket_sizes(25 * of_mebibyte, [25]) == [25 * of_mebibyte]
    assert bucket_sizes(25 * of_mebibyte + 1, [25]) == [25 * of_mebibyte, 1]
    found = bucket_sizes(60 * of_mebibyte, [1, 25])
    assert [size / of_mebibyte for size in found] == [1, 25, 25, 9]
    assert sum(bucket_sizes(10**12, [1e-3])) == 10**12
