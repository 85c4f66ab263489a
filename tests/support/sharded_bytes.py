"""The bytes that hooks send on sharded models: counted by simulated groups, and by formulas.

Nothing here asks a codec or a hook for its number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from sharded_models import Layers, by_layer, loss_of
from sharded_models import Mesh as ShardingMesh
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import attach, hooks
from torch_commhook.collectives import all_reduce
from torch_commhook.metrics import HookStats
from torch_commhook.process_group.recording import RecordingProcessGroup
from torch_commhook.process_group.simulated.link import Links
from torch_commhook.step.step_group import StepGroup
from torch_commhook.testing.ranks import run_with_links

INPUTS = 1024  # a multiple of every codec's block
BLOCK, SIGN_BLOCK = 256, 1024
UNEVEN = (24, 64, 48, 7)
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


# ---- sent bytes ----------------------------------------------------------------------------------


class Place(NamedTuple):
    """A mesh: the number of replicas and the number of shards of each; 1 for a missing axis."""

    replicas: int
    shards: int


class Sent(NamedTuple):
    """The bytes that one rank sends in a step: in its shards', its replicas' and other groups.

    ``stats`` are the handle's.
    """

    shards: int
    replicas: int
    others: int
    stats: HookStats


class Even(nn.Module):
    """Two layers without biases; each rank has equally many whole rows of blocks."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, rows, bias=False)
        self.second = nn.Linear(INPUTS, rows, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + self.second(inputs)


def even_rows(place: Place) -> int:
    """Rows of each layer, so that a replica's part of a shard has 8 rows."""
    return 8 * place.replicas * place.shards


def sharding_mesh(place: Place) -> ShardingMesh:
    if place.replicas == 1:
        return ShardingMesh("fsdp", init_device_mesh("cpu", (place.shards,)))
    if place.shards == 1:
        return ShardingMesh("replicate", init_device_mesh("cpu", (place.replicas,)))
    names = ("replicas", "shards")
    return ShardingMesh("hsdp", init_device_mesh("cpu", tuple(place), mesh_dim_names=names))


def groups_of(place: Place, mesh: Any) -> tuple[list[int], list[int]]:
    """The ranks of this rank's shards' group, and of its replicas' group."""
    ranks = mesh.mesh.mesh.reshape(place)
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    return ranks[row].tolist(), ranks[:, column].tolist()


def bytes_over(links: Links, members: list[int] | None = None) -> int:
    """The bytes that this rank has sent in groups of these ranks; in all groups for None."""
    rank = dist.get_rank()
    return sum(
        link.bytes_sent[list(link.members).index(rank)]
        for link in links.all
        if rank in link.members and (members is None or list(link.members) == members)
    )


#: A hook, the policy of mixed precision, and further arguments of ``attach``.
Attachment = tuple[Callable[[], Any], dict[str, Any] | None, dict[str, Any]]


def second_steps(
    place: Place,
    is_even: bool,
    attachments: dict[str, Attachment],
    reshard_after_forward: bool | int = True,
) -> dict[str, list[Sent]]:
    """The bytes that each rank sends in the second step with each of several hooks, in turn."""

    def run(rank: int, links: Links) -> dict[str, Sent]:
        mesh = sharding_mesh(place)
        members = groups_of(place, mesh)
        found: dict[str, Sent] = {}
        models: dict[bool, nn.Module] = {}  # by the use of mixed precision
        for name, (hook, policy, options) in attachments.items():
            model = models.get(policy is not None)
            if model is None:
                model = Even(even_rows(place)) if is_even else Layers(*UNEVEN)
                settings = MixedPrecisionPolicy(**(policy or {}))
                by_layer(
                    model, mesh, mp_policy=settings, reshard_after_forward=reshard_after_forward
                )
                models[policy is not None] = model
            handle = attach(model, hook(), **options)
            inputs = torch.randn(2, INPUTS if is_even else UNEVEN[0])
            sent: list[int] = []
            for _ in range(2):
                before = [bytes_over(links, each) for each in (*members, None)]
                loss_of(model(inputs)).backward()
                after = [bytes_over(links, each) for each in (*members, None)]
                sent = [b - a for a, b in zip(before, after, strict=True)]
            found[name] = Sent(sent[0], sent[1], sent[2] - sent[0] - sent[1], handle.stats())
            handle.remove()
        return found

    ranks = run_with_links(run, place.replicas * place.shards, 0)[0]
    return {name: [each[name] for each in ranks] for name in attachments}


def second_step(place: Place, is_even: bool, hook: Callable[[], Any], **options: Any) -> list[Sent]:
    """The bytes that each rank sends in the second step with a hook."""
    reshard = options.pop("reshard_after_forward", True)
    return second_steps(place, is_even, {"": (hook, None, options)}, reshard)[""]


@contextmanager
def recorded_groups(
    belongs: Callable[[dist.ProcessGroup], bool] = lambda parent: True,
) -> Iterator[dict[dist.ProcessGroup, RecordingProcessGroup]]:
    """Hooks communicate through groups that count, made from those that belong to the count.

    In processes only, because ranks that are threads share the patch. Yields the groups that count
    by the groups inside them.
    """
    recorded: dict[dist.ProcessGroup, RecordingProcessGroup] = {}
    inner = StepGroup.group_for

    def group_for(step_group: StepGroup, device: torch.device) -> dist.ProcessGroup:
        group = inner(step_group, device)
        if not belongs(step_group.parent):
            return group
        if group not in recorded:
            recorded[group] = RecordingProcessGroup(group)
        return recorded[group]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(StepGroup, "group_for", group_for)
        yield recorded


# ---- formulas ------------------------------------------------------------------------------------


def chunks(place: Place, is_even: bool) -> list[list[int]]:
    """Rows, columns, and 1 for a bias, of each layer's shard, including its padding."""
    if is_even:
        return [[even_rows(place) // place.shards, INPUTS, 0]] * 2
    return [[-(-out // place.shards), inputs, 1] for inputs, out in pairwise(UNEVEN)]


def numels(place: Place, is_even: bool) -> list[int]:
    """Elements of a rank's shard of each layer, weight and bias."""
    return [rows * (columns + biases) for rows, columns, biases in chunks(place, is_even)]


def in_blocks(bits: int, block: int, scales: int = 1) -> Callable[[int], int]:
    """Bytes of a message: values, and the scales of each block, each padded to 16 bytes."""
    return lambda numel: 16 * (-(-numel * bits // 128) + -(-4 * scales * -(-numel // block) // 16))


def plain(element: int) -> Callable[[int], int]:
    return lambda numel: element * numel


def eighth(entry: int) -> Callable[[int], int]:
    """Bytes of a message of an eighth of the values, rounded up."""
    return lambda numel: entry * -(-numel // 8)


def of_chunks(numel: int) -> int:
    """Bytes of a message of ``chunk_topk(64)``."""
    found = 0
    for first in range(0, numel, 4096):
        entries = min(64, numel - first)
        found += 4 * (1 + -(-12 * entries // 32) + -(-2 * entries // 32))
    return found


@dataclass(frozen=True)
class Case:
    hook: Callable[[], Any]  # makes it
    message: Callable[[int], int]  # returns the bytes of a message for a number of elements
    policy: dict[str, Any] | None = None  # the policy of mixed precision
    across: str = "two stages"  # the exchange of messages across replicas
    block: int = BLOCK  # elements of a block

    @property
    def gathered(self) -> int:
        """Bytes of an all-gather of a parameter without a codec."""
        return 2 if self.policy else 4


INT8, INT4, INT2 = (in_blocks(bits, BLOCK) for bits in (8, 4, 2))


class OwnHook(hooks.Hook):
    """Sends gradients unchanged, as a user might write it."""

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        group = self.group(bucket)
        return all_reduce(bucket.buffer() / group.size(), group=group)

    def average_shard(self, bucket: Any) -> torch.futures.Future[Tensor]:
        return hooks.allreduce().average_shard(bucket)


CASES: dict[str, Case] = {
    "allreduce": Case(hooks.allreduce, plain(4), across="ring"),
    "allreduce of bfloat16": Case(hooks.allreduce, plain(2), HALF, across="ring"),
    "cast": Case(hooks.cast, plain(2), across="cast"),
    "cast to float16": Case(lambda: hooks.cast(torch.float16), plain(2), across="cast"),
    "int8": Case(hooks.blockwise, INT8),
    "int8 of bfloat16": Case(hooks.blockwise, INT8, HALF),
    "int8, stochastic": Case(lambda: hooks.blockwise(rounding="stochastic"), INT8),
    "int4": Case(lambda: hooks.blockwise(bits=4), INT4),
    "int2": Case(lambda: hooks.blockwise(bits=2), INT2),
    "int4 with feedback": Case(lambda: hooks.error_feedback(hooks.blockwise(bits=4)), INT4),
    "int4 between two numbers": Case(
        lambda: hooks.blockwise(bits=4, symmetric=False), in_blocks(4, BLOCK, scales=2)
    ),
    "fp8": Case(hooks.fp8, INT8),
    "sign": Case(hooks.sign, in_blocks(1, SIGN_BLOCK), block=SIGN_BLOCK),
    "randomk": Case(lambda: hooks.randomk(0.125), eighth(4), across="ring"),
    "int8 after a step": Case(lambda: hooks.after(1, hooks.blockwise()), INT8),
    "a hook of one's own": Case(lambda: OwnHook(), plain(4), across="ring"),
}


def of_cases(cases: dict[str, Case]) -> dict[str, Attachment]:
    return {name: (case.hook, case.policy, {}) for name, case in cases.items()}


def some_long(places: Iterable[Any], fast: Sequence[Any]) -> list[Any]:
    """All places; some of them run only in long tests."""
    return [
        pytest.param(place, marks=[] if place in fast else pytest.mark.long) for place in places
    ]


def named(place: Any) -> str:
    return "{}x{}".format(*place) if isinstance(place, Place) else str(place)


# ---- across replicas -----------------------------------------------------------------------------


def mean_of_a_function(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    group = bucket.process_group()
    return all_reduce(bucket.buffer() / group.size(), group=group)


CASES_ACROSS: dict[str, Case] = {
    **CASES,
    "topk": Case(lambda: hooks.topk(0.125), eighth(8), across="gathered"),
    "topk with feedback": Case(
        lambda: hooks.error_feedback(hooks.topk(0.125)), eighth(8), across="gathered"
    ),
    "allreduce in C++": Case(lambda: hooks.cpp("allreduce"), plain(4), across="ring"),
    "cast in C++": Case(lambda: hooks.cpp("cast", dtype=torch.bfloat16), plain(2), across="ring"),
    # The first step settles the bits: as many as the budget allows.
    "adaptive": Case(lambda: hooks.adaptive(10**9), INT8),
    "adaptive, in 4 bits": Case(lambda: hooks.adaptive(1), INT4),
    "a function": Case(lambda: mean_of_a_function, plain(4), across="ring"),
}

ACROSS = [
    *(Place(replicas, 1) for replicas in range(2, 9)),
    *(Place(*sizes) for sizes in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))),
]
#: Warnings for a growing number of ranks, or for a budget that is too small.
quiet = pytest.mark.filterwarnings("ignore:.* than cast", "ignore:.*4 bits for each value")


def ring(payload: int, ranks: int) -> int:
    """Bytes of an all-reduce: ``2 (W - 1) / W`` of its input."""
    return round(Fraction(2 * payload * (ranks - 1), ranks))


def exchanged(case: Case, numel: int, place: Place, rank: int) -> int:
    """The bytes that a rank sends to average so many elements of its shard across replicas."""
    peers = place.replicas - 1
    if case.across == "gathered":
        return peers * case.message(numel)
    if case.across == "cast" and place.replicas >= 8:  # two stages of equal parts
        return 2 * peers * 2 * -(-numel // place.replicas)
    if case.across in ("ring", "cast"):
        return ring(case.message(numel), place.replicas)
    # Parts end with blocks. The ranks exchange the parts, then the sums, which are padded to the
    # longest one.
    blocks = -(-numel // case.block)
    ends = [
        min(numel, case.block * (blocks * part // place.replicas))
        for part in range(place.replicas + 1)
    ]
    parts = [case.message(b - a) for a, b in pairwise(ends)]
    return sum(parts) - parts[rank // place.shards] + peers * max(parts)


def low_rank(rank: int, place: Place, is_even: bool) -> int:
    """PowerSGD: compresses matrices to at most half as many numbers."""
    total = 0
    for rows, columns, biases in chunks(place, is_even):
        left, right = rank * rows, rank * columns
        if 2 * (left + right) > rows * columns:
            left, right = rows * columns, 0
        total += ring(4 * (left + rows * biases), place.replicas) + ring(4 * right, place.replicas)
    return total
