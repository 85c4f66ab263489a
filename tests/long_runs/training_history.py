"""Random histories of training with a hook, against a plain calculation in one process.

:func:`draw` draws a history. :func:`problems` runs it on ranks as threads, and computes it again
with one model for each rank and without the library: after each step all gradients, parameters and
buffers must be the same, up to rounding.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from balance import Road, or_zeros
from sharded_models import Mesh, whole
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from training_models import PARTS, PLAIN, WIDTH, Net

from torch_commhook import attach, autograd, hooks
from torch_commhook.elastic import door, settings
from torch_commhook.testing import run_ranks

RATE = 0.02
BUCKET_CAP_MB = 100 / 2**20
OUTER = {"lr": 0.7, "momentum": 0.5, "nesterov": True}

#: All of these deliver the mean.
HOOKS: dict[str, Callable[[], Any]] = {
    "allreduce": hooks.allreduce,
    "cpp": lambda: "cpp('allreduce')",
    "clip": lambda: hooks.clip(1e9, hooks.allreduce()),
    "topk": lambda: hooks.error_feedback(hooks.topk(1.0)),
    "local": lambda: hooks.local_sgd(2, outer=hooks.outer_sgd(**OUTER)),
    "local topk": lambda: hooks.local_sgd(
        2, outer=hooks.outer_sgd(**OUTER), hook=hooks.error_feedback(hooks.topk(1.0))
    ),
}
WHOLE = ("module", "ddp", "python_reducer")
SHARDED = ("fsdp", "hsdp", "replicate")

#: What users do before a step; on sharded models the first three.
EVENTS = ("", "evaluate", "forward", "state", "buffers", "freeze", "synchronize")
WRITES = ("write alike", "write apart", "write on one", "load", "data")

#: What users do wrong in the end, and the error that all ranks raise.
MISTAKES = {
    "step inside backward": "an optimizer steps inside backward",
    "zero optimizer": "ZeroRedundancyOptimizer steps only some",
    "cast of complex": r"allreduce\(\) takes (complex|sparse)",
    "unfreeze": "did not require grad when the hook was attached",
    "fixed buffer": "buffer 'fixed' cannot get rank 0's values",
}


@dataclass(frozen=True)
class Batch:
    """A backward.

    Attributes:
        seed: of the inputs, and of the parts that are used.
        forwards: the forwards that give the loss.
        partial: whether each rank uses other parts.
    """

    seed: int = 0
    forwards: int = 1
    partial: bool = False


@dataclass(frozen=True)
class Step:
    """A step of the optimizer: all batches but the last are under ``no_sync()``.

    Attributes:
        event: what users do before.
        zero: how they remove gradients: to ``none``, to ``zeros``, or ``keep`` them.
    """

    batches: tuple[Batch, ...] = (Batch(),)
    event: str = ""
    zero: str = "none"


@dataclass(frozen=True)
class History:
    """What all ranks do.

    Attributes:
        seed: of the first parameters and of what users write.
        hook: in ``HOOKS``.
        model, views: the kind of model.
        mistake: in the end: in ``MISTAKES``, or ``nan`` for gradients that a check must count.
        store: the address of a store, which the library must read as it is.
    """

    seed: int = 0
    ranks: int = 2
    hook: str = "allreduce"
    model: str = "module"
    views: bool = False
    parts: tuple[str, ...] = ()
    steps: tuple[Step, ...] = (Step(),)
    mistake: str = ""
    store: str = "127.0.0.1:29400"

    @property
    def is_local(self) -> bool:
        return self.hook.startswith("local")


def draw(seed: int) -> History:
    """The history of a seed."""
    dice = random.Random(seed)
    model = dice.choice(WHOLE * 3 + SHARDED)
    hook = dice.choice([name for name in HOOKS if _takes(model, name)])
    mistake = dice.choice(["", "", "nan", *MISTAKES])
    parts = [name for name in PARTS if _suits(name, model, hook)]
    chosen = dice.sample(parts, min(len(parts), dice.choice([1, 2, 3, 5])))
    if not _can_end(mistake, model, hook, chosen):
        mistake = ""
    events = EVENTS if model in WHOLE else EVENTS[:3]
    events += WRITES * (1 + 2 * hook.startswith("local")) if model in WHOLE else ()
    steps = []
    for _ in range(dice.choice([1, 2, 3, 5, 7])):
        partial = model in WHOLE and dice.random() < 0.4
        batches = tuple(
            Batch(dice.getrandbits(16), dice.choice([1, 1, 2]), partial)
            for _ in range(dice.choice([1, 1, 2]))
        )
        event = dice.choice(events)
        if model == "ddp" and event == "forward":
            batches = batches[-1:]  # DDP itself would take one under no_sync() for that forward's
        steps.append(Step(batches, event, dice.choice(["none", "zeros", "keep"])))
    host = dice.choice(["localhost", "127.0.0.1", "[::1]", f"[fd00::{dice.getrandbits(16):x}]"])
    return History(
        seed,
        4 if model == "hsdp" else dice.choice([2, 3]),
        hook,
        model,
        model in ("module", "ddp") and dice.random() < 0.5,
        tuple(chosen),
        tuple(steps),
        mistake,
        f"{host}:{dice.randrange(1, 1 << 16)}",
    )


def _takes(model: str, hook: str) -> bool:
    """Whether a model takes a hook here; the ranks of ``fsdp`` have no whole gradients."""
    return model in WHOLE or hook == "allreduce" or (hook == "topk" and model != "fsdp")


def _suits(part: str, model: str, hook: str) -> bool:
    """Whether a part may be in a model with a hook."""
    if part in ("conjugates", "sparse_rows") and "topk" in hook:
        return False
    if part == "grad_dtype":
        return model == "module"
    if part == "sparse_rows" and model == "ddp":
        return False  # DDP's own reducer needs such a gradient of each rank
    return model in WHOLE or part in PLAIN


def _is_valid(history: History) -> bool:
    return _can_end(history.mistake, history.model, history.hook, history.parts) and all(
        _suits(part, history.model, history.hook) for part in history.parts
    )


def _can_end(mistake: str, model: str, hook: str, parts: Sequence[str]) -> bool:
    """Whether a mistake fits a history."""
    if mistake == "zero optimizer":
        return hook.startswith("local") and set(parts) <= set(PLAIN)
    if mistake == "cast of complex":
        # DDP's own reducer gives hooks the real and imaginary parts.
        return "conjugates" in parts and model != "ddp" and not hook.startswith("local")
    if mistake == "unfreeze":
        return model in WHOLE and "frozen" in parts
    if mistake == "fixed buffer":
        return model == "module"
    return mistake != "step inside backward" or model in WHOLE


# ---- what the user of a rank does ----------------------------------------------------------------


class User:
    """A rank's module and its optimizer, and what a user does with them.

    Args:
        history: what to do.
        rank: the rank; each has values of its own at first.

    Attributes:
        arrived: the names of the parameters that got a gradient.
    """

    def __init__(self, history: History, rank: int) -> None:
        self.history, self.rank = history, rank
        torch.manual_seed(history.seed)
        self.module = Net(history.parts)
        self.trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        own = [n for n in self.module.state_dict() if n.startswith("parts.own.")]
        DDP._set_params_and_buffers_to_ignore_for_model(self.module, own)
        for name in own:
            self.trained.pop(name, None)
        if history.model in WHOLE:
            self._write(0, by=0.1 * rank)
            self._write_buffers(0.1 * rank)
        self.optimizer = torch.optim.SGD(self.module.parameters(), RATE)

    def inputs(self, batch: Batch, forward: int) -> tuple[Tensor, list[str]]:
        """The inputs of a forward, and the parts that it uses."""
        dice = random.Random(f"{batch.seed} {self.rank}")
        used = [each for each in self.history.parts if not batch.partial or dice.random() < 0.6]
        numbers = torch.Generator().manual_seed(100 * batch.seed + 10 * forward + self.rank)
        return torch.randn(3, WIDTH, generator=numbers), used

    def zero_grad(self, how: str) -> None:
        if how != "keep":
            self.optimizer.zero_grad(set_to_none=how == "none")

    def before(self, number: int, step: Step) -> None:
        """The part of an event that needs no other rank."""
        event = step.event
        if event == "write alike":
            self._write(number, by=0.2)
        elif event == "write apart":
            self._write(number, by=0.1 * (self.rank + 1))
        elif event == "write on one" and self.rank == 1:
            self._write(number, by=0.3)
        elif event == "buffers":
            self._write_buffers(0.1 * self.rank + 0.1)
        elif event == "freeze":
            self._first_part().requires_grad_(False)
        elif event in ("load", "data"):
            numbers = torch.Generator().manual_seed(number)
            new = {
                name: torch.rand(value.shape, generator=numbers).to(value.dtype)
                for name, value in self.module.state_dict().items()
            }
            if event == "load":
                self.module.load_state_dict(new)
            for name, parameter in self.module.named_parameters() if event == "data" else ():
                value = new[name].clone()
                if self.history.model == "ddp":  # whose own reducer needs the first strides
                    value = torch.empty_like(parameter).copy_(value)
                parameter.data = value

    def after(self, step: Step) -> None:
        if step.event == "freeze" and self.history.parts[:1] != ("frozen",):
            self._first_part().requires_grad_(True)

    def _first_part(self) -> nn.Module:
        return self.module.parts[self.history.parts[0]] if self.history.parts else nn.Identity()

    @torch.no_grad()
    def _write(self, number: int, *, by: float) -> None:
        """Change some elements of some parameters in place."""
        dice = random.Random(f"{self.history.seed} {number}")
        for parameter in self.module.parameters():
            if number == 0 or dice.random() < 0.5:
                parameter.add_(by)

    @torch.no_grad()
    def _write_buffers(self, by: float) -> None:
        for buffer in self.module.buffers():
            if buffer.dtype is torch.bool:
                buffer.logical_xor_(torch.tensor(self.rank == 1))
            else:
                is_whole = not (buffer.is_floating_point() or buffer.is_complex())
                buffer.add_(round(10 * by) if is_whole else by)

    def values(self) -> dict[str, Tensor]:
        """The parameters and buffers, copied."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: whole(value.detach()).clone() for name, value in named}

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients, copied."""
        found: dict[str, Tensor | None] = {}
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            found[f"{name}.grad"] = None if gradient is None else _dense(gradient).clone()
        return found


def _dense(gradient: Tensor) -> Tensor:
    gradient = whole(gradient.detach())
    return gradient.to_dense() if gradient.layout is torch.sparse_coo else gradient


#: Gradients after each step's backward, then parameters and buffers after its optimizer.
Values = list[dict[str, Tensor | None]]


# ---- on ranks ------------------------------------------------------------------------------------


class Rank(User):
    """A user with a hook, on one of the ranks."""

    def __init__(self, history: History, rank: int) -> None:
        super().__init__(history, rank)
        self.found: Values = []

    def train(self) -> None:
        """Do what the history says; ``found`` has the values up to an error."""
        found = self.found
        self._attach()
        self.check = autograd.FiniteCheck()
        self.check.watch(self.module)
        for number, step in enumerate(self.history.steps, 1):
            self.zero_grad(step.zero)
            self.before(number, step)
            for batch in step.batches:
                is_last = batch is step.batches[-1]
                with contextlib.nullcontext() if is_last else self.handle.no_sync():
                    self.loss(batch).backward()
            found.append(self.gradients())
            self.optimizer.step()
            found.append(self.values())
            self.after(step)
        if self.history.is_local:
            self.handle.synchronize()
            found.append(self.values())
        self._end()
        self.handle.remove()

    def _attach(self) -> None:
        history = self.history
        road = Road(history.model, history.views)
        if history.mistake == "fixed buffer":
            fixed = torch.zeros(3 if self.rank == 0 else 1)
            self.module.register_buffer("fixed", fixed.expand(3))
        if history.model in SHARDED:
            mesh = Mesh.of(f"{history.model}-{history.ranks}")
            for part in self.module.parts.values():
                mesh.apply(part)
            mesh.apply(self.module)
            self.model: nn.Module = self.module
            self.handle = attach(self.model, HOOKS[history.hook]())
            self.optimizer = torch.optim.SGD(self.module.parameters(), RATE)
        else:
            self.model = road.wrap(self.module, BUCKET_CAP_MB)
            self.handle = road.attach(self.model, HOOKS[history.hook](), BUCKET_CAP_MB)

    def loss(self, batch: Batch) -> Tensor:
        losses = [self.model(*self.inputs(batch, each)) for each in range(batch.forwards)]
        return torch.stack(losses).sum()

    def before(self, number: int, step: Step) -> None:
        super().before(number, step)
        if step.event == "evaluate":
            self.model.eval()
            with torch.no_grad():
                self.model(*self.inputs(Batch(), 0))
            self.model.train()
        elif step.event == "forward":
            self.model(*self.inputs(Batch(), 0))
        elif step.event == "state":
            self.handle.load_state_dict(self.handle.state_dict())
        elif step.event == "synchronize" and self.history.is_local:
            self.handle.synchronize()

    def _end(self) -> None:
        mistake = self.history.mistake
        if mistake == "":
            assert int(self.check.count) == 0
            return
        self.optimizer.zero_grad()
        if mistake == "step inside backward":
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _: self.optimizer.step())
        elif mistake == "cast of complex":
            self.handle.replace(hooks.cast())
        elif mistake == "unfreeze":
            self.module.requires_grad_(True)
        loss = self.loss(Batch())
        if mistake == "nan":
            (loss * float("nan")).backward()
            count = self.check.count
            if self.history.model in SHARDED:  # some ranks may have empty shards
                dist.all_reduce(count)
            assert int(count) > 0, "no gradient counts as NaN, and all are"
            return
        loss.backward()
        if mistake == "zero optimizer":
            self.optimizer = ZeroRedundancyOptimizer(
                self.module.parameters(), optimizer_class=torch.optim.SGD, lr=RATE
            )
        self.optimizer.step()
        raise AssertionError(f"no error: {mistake}")


def _on_rank(rank: int, history: History, errors: dict[int, str]) -> Values:
    """A rank's values up to its error, which is added to those of all ranks."""
    user = Rank(history, rank)
    try:
        user.train()
    except Exception as error:
        errors[rank] = f"{type(error).__name__}: {error}"
    return user.found


