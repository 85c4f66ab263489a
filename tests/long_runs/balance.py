"""Random histories of training, in which error feedback must lose nothing.

A history is some steps with one hook on one road. It draws which parameters each rank uses,
micro-batches under ``no_sync()``, both forms of ``zero_grad`` or none, a hook that fails on one
rank, and states that are saved and loaded. The loss is linear in the parameters: each rank knows
the gradient that it gives. For each parameter, the sum of the delivered averages plus the error
memory of all ranks must equal the sum of the averages that were given. A parameter that no rank has
used, in any micro-batch of a step, keeps its gradient to the bit.

Hooks in C++ remember nothing, so that they have no balance. ``local_sgd`` delivers moves of the
parameters, not gradients: ``local_balance.py``.

``make balance`` runs 1,000 histories and writes ``balance.json`` beside this file; it exits with 1
where one is out of balance. ``test_balance.py`` runs a few.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from long_run_results import store
from mode_cases import compiled_backward
from rank_pool import RankError, RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, PeerError, attach, hooks

TABLE = Path(__file__).with_suffix(".json")
HISTORIES = 1000
RANKS = 2
STEPS = 9
COMPILED_STEPS = 5
BUCKET_CAP_MB = 0.004
FIRST_BUCKET_BYTES = 1024

#: Of the largest sum of magnitudes; float32 rounds each of about 100 additions.
TOLERANCE = 1e-5

#: In float32 a parameter's error may be remembered by a rank, by its node, or by who adds up. The
#: first two are shares of a mean.
_SHARES = {"error": 1 / RANKS, "node_error": 1 / RANKS, "shard_error": 1, "node_shard_error": 1}


def _hierarchical() -> hooks.Hook:
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(RANKS)]
    return hooks.error_feedback(
        hooks.hierarchical(
            hooks.blockwise(bits=4).codec,
            intra_group=alone[rank],
            inter_group=dist.new_group(list(range(RANKS))),
        )
    )


#: All that remember what they lose; between them all codecs.
HOOKS: dict[str, Callable[[], hooks.Hook]] = {
    "int8": lambda: hooks.error_feedback(hooks.blockwise()),
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "int2": lambda: hooks.error_feedback(hooks.blockwise(bits=2)),
    "stochastic": lambda: hooks.error_feedback(hooks.blockwise(bits=4, rounding="stochastic")),
    "fp8": lambda: hooks.error_feedback(hooks.fp8()),
    "sign": lambda: hooks.error_feedback(hooks.sign()),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.05)),
    "chunk_topk": lambda: hooks.error_feedback(hooks.chunk_topk(4, 64)),
    "randomk": lambda: hooks.error_feedback(hooks.randomk(0.1)),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(rank=2)),
    "adaptive": lambda: hooks.adaptive(6000, every=2),
    "policy": lambda: hooks.policy(
        [("dim <= 1", hooks.allreduce()), ("weights.2", hooks.error_feedback(hooks.topk(0.1)))],
        hooks.error_feedback(hooks.sign()),
    ),
    "after": lambda: hooks.after(
        3, hooks.error_feedback(hooks.topk(0.1)), hooks.error_feedback(hooks.blockwise(bits=4))
    ),
    "clip": lambda: hooks.clip(1e9, hooks.error_feedback(hooks.sign())),
    "hierarchical": _hierarchical,
}


@dataclass(frozen=True)
class Road:
    """How gradients reach a hook."""

    # ``module``, ``ddp``, ``python_reducer``, or ``taken_over``: a DDP whose gradients our reducer
    # averages since a first backward in compiled autograd
    model: str
    # ``gradient_as_bucket_view``. PyTorch's Python reducer takes the setting and keeps no views;
    # ours, in its place, does
    views: bool = False
    # backward passes are compiled autograd's. All of them, but with ``taken_over``: there they are
    # so by chance, so that our reducer takes over in mid-history and then gets both
    compiled: bool = False

    def __str__(self) -> str:
        said = {"views": self.views, "compiled": self.compiled}
        return " ".join([self.model, *(name for name, is_so in said.items() if is_so)])

    def wrap(self, module: nn.Module, bucket_cap_mb: float = BUCKET_CAP_MB) -> nn.Module:
        if self.model == "module":
            return module
        reducer = "python_reducer" if self.model == "python_reducer" else "ddp_optimizer"
        with torch._dynamo.config.patch(optimize_ddp=reducer):
            return DDP(
                module,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=True,
                gradient_as_bucket_view=self.views,
            )

    def attach(
        self, model: nn.Module, hook: hooks.Hook, bucket_cap_mb: float = BUCKET_CAP_MB
    ) -> HookHandle:
        if self.model != "module":
            return attach(model, hook)
        return attach(model, hook, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=self.views)


ROADS = [
    Road(model, views, compiled)
    for compiled in (False, True)
    for model in ("module", "ddp", "python_reducer", "taken_over")
    for views in (False, True)
]


class OwnError(Exception):
    """What a hook raises here."""


class Linear(nn.Module):
    """A loss that is linear in the parameters: their gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(24, 20), (7,), (30, 16), (300,), (5, 4, 3), (64, 9), (33,)]
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.weights.append(nn.Parameter(torch.zeros(18, 11).t()))

    def forward(self, wanted: list[Tensor | None]) -> Tensor:
        terms = zip(self.weights, wanted, strict=True)
        return torch.stack([(w * g).sum() for w, g in terms if g is not None]).sum()


