"""Random histories of a training whose ranks come and go, in virtual time.

What decides is the library's own code: ``Membership``, ``ElasticRanks``, ``ElasticTraining``,
``StepGroup``'s failures, ``RepeatableStep``, and how ``Reducer`` goes on after a failure. Doubles
stand for what they decide about: the store, signs of life, ports, connections, and the hook with its
buckets. The hook quantizes with error feedback, in two exchanges as a reduce-scatter and an
all-gather. The end of a step is an exchange of flags, as ``StepEnd`` makes one.

:func:`run_history` draws faults by a seed, lets the ranks train, and checks what they have done.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from virtual_world import Endpoint, Killed, Process, World, WorldStore

from torch_commhook.attachment import elastic as attachment_module
from torch_commhook.attachment.elastic import ElasticTraining
from torch_commhook.elastic import ranks as ranks_module
from torch_commhook.elastic import transfer as transfer_module
from torch_commhook.elastic.membership import LeftOutError, Membership, TooFewRanksError, View
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.elastic.settings import Elastic
from torch_commhook.elastic.signs import _SIGNS
from torch_commhook.reducer import repeatable_step as repeatable_module
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.reducer.repeatable_step import RepeatableStep
from torch_commhook.step import step_group as step_group_module
from torch_commhook.step.rendezvous import Reason, Rendezvous
from torch_commhook.step.step_group import PeerError, StepGroup

GRACE = 1.0
TIMEOUT = 8.0
#: A history that takes longer, in virtual seconds, hangs.
LONGEST = 90.0
#: Where a process may end, and what happens there.
POINTS = {
    "connect": "while it connects",
    "bucket": "while it sends a bucket",
    "results": "while it sends results",
    "used": "while it sends what it has used",
    "buffers": "while it sends buffers",
    "end": "while it ends a step",
    "append": "while it says that it is here",
    "compare_set": "while it writes a view",
    "give": "while it sends its state",
    "apply": "while it writes gradients",
    "between": "between two steps",
}
_ELEMENTS = 5


class StepError(RuntimeError):
    """A rank's own hook has failed."""


# ---- doubles -------------------------------------------------------------------------------------


class Signs:
    """As ``SignsOfLife`` and ``StoreSigns`` count signs of life."""

    def __init__(self, world: World, store: WorldStore, own: int, silent_after: float) -> None:
        self._world = world
        self._process = world.process
        self._prefix = store._prefix
        self._own = own
        self._silent_after = silent_after
        self._interval = silent_after / _SIGNS
        self._seen: dict[str, list[float]] = {"wanted": []}
        self._answered = world.now
        self._has_stopped = False
        self.looks: Callable[[], None] | None = None
        world.after(world.random.random() * 0.01, self._tick)

    def _tick(self) -> None:
        process, world = self._process, self._world
        if self._has_stopped or process.is_dead:
            return
        world.after(self._interval, self._tick)
        if process.is_stopped or world.has_no_store(process.host):
            return
        self._number(f"alive/{self._own}", 1)
        since = min(world.now - self._answered, 2 * self._interval)
        self._answered = world.now
        for key, seen in self._seen.items():
            number = self._number(key, 0)
            is_new = not seen or seen[0] != number
            seen[:] = [number, 0.0 if is_new else seen[1] + since]
        if self.looks is not None and any(
            seen and seen[1] > self._silent_after
            for key, seen in self._seen.items()
            if key != "wanted"
        ):
            self.looks()

    def _number(self, key: str, amount: int) -> int:
        values = self._world.values
        number = int(values.get(self._prefix + key, b"0")) + amount
        values[self._prefix + key] = str(number).encode()
        return number

    def watch(self, ranks: Collection[int]) -> None:
        keys = ["wanted", *(f"alive/{rank}" for rank in ranks)]
        self._seen = {key: self._seen.get(key, []) for key in keys}

    def silent(self, ranks: Collection[int]) -> set[int]:
        for rank in ranks:
            self._seen.setdefault(f"alive/{rank}", [])
        seen = {rank: self._seen[f"alive/{rank}"] for rank in ranks}
        return {rank for rank, each in seen.items() if each and each[1] > self._silent_after}

    def wanted(self) -> int:
        return int(self._seen["wanted"][0]) if self._seen["wanted"] else 0

    def stop(self) -> None:
        self._has_stopped = True