# ---- in one process ------------------------------------------------------------------------------


class Plain:
    """The same history without the library: a model for each rank, and means of their values."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.users = [User(history, rank) for rank in range(history.ranks)]
        self.names = list(self.users[0].trained)
        self.used: set[str] = set()
        if history.model in WHOLE:
            self._send(lambda module: (*module.named_parameters(), *module.named_buffers()))
        for user in self.users:
            for name, parameter in user.trained.items():
                parameter.register_post_accumulate_grad_hook(lambda _, n=name: self.used.add(n))
        # Of local steps: the steps in this round, and the parameters at its begin.
        self.done = 0
        self.is_at_rest = True
        self.of_first_rank: dict[str, Tensor] = {}
        self.anchors = {
            name: _precise(parameter).requires_grad_()
            for name, parameter in self.users[0].trained.items()
        }
        self.outer = torch.optim.SGD(self.anchors.values(), **OUTER)
        self.our_buffers_are_due = self.ddp_buffers_are_due = True

    def train(self) -> list[Values]:
        found: list[Values] = [[] for _ in self.users]
        for number, step in enumerate(self.history.steps, 1):
            for user in self.users:
                user.zero_grad(step.zero)
                user.before(number, step)
            self._before(step)
            for batch in step.batches:
                self._backward(batch, syncs=batch is step.batches[-1])
            if not self.history.is_local:
                self._average()
            self._note(found, User.gradients)
            for user in self.users:
                user.optimizer.step()
                user.after(step)
            self._count()
            self._note(found, User.values)
        if self.history.is_local:
            self._synchronize()
            self._note(found, User.values)
        return found

    def _note(self, found: list[Values], of: Callable[[User], Any]) -> None:
        for user, values in zip(self.users, found, strict=True):
            values.append(of(user))

    def _before(self, step: Step) -> None:
        if step.event == "evaluate":
            for user in self.users:
                user.module.eval()
            with torch.no_grad():
                self._forward(Batch(), 0, trains=False)
            for user in self.users:
                user.module.train()
        elif step.event == "forward":
            self._forward(Batch(), 0)
        elif step.event == "state" and not self.is_at_rest:
            for name, value in self.of_first_rank.items():
                self.anchors[name].data.copy_(value)
        elif step.event == "synchronize" and self.history.is_local:
            self._synchronize()

    def _backward(self, batch: Batch, *, syncs: bool) -> None:
        losses = [self._forward(batch, each, syncs=syncs) for each in range(batch.forwards)]
        if self.is_at_rest and syncs:
            self._find_anchors()
            self.is_at_rest = False
        for of_user in zip(*losses, strict=True):
            torch.stack(of_user).sum().backward()
        self.our_buffers_are_due |= syncs

    def _forward(
        self, batch: Batch, number: int, *, trains: bool = True, syncs: bool = True
    ) -> list[Tensor]:
        model = self.history.model
        # DDP's own reducer sends buffers before each forward after one with gradients.
        due = self.ddp_buffers_are_due if model == "ddp" else trains and self.our_buffers_are_due
        if due and model in WHOLE:
            self._send(lambda module: module.named_buffers())
        self.our_buffers_are_due &= not trains
        self.ddp_buffers_are_due = trains and syncs
        return [user.module(*user.inputs(batch, number)) for user in self.users]

    @torch.no_grad()
    def _send(self, named: Callable[[nn.Module], Any]) -> None:
        """Give all ranks the first one's values, except those that they ignore."""
        for user in self.users[1:]:
            for (name, value), (_, first) in zip(
                named(user.module), named(self.users[0].module), strict=True
            ):
                if not name.startswith("parts.own."):
                    value.data.copy_(first)

    def _all(self, name: str) -> list[Tensor]:
        return [user.trained[name] for user in self.users]

    def _average(self) -> None:
        """Average the gradients that a rank has used."""
        for name in self.names:
            every = self._all(name)
            if name not in self.used:
                continue
            mean = _mean([_dense(or_zeros(each.grad, _like_gradient(each))) for each in every])
            for each in every:
                each.grad = mean.clone()
        self.used.clear()

    # Local steps, as docs/local_sgd.md has them.

    @torch.no_grad()
    def _find_anchors(self) -> None:
        """A write between rounds is a load if it is the same on all ranks; else it is training.

        A state of such a training continues from rank 0's values.
        """
        self.of_first_rank = {}
        for name, anchor in self.anchors.items():
            first, *others = self._all(name)
            if torch.equal(anchor.to(first.dtype), first):
                continue
            if all(torch.equal(first, each) for each in others):
                anchor.copy_(first)
            else:
                self.of_first_rank[name] = first.clone()

    def _count(self) -> None:
        self.done += 1
        if self.history.is_local and self.done == 2:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, anchor in self.anchors.items():
            every = self._all(name)
            anchor.grad = _mean([anchor.to(each.dtype) - each for each in every]).to(anchor.dtype)
        self.outer.step()
        for name, anchor in self.anchors.items():
            for each in self._all(name):
                each.copy_(anchor)
        self.done, self.is_at_rest = 0, True

    def _synchronize(self) -> None:
        if self.is_at_rest:
            self._find_anchors()
        apart = any(
            not torch.equal(anchor.to(each.dtype), each)
            for name, anchor in self.anchors.items()
            for each in self._all(name)
        )
        if self.done or apart:
            self._exchange()


