"""Bytes on the wire of sharded models: as groups count them, and the hook, and by the formulas."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from sharded_models import Layers, Mesh, by_layer, loss_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import attach, codecs, hooks
from torch_commhook.process_group.recording import RecordingProcessGroup
from torch_commhook.step.step_group import StepGroup

BLOCK = 256


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Layers(24, 64, 48, 7)


#: Elements of this net's groups of parameters in the shards of so many ranks, with their padding.
def _shards(ranks: int) -> list[int]:
    def rows(number: int) -> int:
        return -(-number // ranks)

    return [rows(out) * (inputs + 1) for inputs, out in ((24, 64), (64, 48), (48, 7))]


def _plain(element_bytes: int) -> Callable[[int], int]:
    return lambda numel: numel * element_bytes


def _blocks(bits: int) -> Callable[[int], int]:
    """A scale for each block; values and scales are filled up to multiples of 16 bytes."""
    return lambda numel: 16 * (-(-numel * bits // 128) + -(-numel // BLOCK // 4))


class _Counting:
    """Has a model's hooks communicate through groups that count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: weakref.WeakKeyDictionary[Any, RecordingProcessGroup]
        self.groups = weakref.WeakKeyDictionary()
        inner = StepGroup.group_for

        def group_for(step_group: StepGroup, device: torch.device) -> dist.ProcessGroup:
            group = inner(step_group, device)
            found = self.groups.get(group)
            if found is None:
                found = self.groups[group] = RecordingProcessGroup(group)
            return found

        monkeypatch.setattr(StepGroup, "group_for", group_for)

    def sent(self) -> dict[str, int]:
        """Bytes by operation since the last time."""
        found: dict[str, int] = {}
        for group in self.groups.values():
            for name, counters in group.counters.items():
                found[name] = found.get(name, 0) + counters.bytes_sent
            group.clear()
        return {name: number for name, number in found.items() if number}


def _step(rank: int, place: str, hook: Any, policy: dict[str, Any], **settings: Any) -> Any:
    """What a step sends, by operation, and the hook's own statistics of it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        counting = _Counting(monkeypatch)
        model = _net()
        by_layer(model, Mesh.of(place), mp_policy=MixedPrecisionPolicy(**policy))
        handle = attach(model, hook, **settings)
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            counting.sent()
            loss_of(model(inputs)).backward()
            sent = counting.sent()
        stats = handle.stats()
        handle.remove()
    return sent, stats.bytes_sent_last_step, stats.bytes_sent, stats.compression_ratio


HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}

#: A hook, a policy of mixed precision, and what a chunk of so many elements takes.
ON_SHARDS: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[int], int], int]] = {
    "allreduce": (hooks.allreduce, {}, _plain(4), 4),
    "allreduce of bfloat16": (hooks.allreduce, HALF, _plain(2), 2),
    "cast": (hooks.cast, {}, _plain(2), 4),
    "int8": (hooks.blockwise, {}, _blocks(8), 4),
    "int8 of bfloat16": (hooks.blockwise, HALF, _blocks(8), 4),
    "int8 with feedback": (lambda: hooks.error_feedback(hooks.blockwise()), {}, _blocks(8), 4),
    "int4": (lambda: hooks.blockwise(bits=4), {}, _blocks(4), 4),
}


def _on_shards(rank: int, place: str, name: str) -> Any:
    hook, policy, _, _ = ON_SHARDS[name]
    return _step(rank, place, hook(), policy)


@pytest.mark.parametrize("name", ON_SHARDS)
@pytest.mark.parametrize("place", ["fsdp-2", "fsdp-3", "fsdp-4"])
def test_reduce_scatters(ranks: RankPool, place: str, name: str) -> None:
    _, policy, bytes_of, _ = ON_SHARDS[name]
    peers = ranks.world_size - 1
    shards = _shards(ranks.world_size)
    gradients = peers * sum(map(bytes_of, shards))
    element = 2 if policy else 4
    # Each layer's parameters are gathered in forward and in backward.
    parameters = 2 * peers * element * sum(shards)
    for sent, last, total, ratio in ranks.run(_on_shards, place, name):
        assert last == gradients
        assert total == 2 * gradients
        assert sum(sent.values()) == gradients + parameters + _agreement(sent)
        assert ratio == pytest.approx(peers * element * sum(shards) / gradients)


def _agreement(sent: dict[str, int]) -> int:
    """That a step has been done: a byte, all-reduced."""
    return sent.get("allreduce", 0)


def _with_weights(rank: int, place: str, name: str) -> Any:
    weights = {"int8": codecs.blockwise(), "int4": codecs.blockwise(bits=4)}[name]
    return _step(rank, place, hooks.blockwise(), {}, weights=weights)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("place", ["fsdp-2", "fsdp-3"])
def test_weights(ranks: RankPool, place: str, name: str) -> None:
    peers = ranks.world_size - 1
    shards = _shards(ranks.world_size)
    gradients = peers * sum(map(_blocks(8), shards))
    parameters = 2 * peers * sum(map(_blocks(int(name[-1])), shards))
    for sent, last, _, _ in ranks.run(_with_weights, place, name):
        assert last == gradients
        assert sum(sent.values()) == gradients + parameters + _agreement(sent)


def _across_replicas(rank: int, name: str) -> Any:
    hook = {"allreduce": hooks.allreduce, "int8": hooks.blockwise}[name]()
    return _step(rank, "hsdp-4", hook, {})


@pytest.mark.parametrize("name", ["allreduce", "int8"])
@pytest.mark.parametrize("place", ["hsdp-4"])
def test_all_reduces(ranks: RankPool, place: str, name: str) -> None:
    shards = _shards(2)
    whole = 4 * sum(shards)  # to the one other replica
    half = 2 * sum(_blocks(8)(numel // 2) for numel in shards)
    for _, last, total, ratio in ranks.run(_across_replicas, name):
        if name == "allreduce":
            assert last == whole and ratio == pytest.approx(1)
        else:  # halves end at blocks' ends
            assert half <= last <= half + len(shards) * (BLOCK + 4)
        assert total == 2 * last