class Door:
    """As ``Door`` finds who can be reached."""

    def __init__(self, world: World, doors: dict[int, Process], own: int, timeout: float) -> None:
        self._world = world
        self._doors = doors
        self._own = own
        self._timeout = timeout
        doors[own] = world.process

    def unreachable(self, ranks: Collection[int]) -> frozenset[int]:
        if not self._answering(ranks) >= set(ranks):
            self._world.sleep(self._timeout)
        return frozenset(ranks) - self._answering(ranks)

    def _answering(self, ranks: Collection[int]) -> set[int]:
        own = self._world.process.host
        return {
            rank
            for rank in ranks
            if rank in self._doors
            and not self._doors[rank].is_dead
            and not self._world.are_apart(own, self._doors[rank].host)
        }

    def close(self) -> None:
        self._doors.pop(self._own, None)


class Event:
    """A thread that waits for it looks after signs of life, and is woken where one is missing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._must_look = False
        self._process: Process | None = None

    def set(self) -> None:
        self._is_set = True
        if self._process is not None:
            self._process.notify()

    def is_set(self) -> bool:
        return self._is_set

    def look(self) -> None:
        self._must_look = True
        if self._process is not None:
            self._process.notify()

    def wait(self, seconds: float) -> bool:
        self._must_look = False
        self._process = self._world.process
        self._world.wait_until(lambda: self._is_set or self._must_look, 1e9)
        return self._is_set


class Base:
    """The group of which a StepGroup is made."""

    def __init__(self, store: WorldStore, rank: int, members: Sequence[int]) -> None:
        self.store = store
        self.own_rank = rank
        self.members = tuple(members)

    def rendezvous(self) -> StoreRendezvous:
        return StoreRendezvous(self.store.under("commhook0"), self.own_rank, len(self.members))


class StoreRendezvous(Rendezvous):
    """Reasons of failures, in a store of virtual time."""

    def __init__(self, store: WorldStore, rank: int, size: int) -> None:
        self.store: Any = store
        self.epoch = 1
        self._rank = rank
        self._size = size


class ConnectedDouble:
    """Stands for a ConnectedGroup."""

    def __init__(self, group: Endpoint) -> None:
        self.group = group

    def cut(self) -> None:
        self.group.close()


class Work:
    """Of a message to or from another rank."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def wait(self) -> None:
        self._wait()