def _precise(parameter: Tensor) -> Tensor:
    own = parameter.detach().clone()
    return own.float() if own.dtype in (torch.bfloat16, torch.float16) else own


def _like_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([_precise(each) for each in values]).mean(0).to(values[0].dtype)


# ---- both ----------------------------------------------------------------------------------------


def problems(history: History) -> list[str]:
    """What is wrong with a history; empty if nothing is."""
    found = _problems_of_address(history.store)
    errors: dict[int, str] = {}
    try:
        with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 50):
            ranks = run_ranks(
                _on_rank, history.ranks, history, errors, seed=history.seed, timeout=20.0
            )
    except Exception as error:
        return [*found, *errors.values(), f"{type(error).__name__}: {error}"]
    expected = MISTAKES.get(history.mistake)
    if expected is None:
        found += [f"rank {rank}: {error}" for rank, error in errors.items()]
    for rank in range(history.ranks) if expected else ():
        if not re.search(expected, errors.get(rank, "")):
            found.append(f"rank {rank}: not the error '{expected}': {errors.get(rank)}")
    tolerance = 0.05 if {"bf16", "fp16", "grad_dtype"} & {*history.parts} else 1e-4
    for rank, (got, wanted) in enumerate(zip(ranks, Plain(history).train(), strict=True)):
        # After an error there is nothing more.
        for number, pair in enumerate(zip(got, wanted, strict=False)):
            found += [
                f"rank {rank}, step {number // 2}: {each}" for each in _unlike(*pair, tolerance)
            ]
    return found