class History:
    """One history, on this rank.

    Args:
        name: of the hook.
        road: how gradients reach it.
        seed: of everything that is drawn.
    """

    def __init__(self, name: str, road: Road, seed: int) -> None:
        self.rank = dist.get_rank()
        self.road = road
        self.dice = random.Random(f"{name} {road} {seed}")  # alike on all ranks
        self.numbers = torch.Generator().manual_seed(self.dice.getrandbits(40))
        module = Linear()
        self.parameters = dict(module.named_parameters())
        self.always_compiled = road.compiled and road.model != "taken_over"
        self.model = road.wrap(module)
        self.make_hook = HOOKS[name]
        self.handle = self._attach()
        self.attached_anew = False
        # Compiled autograd compiles anew for each set of parameters.
        self.patterns = [self._draw_used() for _ in range(2)]
        self.given = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.delivered = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.size = 0.0
        self.wrong: list[str] = []

    def _attach(self) -> HookHandle:
        handle = self.road.attach(self.model, self.make_hook())
        handle.register_buffer_prehook(self._maybe_fail)
        self.fails_on: int | None = None  # the bucket
        return handle

    def _maybe_fail(self, bucket: Any) -> None:
        if self.fails_on is not None and bucket.index() == self.fails_on:
            raise OwnError("boo")

    def run(self) -> list[str]:
        """What is wrong, if anything."""
        for step in range(COMPILED_STEPS if self.road.compiled else STEPS):
            self._zero_grad()
            if self.road == Road("taken_over", self.road.views) and step == 0:
                self._step("step 0", takes_over=True)
                continue
            event = self.dice.random()
            saved = self.handle.state_dict()
            if event < 0.15 and not self.always_compiled:
                self._failed_step(saved)
            elif event < 0.25:
                self.handle.load_state_dict(saved)
            elif event < 0.35:
                self.handle.remove()
                self.handle = self._attach()
                self.attached_anew = self.road.model != "ddp"  # else DDP knows what was used
                self.handle.load_state_dict(saved)
            self._step(f"step {step}")
        self._compare()
        self.handle.remove()
        return self.wrong

    def _zero_grad(self) -> None:
        form = self.dice.choice(["none", "zeros", "nothing"])
        if form != "nothing":
            self.model.zero_grad(set_to_none=form == "none")

    def _draw_used(self) -> list[set[str]]:
        """For each rank the parameters that it uses; the first one always."""
        first, *others = self.parameters
        return [
            {first, *(name for name in others if self.dice.random() < 0.6)} for _ in range(RANKS)
        ]

    def _draw(self, used: list[set[str]]) -> list[dict[str, Tensor]]:
        """For each rank the gradients that it gives."""
        every = []
        for names in used:
            gradients = {}
            for name, parameter in self.parameters.items():
                value = torch.randn(parameter.shape, generator=self.numbers)
                if name in names:
                    gradients[name] = value * 10 ** self.dice.uniform(-1, 1)
            every.append(gradients)
        return every

    def _backward(self, gradients: dict[str, Tensor], *, compiled: bool) -> None:
        loss = self.model([gradients.get(name) for name in self.parameters])
        with compiled_backward(compiled):
            loss.backward()

    @contextlib.contextmanager
    def fails(self, what: str, at_fault: int) -> Iterator[None]:
        """The block must raise: the hook's own error on the rank at fault, PeerError on others."""
        try:
            yield
            self.wrong.append(f"{what} in which a hook failed did not")
        except OwnError:
            if self.rank != at_fault:
                self.wrong.append("the error of another rank")
        except PeerError:
            if self.rank == at_fault:
                self.wrong.append("no error of its own")

    def _failed_step(self, saved: dict[str, Any]) -> None:
        at_fault, bucket = self.dice.randrange(RANKS), self.dice.randrange(2)
        gradients = self._draw(self._draw_used())
        self.fails_on = bucket if self.rank == at_fault else None
        with self.fails("a step", at_fault):
            self._backward(gradients[self.rank], compiled=False)
        self.fails_on = None
        self.model.zero_grad(set_to_none=True)  # a failed step leaves anything in there
        self.handle.load_state_dict(saved)

    def _step(self, where: str, *, takes_over: bool = False) -> None:
        before = {name: or_zeros(p.grad, p) for name, p in self.parameters.items()}
        had = {name for name, p in self.parameters.items() if p.grad is not None}
        batches = 1 if takes_over else self.dice.choice([1, 1, 2, 3])
        used_by_any: set[str] = set()
        for batch in range(batches):
            compiled = takes_over or self._draw_compiled()
            if takes_over:
                used = [set(self.parameters)] * RANKS
            else:
                used = self.dice.choice(self.patterns) if compiled else self._draw_used()
            every = self._draw(used)
            used_by_any.update(*used)
            is_last = batch == batches - 1
            with contextlib.nullcontext() if is_last else self.handle.no_sync():
                self._backward(every[self.rank], compiled=compiled)
            for name, gradient in every[self.rank].items():
                before[name] += gradient
        if self.attached_anew:  # gradients that are there then are taken for the rank's own
            used_by_any.update(had)
            self.attached_anew = False
        for name, parameter in self.parameters.items():
            after = or_zeros(parameter.grad, parameter)
            if name not in used_by_any:
                is_none = parameter.grad is None
                if not torch.equal(after, before[name]) or is_none != (name not in had):
                    self.wrong.append(f"{where}: unused {name} was not left alone")
                continue
            self.given[name] += before[name]
            self.delivered[name] += after
            self.size = max(self.size, float(self.delivered[name].abs().max()))

    def _draw_compiled(self) -> bool:
        if self.road.compiled and self.road.model == "taken_over":
            return self.dice.random() < 0.5
        return self.road.compiled

    def _own_state(self) -> dict[str, dict[str, Tensor]]:
        """What the hook remembers on this rank, by kind and parameter."""
        return self.handle.state_dict()[f"rank{self.rank}"]

    def _compare(self) -> None:
        remembered = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for kind, tensors in self._own_state().items():
            for name, tensor in tensors.items():
                remembered[name] += _SHARES[kind] * _as_parameter(tensor, self.parameters[name])
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, (self.given, self.delivered, remembered))
        for name in self.parameters:
            given = sum(given[name] for given, _, _ in every) / RANKS
            left = sum(remembered[name] for _, _, remembered in every)
            for rank, (_, delivered, _) in enumerate(every):
                off = float((given - delivered[name] - left).abs().max())
                if not off <= TOLERANCE * max(self.size, 1.0) * STEPS:
                    self.wrong.append(f"{name} on rank {rank} is off by {off:.2g}")