class Group(Endpoint):
    """The connections as hooks and :mod:`transfer` use them, by ranks."""

    def send_tensor(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        self.world.point("give")
        self.send(self.members[rank], ("tensor", tag), tensors[0].clone())
        self.world.sleep(self.world.random.random() * 0.004)  # until it is taken
        return Work(self.process.check)

    def receive_tensor(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        def wait() -> None:
            tensors[0].copy_(self.receive(self.members[rank], ("tensor", tag)))

        return Work(wait)


class Transferred:
    """A Group with the names that :mod:`transfer` calls."""

    def __init__(self, group: Group) -> None:
        self.send = group.send_tensor
        self.recv = group.receive_tensor


class Flags:
    """As ``StepEnd`` agrees."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def any_rank(self, flag: bool = True) -> bool:
        return any(self._group.exchange("end", flag))


class VirtualStepGroup(StepGroup):
    """A StepGroup over connections of virtual time. It fails as the real one does."""

    def __init__(self, base: Base, *, meets_again: bool, connect_within: Any) -> None:
        world = _world()
        self.parent: Any = base
        self._meets_again = meets_again
        self.size, self.rank = len(base.members), base.own_rank
        self.timeout = SimpleNamespace(total_seconds=lambda: TIMEOUT)  # type: ignore[assignment]
        self._open = self._broken = self.in_background = False
        self._step_end = None
        self._ranks = list(base.members)
        self._rendezvous = base.rendezvous() if self.size > 1 else None
        self._agrees = self.shares_used = self.size > 1
        self._outside = set()  # type: ignore[assignment]
        own = base.members[base.own_rank]
        name = base.store._prefix
        self.group: Any = Group(world, name, own, base.members, TIMEOUT)
        self._own = [ConnectedDouble(self.group)]  # type: ignore[list-item]
        self._end = self.group.close
        if self.size > 1:
            self.group.connect(connect_within.total_seconds())

    def begin(self) -> None:
        if self._open:
            self.fail("backward() was left by an exception")
        self.connect()
        self._open = self.size > 1

    def _others(self) -> list[StepGroup]:
        return []

    def _end_of_step(self) -> Any:
        return Flags(self.group)


def _world() -> World:
    return _runs[-1].world


def _tell_unreachable(base: Base, error: BaseException) -> None:
    base.rendezvous().tell(Reason(f"since ranks could not connect: {error}", None, False))


def _begin_maximum(group: Group, own: Tensor) -> Callable[[], Tensor]:
    values = [own] * group.size()
    tag = group.begin_exchange("used", values)
    return lambda: torch.stack(group.end_exchange(tag, values)).amax(0)


def _broadcast(tensor: Tensor, *, src: int, group: Group) -> Work:
    values = [tensor] * group.size()
    tag = group.begin_exchange("buffers", values)
    return SimpleNamespace(wait=lambda: group.end_exchange(tag, values)[src])  # type: ignore


# ---- a rank --------------------------------------------------------------------------------------


class Memory:
    """The hook's: an error for each bucket, of this rank alone."""

    remembers_nothing = True

    def __init__(self, buckets: int) -> None:
        self.errors = [torch.zeros(_ELEMENTS) for _ in range(buckets)]
        self.steps = 0
        self.size = 0

    def changing_tensors(self) -> Iterator[Tensor]:
        yield from self.errors

    def change_ranks(self, rank: int, size: int) -> None:
        for error in self.errors:
            error.mul_(size / (self.size or size))
        self.size = size

    def count_step(self) -> None:
        self.steps += 1


class AttachedDouble:
    """The hook on a rank."""

    def __init__(self, buckets: int) -> None:
        self.memory = Memory(buckets)
        self.group: Any = None

    def use_group(self, group: StepGroup, device: object) -> None:
        """Connect as a second group would."""
        self.group = group
        if group.size > 1:
            group.group.exchange("connect", None)


@dataclass
class Bucket:
    """A bucket that is full."""

    index: int
    gradient: Tensor
    pending: int = 0


@dataclass
class Started:
    """A bucket whose first exchange has begun."""

    bucket: Bucket
    values: list[Any]
    tag: object
    call: Any = field(default_factory=lambda: SimpleNamespace(traffic=None))


class VirtualStep(RepeatableStep):
    """The real step, with a hook over connections of virtual time."""

    def __init__(self, trainer: Trainer, group: Any, gradients: list[Tensor]) -> None:
        self.attached: Any = trainer.attached
        self.agreement = self._group = group
        self.has_begun = False
        self.trainer = trainer
        self._buckets: Any = [Bucket(index, gradient) for index, gradient in enumerate(gradients)]
        self._use: Any = self
        self._next = 0
        self._starting = False
        self._started: Any = []
        self._averaged = []
        self.survives_with(trainer.training)

    def locally_used(self, buckets: object, agreement: object) -> Tensor:
        return self.trainer.used

    def _start(self, state: Any, gradients: list[Tensor] | None = None) -> None:
        self._next += 1
        self.trainer.fail_where_planned()
        size, own = self._group.size, self._group.group.own
        error = self.attached.memory.errors[state.index]
        wanted = state.gradient + error
        sent = (wanted * 4).round() / 4
        error.copy_(wanted - sent)
        values = [(sent[rank::size].clone(), frozenset([own])) for rank in range(size)]
        tag = self._group.group.begin_exchange("bucket", values)
        self._started.append(Started(state, values, tag))

    def _results(self) -> Any:
        late = []
        group = self._group.group
        for started in self._started:
            shards = group.end_exchange(started.tag, started.values)
            total = torch.stack([shard for shard, _ in shards]).sum(0) / group.size()
            senders = frozenset().union(*(who for _, who in shards))
            result = torch.empty(_ELEMENTS)
            for rank, (mean, theirs) in enumerate(group.exchange("results", (total, senders))):
                result[rank :: group.size()] = mean
                senders |= theirs
            late.append((started.bucket, (result, senders)))
        return late

    def _apply(self, late: Any, used: Tensor, traffic: Any) -> None:
        self.attached.memory.count_step()
        for bucket, (result, senders) in late:
            _world().point("apply")
            self.trainer.written[bucket.index] = result, senders, bool(used[bucket.index])

    def drain(self, error: BaseException) -> None:
        """Closed connections end all exchanges at once."""

    def run_post_accumulate_hooks(self) -> None:
        """There are none."""


class VirtualReducer:
    """Begins, ends and repeats steps as the real one does."""

    _begin_step = Reducer._begin_step
    _finish = Reducer._finish
    _go_on = Reducer._go_on
    _let_in = Reducer._let_in
    go_on_between_steps = Reducer.go_on_between_steps
    _use_group = Reducer._use_group

    def __init__(self, attached: AttachedDouble, survivors: ElasticTraining) -> None:
        self._attached = attached
        self.survivors = survivors
        self.group = survivors.group
        self.device = torch.device("cpu")
        self._buckets = SimpleNamespace(prepare_memory=lambda attached: None)

    def _on_step(self, begins: bool) -> None:
        """Nothing looks at it."""

    def _agree_on_order(self, attached: object) -> None:
        """The order of buckets stays, as with elastic."""

    def _reset(self) -> None:
        """A step is an object of its own."""

    def _step_ended(self) -> None:
        """A step is an object of its own."""


class Model(nn.Module):
    """A parameter for each bucket, and a buffer that each rank changes for itself."""

    def __init__(self, seed: int, buckets: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index in range(buckets):
            first = torch.randn(_ELEMENTS, generator=generator)
            self.register_parameter(f"weight{index}", nn.Parameter(first))
        self.register_buffer("statistic", torch.zeros(3))


class Optimizer:
    """Momentum, and a count of steps."""

    def __init__(self, buckets: int) -> None:
        self.momentum = [torch.zeros(_ELEMENTS) for _ in range(buckets)]
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum, self.count = state["momentum"], state["count"]


@dataclass
class Counted:
    """A step that a rank has counted.

    Attributes:
        step: its number.
        digest: of parameters, buffers and the optimizer's state after it.
        senders: whose gradients are in it.
        count: of the optimizer.
    """

    step: int
    digest: str
    senders: frozenset[int]
    count: int


class Trainer:
    """The program of a rank.

    Attributes:
        own: its number in the training; None before it has one.
        counted: the steps that it has counted.
        said: how it ended; None while it runs.
        written: the gradients that the step has written.
        repeated: how often it has repeated a step.
    """

    def __init__(self, run: Run, process: Process, plan: Plan) -> None:
        self.run = run
        self.process = process
        self.plan = plan
        self.own: int | None = None
        self.counted: list[Counted] = []
        self.said: BaseException | str | None = None
        self.written: dict[int, tuple[Tensor, frozenset[int], bool]] = {}
        self.used = torch.ones(run.plan.buckets, dtype=torch.uint8)
        self.repeated = 0
        self._random = random.Random(f"{run.seed} {process.number}")
        self._fails = False

    def main(self) -> None:
        """Train to the end; note how that ended."""
        try:
            self.train()
            self.said = "done"
        except Killed:
            self.said = "killed"
            raise
        except Exception as error:
            self.said = error
        for leave in list(self.process.exits):
            leave()
        self.process.end()

    def train(self) -> None:
        world, plan = self.run.world, self.run.plan
        self.model = Model(self.process.number, plan.buckets)
        self.optimizer = Optimizer(plan.buckets)
        self.attached = AttachedDouble(plan.buckets)
        settings = Elastic(
            min_ranks=plan.min_ranks,
            grace=GRACE,
            state=[self.optimizer],
            store="virtual:1",
            ranks=plan.ranks if plan.knows_ranks else None,
            timeout=TIMEOUT,
        )
        attached: Any = self.attached
        named = list(self.model.named_parameters())
        self.training = training = ElasticTraining(
            self.model, attached, settings, named, {}, broadcast_buffers=True
        )
        self.ranks = ranks = training.ranks
        self.own = ranks.membership.own
        reducer: Any = VirtualReducer(self.attached, training)
        try:
            reducer.go_on_between_steps()
            training.begin(reducer)
        except BaseException:
            training.leave()
            raise
        while ranks.steps < plan.steps:
            world.point("between")
            training.give_state()
            self._fails = self.plan.raises_at == ranks.steps + 1
            if self.plan.leaves_at == ranks.steps + 1:
                break
            self.one_step(reducer)
        training.leave()

    def one_step(self, reducer: Any) -> None:
        world, chance, buckets = self.run.world, self._random, self.run.plan.buckets
        with torch.no_grad():
            self.model.statistic += chance.random()
        self.used = torch.tensor(
            [chance.random() < 0.8 for _ in range(buckets)], dtype=torch.uint8
        )
        gradients = [
            torch.tensor([chance.gauss(0, 1) for _ in range(_ELEMENTS)]) for _ in range(buckets)
        ]
        world.sleep(0.02 * (0.5 + chance.random()) * self.plan.slowness)
        step = VirtualStep(self, reducer.group, gradients)
        reducer._begin_step(step)
        step.start_full()
        world.sleep(0.01 * chance.random() * self.plan.slowness)
        reducer._finish(step)
        self.optimize()
        digest = hashlib.sha256()
        for tensor in (*self.model.state_dict().values(), *self.optimizer.momentum):
            digest.update(tensor.numpy().tobytes())
        (senders,) = {senders for _, senders, _ in self.written.values()}
        self.counted.append(
            Counted(self.ranks.steps, digest.hexdigest(), senders, self.optimizer.count)
        )

    @torch.no_grad()
    def optimize(self) -> None:
        self.optimizer.count += 1
        for index, parameter in enumerate(self.model.parameters()):
            result, _, is_used = self.written[index]
            if is_used:
                self.optimizer.momentum[index] = self.optimizer.momentum[index] * 0.9 + result
                parameter -= 0.1 * self.optimizer.momentum[index]

    def fail_where_planned(self) -> None:
        if self._fails:
            raise StepError("the hook fails")


# ---- a history -----------------------------------------------------------------------------------


@dataclass
class Plan:
    """What happens to a process.

    Attributes:
        slowness: how much longer it computes.
        raises_at: the step in which its hook raises.
        leaves_at: the step before which it leaves.
        is_touched: whether a fault may end its part in the training.
    """

    slowness: float = 1.0
    raises_at: int | None = None
    leaves_at: int | None = None
    is_touched: bool = False


@dataclass
class HistoryPlan:
    """What a history is: drawn by its seed.

    Attributes:
        ranks: how many begin.
        knows_ranks: whether they know how many.
        steps: of the training.
        buckets: of the hook.
    """

    ranks: int
    knows_ranks: bool
    min_ranks: int
    steps: int
    buckets: int


@dataclass
class History:
    """What has come of a history.

    Attributes:
        seed: of the history.
        problems: what must not be; empty where all is well.
        faults: how often each kind has happened.
        views: how many the ranks have agreed on.
        steps: that ranks have counted, over all ranks.
        repeated: steps, over all ranks.
        ended: how processes have ended, by kind.
        reached_end: whether a rank has trained to the end.
        seconds: of virtual time.
    """

    seed: int
    problems: list[str]
    faults: Counter[str]
    views: int
    steps: int
    repeated: int
    ended: Counter[str]
    reached_end: bool
    seconds: float


_runs: list[Run] = []


class Run:
    """A history under way."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(f"plan {seed}")
        self.world = World(seed)
        self.store = WorldStore(self.world)
        self.doors: dict[int, Process] = {}
        self._started: dict[int, Trainer] = {}
        self.views: list[View] = []
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.splits = False
        self._armed: list[dict[str, Any]] = []
        self._restarts = 2
        self.world.written = self._written
        self.world.reach = self._reached
        self.plan = self._drawn()

    # ---- faults ------------------------------------------------------------------------------

    def _drawn(self) -> HistoryPlan:
        chance = self.chance
        ranks = chance.randint(2, 6)
        plan = HistoryPlan(
            ranks,
            knows_ranks=chance.random() < 0.7,
            min_ranks=chance.randint(1, max(1, ranks - 1)),
            steps=chance.randint(4, 8),
            buckets=chance.choice([1, 1, 2]),
        )
        plans = [Plan() for _ in range(ranks)]
        for number, each in enumerate(plans):
            if chance.random() < 0.1:
                each.slowness = chance.choice([3.0, 10.0])
                self.faults["a slow rank"] += 1
            self.world.after(0.05 * chance.random(), partial(self._start, number, number, each))
        self.world.live = self._numbers = ranks
        self._plans = plans
        self._length = 0.05 * plan.steps + 0.3
        for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4])):
            kind = chance.choice([*_KINDS, *["ends at a point"] * 4, "ends", "stops", "joins"])
            _KINDS[kind](self)
        return plan

    def _victim(self) -> int:
        number = self.chance.randrange(len(self._plans))
        self._plans[number].is_touched = True
        return number

    def _sometime(self) -> float:
        return self.chance.random() * self._length

    def _do(self, number: int, fault: str, act: Callable[[Process], object]) -> None:
        """Let something happen to a process at some time, if it is still there."""

        def happen() -> None:
            trainer = self._started.get(number)
            if trainer is not None and not trainer.process.is_dead:
                self.faults[fault] += 1
                act(trainer.process)

        self.world.after(self._sometime(), happen)

    def _ends(self) -> None:
        self._do(self._victim(), "a process ends", self._end)

    def _vanishes(self) -> None:
        end = partial(self._end, silently=True)
        self._do(self._victim(), "a host vanishes", end)

    def _stops(self) -> None:
        seconds = self.chance.choice([0.1, 0.4, 0.7, 1.0, 2.0, 5.0])
        self._do(self._victim(), "a process is stopped", lambda process: process.stop(seconds))

    def _ends_at_a_point(self) -> None:
        point = self.chance.choice(list(POINTS))
        number = self._victim()
        most = 4 if point in ("compare_set", "give", "connect") else 30
        self._armed.append(
            {
                "point": point,
                "number": None if point in ("compare_set", "give") else number,
                "left": self.chance.randrange(most),
                "stops": self.chance.random() < 0.25,
            }
        )
        if self._armed[-1]["number"] is None:
            for plan in self._plans:
                plan.is_touched = True

    def _reached(self, process: Process, point: str) -> None:
        for armed in self._armed:
            if armed["point"] == point and armed["number"] in (None, process.number):
                if armed["left"]:
                    armed["left"] -= 1
                    continue
                self._armed.remove(armed)
                if armed["stops"]:
                    self.faults[f"a process is stopped {POINTS[point]}"] += 1
                    process.stop(self.chance.choice([0.3, 0.7, 2.0]))
                else:
                    self.faults[f"a process ends {POINTS[point]}"] += 1
                    self._end(process)
                return

    def _end(self, process: Process, *, silently: bool = False) -> None:
        process.end(silently=silently)
        if self._restarts and self.chance.random() < 0.5:
            self._restarts -= 1
            self.faults["a rank starts anew"] += 1
            self._comes(0.02 + self.chance.random(), process.host)

    def _splits(self) -> None:
        self._split(False)

    def _cuts_off(self) -> None:
        self._split(True)

    def _split(self, with_store: bool) -> None:
        chance = self.chance
        hosts = list(range(len(self._plans)))
        side = chance.sample(hosts, chance.randint(1, len(hosts) - 1))
        others = [host for host in hosts if host not in side]
        seconds = chance.choice([0.1, 0.5, 1.0, 2.0, 4.0])
        self.splits = True

        def happen() -> None:
            self.world.split(side, others, seconds)
            if with_store:
                self.world.cut_off_from_store(side, seconds)
            cut_off = "hosts are cut off, and from the store"
            self.faults[cut_off if with_store else "the network splits"] += 1

        self.world.after(self._sometime(), happen)

    def _joins(self) -> None:
        self.faults["a rank joins"] += 1
        self._comes(self._sometime(), len(self._plans))

    def _leaves(self) -> None:
        self._plans[self._victim()].leaves_at = self.chance.randint(1, 5)
        self.faults["a rank leaves"] += 1

    def _raises(self) -> None:
        self._plans[self._victim()].raises_at = self.chance.randint(1, 5)
        self.faults["a hook raises"] += 1

    def _comes(self, seconds: float, host: int) -> None:
        self.world.live += 1
        number, self._numbers = self._numbers, self._numbers + 1
        plan = Plan(is_touched=True)
        self.world.after(seconds, lambda: self._start(number, host, plan))

    def _start(self, number: int, host: int, plan: Plan) -> None:
        process = Process(self.world, number, host)
        self.world.processes.append(process)
        trainer = self._started[number] = Trainer(self, process, plan)
        process.start(trainer.main)

    @property
    def trainers(self) -> list[Trainer]:
        """Those of all processes that have started."""
        return list(self._started.values())

    # ---- running -----------------------------------------------------------------------------

    def _written(self, key: str, value: bytes) -> None:
        if key.endswith("/view"):
            self.views.append(View.from_text(value.decode()))

    def history(self) -> History:
        """Let it happen, and check it."""
        self.world.run(LONGEST)
        if self.world.failure is not None:
            raise self.world.failure
        for trainer in self.trainers:
            trainer.said = trainer.said or "killed"
        self.problems += _problems(self)
        ended = Counter(
            each.said if isinstance(each.said, str) else type(each.said).__name__
            for each in self.trainers
        )
        return History(
            self.seed,
            self.problems,
            self.faults,
            len(self.views),
            sum(len(each.counted) for each in self.trainers),
            sum(each.repeated for each in self.trainers),
            ended,
            any(
                each.counted and each.counted[-1].step == self.plan.steps
                for each in self.trainers
            ),
            self.world.now,
        )


_KINDS: dict[str, Callable[[Run], None]] = {
    "ends": Run._ends,
    "vanishes": Run._vanishes,
    "stops": Run._stops,
    "ends at a point": Run._ends_at_a_point,
    "splits": Run._splits,
    "is cut off": Run._cuts_off,
    "joins": Run._joins,
    "leaves": Run._leaves,
    "raises": Run._raises,
}


# ---- what is to hold -----------------------------------------------------------------------------


def _problems(run: Run) -> Iterator[str]:
    """What must not be, in words."""
    yield from _hangs(run)
    yield from _strange_errors(run)
    yield from _order_of_views(run.views)
    for trainer in run.trainers:
        yield from _own_steps(trainer)
    for views in _trainings(run.views):
        yield from _steps_of_training(run, views)
    yield from _end(run)


def _hangs(run: Run) -> Iterator[str]:
    if run.world.now >= LONGEST:
        yield f"it has not ended after {LONGEST:g} s"


_DOCUMENTED = (LeftOutError, TooFewRanksError, PeerError, StepError)


def _strange_errors(run: Run) -> Iterator[str]:
    for trainer in run.trainers:
        said = trainer.said
        if not isinstance(said, BaseException) or isinstance(said, _DOCUMENTED):
            if isinstance(said, LeftOutError) and "no results" in str(said):
                yield f"process {trainer.process.number}: {said}"
            continue
        if "store: no answer" not in str(said) or not run.faults[
            "hosts are cut off, and from the store"
        ]:
            yield f"process {trainer.process.number}: {type(said).__name__}: {said}"


def _order_of_views(views: Sequence[View]) -> Iterator[str]:
    for number, view in enumerate(views, 1):
        if view.number != number:
            yield f"view {view.number} is the {number}th"
        if len(set(view.members)) != len(view.members) or not view.trained:
            yield f"{view} has a member twice, or nobody that has trained"
    for before, after in zip(views, views[1:], strict=False):
        again = set(after.members) - set(before.members) - set(after.new)
        if again and after.steps:
            yield f"{sorted(again)} are in {after} as if they had trained in {before}"


def _own_steps(trainer: Trainer) -> Iterator[str]:
    number = trainer.process.number
    steps = [each.step for each in trainer.counted]
    if steps != list(range(steps[0], steps[0] + len(steps))) if steps else False:
        yield f"process {number} has counted the steps {steps}"
    for each in trainer.counted:
        if each.count != each.step:
            yield f"process {number}: its optimizer has done {each.count} of {each.step} steps"
            return


def _trainings(views: Sequence[View]) -> list[list[View]]:
    """The views of each training: one that begins anew has no member of the last one."""
    found: list[list[View]] = []
    for view in views:
        if not found or not set(view.members) & set(found[-1][-1].members):
            found.append([])
        found[-1].append(view)
    return found


def _steps_of_training(run: Run, views: list[View]) -> Iterator[str]:
    """The steps of a training: each has one result, among the members of one view."""
    by_own = {each.own: each for each in run.trainers}
    # The view with which each rank's part has ended.
    last = {own: view for view in views for own in view.members}
    results: dict[int, dict[tuple[str, frozenset[int]], list[int]]] = {}
    for own, view in last.items():
        if own not in by_own:  # it ended before it knew its number
            continue
        after = views[view.number - views[0].number + 1 :][:1]
        is_done = by_own[own].said == "done"
        for each in by_own[own].counted:
            # A lost rank may count one step that the others then repeat.
            if after and not is_done and each.step == after[0].steps + 1:
                continue
            if after and each.step > after[0].steps + 1:
                yield f"rank {own} has counted step {each.step} after {after[0]} without it"
            key = each.digest, each.senders
            results.setdefault(each.step, {}).setdefault(key, []).append(own)
    for step, found in sorted(results.items()):
        if len(found) > 1:
            who = sorted(found.values())
            yield f"step {step} has {len(found)} results: of ranks {who}"
            return
        ((_, senders),) = found
        of_step = [view for view in views if set(view.members) == senders and view.steps < step]
        if not of_step:
            yield f"step {step} has the gradients of {sorted(senders)}, which are no view"
        elif any(v.number > of_step[-1].number and v.steps < step for v in views):
            yield f"step {step} has the gradients of {sorted(senders)}, which were a view before"
    if results and sorted(results) != list(range(1, max(results) + 1)):
        yield f"the steps {sorted(results)} have been counted"


def _end(run: Run) -> Iterator[str]:
    """Ranks that nothing has happened to train to the end, where they are enough."""
    untouched = [each for each in run.trainers if not each.plan.is_touched]
    enough = 2 * len(untouched) > len(run.trainers) and len(untouched) >= run.plan.min_ranks
    if run.splits or not enough:
        return
    for each in untouched:
        if each.said != "done" or len(each.counted) != run.plan.steps:
            yield (
                f"process {each.process.number}, to which nothing has happened, has counted "
                f"{len(each.counted)} of {run.plan.steps} steps: {each.said}"
            )


# ---- in virtual time -----------------------------------------------------------------------------


class _Thread:
    """A thread of the process that starts it."""

    def __init__(self, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._target = target

    def start(self) -> None:
        _world().process.start(self._target)


def _event() -> Event:
    return Event(_world())


def _signs(store: WorldStore, own: int, silent_after: float) -> Signs:
    return Signs(_world(), store, own, silent_after)


def _door(store: WorldStore, own: int, timeout: float) -> Door:
    return Door(_world(), _runs[-1].doors, own, timeout)


def _membership(*args: Any, **options: Any) -> Membership:
    world = _world()
    return Membership(*args, now=lambda: world.now, sleep=world.sleep, **options)


def _make_group(
    store: WorldStore, rank: int, members: Sequence[int], *args: object, **options: object
) -> Base:
    return Base(store, rank, members)


def _close_connections(*groups: Group) -> None:
    for group in groups:
        group.close()


def _watch(ranks: ElasticRanks) -> None:
    """As the real one; has its signs wake the thread that looks after them."""
    signs: Any = ranks._signs
    if signs is not None:
        signs.looks = ranks._stopped.look  # type: ignore[attr-defined]
        signs.watch(ranks._others())


def _send(data: Tensor, group: Group, rank: int) -> None:
    _real_send(data, Transferred(group), rank)  # type: ignore[arg-type]


def _receive(group: Group, rank: int) -> Tensor:
    return _real_receive(Transferred(group), rank)  # type: ignore[arg-type]


_real_send, _real_receive = transfer_module.send, transfer_module.receive
_real_repeat = RepeatableStep.repeat


def _repeat(step: RepeatableStep, group: StepGroup) -> None:
    step.trainer.repeated += 1  # type: ignore[attr-defined]
    _real_repeat(step, group)


@contextmanager
def virtual_time() -> Iterator[None]:
    """Let the library's code meet the doubles."""
    atexit = SimpleNamespace(
        register=lambda call: _world().process.exits.append(call),
        unregister=lambda call: _world().process.exits.remove(call),
    )
    dist = SimpleNamespace(PrefixStore=lambda prefix, store: store.under(prefix))
    quiet = SimpleNamespace(warning=lambda *args: None, info=lambda *args: None)
    places: dict[Any, dict[str, Any]] = {
        ranks_module: {
            "Door": _door,
            "Membership": _membership,
            "StepGroup": VirtualStepGroup,
            "StoreSigns": _signs,
            "_log": quiet,
            "_store_of": lambda settings: _runs[-1].store,
            "atexit": atexit,
            "destroy_group": lambda group: None,
            "dist": dist,
            "make_group": _make_group,
            "make_within": lambda within, make: make(),
            "tell_unreachable": _tell_unreachable,
            "threading": SimpleNamespace(Thread=_Thread, Event=_event),
        },
        attachment_module: {
            "_log": quiet,
            "receive": _receive,
            "send": _send,
            "threading": SimpleNamespace(Thread=_Thread),
        },
        transfer_module: {"_PIECE": 1024},
        repeatable_module: {"begin_maximum": _begin_maximum, "broadcast": _broadcast},
        step_group_module: {"close_connections": _close_connections},
        ElasticRanks: {"_watch": _watch},
        RepeatableStep: {"repeat": _repeat},
    }
    with ExitStack() as stack:
        for place, doubles in places.items():
            for name, double in doubles.items():
                stack.enter_context(mock.patch.object(place, name, double))
        yield


def run_history(seed: int) -> History:
    """A history of a training, inside :func:`virtual_time`."""
    _runs.append(Run(seed))
    try:
        return _runs[-1].history()
    finally:
        _runs.pop()


def run_histories(seeds: Sequence[int]) -> Iterator[History]:
    """The histories of some seeds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with virtual_time():
            for seed in seeds:
                yield run_history(seed)
    finally:
        torch.set_num_threads(threads)


def as_json(history: History) -> str:
    """All of a history, which its seed alone decides."""
    fields = {**vars(history)}
    return json.dumps({name: fields[name] for name in sorted(fields)}, sort_keys=True)