def _unlike(got: Any, expected: Any, tolerance: float) -> Iterator[str]:
    for name, wanted in expected.items():
        value = got[name]
        if value is None or wanted is None:
            other = wanted if value is None else value
            if other is not None and other.any():
                yield f"{name} is {value}, not {wanted}"
        elif value.dtype != wanted.dtype:
            yield f"{name} is {value.dtype}, not {wanted.dtype}"
        elif not torch.allclose(value, wanted, tolerance, tolerance):
            off = (value - wanted).abs().max().item() if value.dtype != torch.bool else 1
            yield f"{name} is off by {off:.2g}"


def _problems_of_address(store: str) -> list[str]:
    wanted = urllib.parse.urlsplit(f"//{store}")
    host = str(wanted.hostname)
    try:
        got = settings.host_and_port(store)
    except ValueError as error:
        return [str(error)]
    if got != (host, wanted.port):
        return [f"{store} is read as {got}"]
    if host == "localhost" or not ipaddress.ip_address(host).is_loopback:
        return []
    try:
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    except RuntimeError:  # a machine without IPv6
        return []
    own = door.own_address(server)
    return [] if own == host else [f"{own} is reached at {host}"]


def smallest(history: History) -> History:
    """The smallest history that still fails: without the steps and parts that do not matter."""

    def smaller(of: History) -> Iterator[History]:
        for number in range(len(of.steps)):
            yield replace(of, steps=of.steps[:number] + of.steps[number + 1 :])
        for part in of.parts:
            yield replace(of, parts=tuple(each for each in of.parts if each != part))
        for name in ("mistake", "hook", "model", "views", "ranks", "store"):
            yield replace(of, **{name: getattr(History(), name)})
        for number, step in enumerate(of.steps):
            for simple in (
                replace(step, event=""),
                replace(step, zero="none"),
                replace(step, batches=step.batches[-1:]),
                replace(step, batches=tuple(replace(each, partial=False) for each in step.batches)),
                replace(step, batches=tuple(replace(each, forwards=1) for each in step.batches)),
                replace(step, batches=tuple(replace(each, seed=0) for each in step.batches)),
            ):
                yield replace(of, steps=(*of.steps[:number], simple, *of.steps[number + 1 :]))

    while True:
        tried = (each for each in smaller(history) if each != history and _is_valid(each))
        found = next((each for each in tried if problems(each)), None)
        if found is None:
            return history
        history = found