def or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()


def _as_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """What is remembered, of a parameter's shape; segments lie as the parameter does."""
    if tensor.shape == parameter.shape:
        return tensor
    return tensor.as_strided(parameter.shape, parameter.stride())


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    with unittest.mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", FIRST_BUCKET_BYTES):
        yield


def run_history(rank: int, name: str, road: Road, seed: int) -> list[str]:
    """What is wrong with one history, if anything. Runs on each rank."""
    torch._dynamo.reset()
    with small_buckets():
        return History(name, road, seed).run()


def out_of_balance(
    pool: RankPool,
    case: tuple[str, Road, int],
    run: Callable[[int, str, Road, int], list[str]] = run_history,
) -> list[str]:
    """What is wrong with one history on any rank."""
    try:
        return sorted({each for found in pool.run(run, *case, timeout=180) for each in found})
    except (RankError, TimeoutError) as error:  # the next call starts new ranks
        return [str(error)]


def cases(count: int) -> list[tuple[str, Road, int]]:
    """So many histories: all pairs of a hook and a road in turn, one in nine of them compiled."""
    dice = random.Random(0)
    eager = [(name, road) for name in HOOKS for road in ROADS if not road.compiled]
    compiled = [(name, road) for name in HOOKS for road in ROADS if road.compiled]
    dice.shuffle(eager)
    dice.shuffle(compiled)
    found = []
    for seed in range(count):
        pairs, number = (compiled, seed // 9) if seed % 9 == 8 else (eager, seed - seed // 9)
        name, road = pairs[number % len(pairs)]
        found.append((name, road, seed))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--only", default="", help="histories whose hook and road have this text")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    wrong: list[str] = []
    ran: Counter[str] = Counter()
    pool = RankPool(RANKS)
    try:
        chosen = [c for c in cases(options.histories) if options.only in f"{c[0]} {c[1]}"]
        for number, case in enumerate(chosen, 1):
            found = out_of_balance(pool, case)
            ran[str(case[1])] += 1
            if found:
                wrong.append(" ".join(map(str, case)))
                print(f"{wrong[-1]}: {'; '.join(found)}", flush=True)
            if number % 50 == 0:
                print(f"{number} histories, {len(wrong)} out of balance", flush=True)
    finally:
        pool.stop()
    if options.histories == HISTORIES and not options.only:
        store(TABLE, begun, histories=dict(sorted(ran.items())), out_of_balance=wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
