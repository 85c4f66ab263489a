"""2,000 random histories of training with a hook, on ranks as threads.

A plain calculation without the library must give the same gradients, parameters and buffers, up to
rounding. A user's mistake in the end must raise its error on all ranks.

``make training-histories`` prints the smallest form of a history that fails, and exits with 1. It
also plants faults, and stores the smallest history that finds each. ``ARGS=7`` runs only the 250
histories of seed 7.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sys
import time
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import torch
import torch.distributed as dist
from balance import Road
from hypothesis import strategies as st
from long_run_results import store
from sharded_models import Mesh, whole
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from training_models import PARTS, PLAIN, Net

from torch_commhook import addresses, attach, autograd, hooks
from torch_commhook.attachment.local_steps import LocalSteps
from torch_commhook.elastic import ranks as elastic_ranks
from torch_commhook.testing import run_ranks

TABLE = Path(__file__).with_suffix(".json")
RATE = 0.02
BUCKET_CAP_MB = 100 / 2**20
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.5, "nesterov": True}
WHOLE = ("module", "ddp", "python_reducer")


def _local(hook: hooks.Hook | None = None) -> hooks.Hook:
    return hooks.local_sgd(2, outer=hooks.outer_sgd(**OUTER), hook=hook)


@torch.no_grad()
def _add(by: float, values: Iterable[Tensor]) -> None:
    for value in values:
        value.add_(torch.tensor(by).to(value.dtype))


#: All of these deliver the mean.
HOOKS: dict[str, Callable[[], Any]] = {
    "allreduce": hooks.allreduce,
    "topk": lambda: hooks.error_feedback(hooks.topk(1.0)),
    "cpp": lambda: "cpp('allreduce')",
    "clip": lambda: hooks.clip(1e9, hooks.allreduce()),
    "local": _local,
    "local topk": lambda: _local(hooks.error_feedback(hooks.topk(1.0))),
}

#: What users do before a step, by its number; on sharded models the first three.
EVENTS: dict[str, Callable[..., object]] = {
    "": lambda *_: None,
    "evaluate": lambda all, _: [all.models.eval(), all.evaluate(), all.models.train()],
    "forward": lambda all, _: all.forward(),
    "state": lambda all, _: all.restore(),
    "synchronize": lambda all, _: all.synchronize(),
    "freeze": lambda *_: None,  # the first part, see Training.train
    "buffers": lambda all, _: [_add(rank + 1, net.buffers()) for rank, net in all.nets.items()],
    "write alike": lambda all, n: all.write(n, [0.2, 0.2, 0.2]),
    "write apart": lambda all, n: all.write(n, [0.1, 0.2, 0.3]),
    "write on one": lambda all, n: all.write(n, [0.0, 0.3, 0.0]),
    "load": lambda all, n: all.load(n, as_data=False),
    "data": lambda all, n: all.load(n, as_data=True),
}

#: What users do wrong in the end: the error of all ranks, and the histories that it fits.
MISTAKES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "": ("^$", lambda of: True),
    "nan": ("^$", lambda of: True),
    "step inside backward": ("steps inside backward", lambda of: of.model in WHOLE),
    "zero optimizer": ("ZeroRedundancy", lambda of: "local" in of.hook and PLAIN >= {*of.parts}),
    "cast of complex": (  # DDP's own reducer gives hooks the real and imaginary parts
        r"allreduce\(\) takes (complex|sparse)",
        lambda of: "conjugates" in of.parts and of.hook != "local" and of.model != "ddp",
    ),
    "unfreeze": ("did not require grad", lambda of: "frozen" in of.parts and of.model in WHOLE),
    "fixed buffer": ("'fixed' cannot get rank 0's values", lambda of: of.model == "module"),
}

#: ``host`` is one whose address the library must read as it is. A step of the optimizer is an event
#: before, how gradients are removed, the forwards of each batch (all but the last are under
#: ``no_sync()``), and whether ranks use other parts.
History = namedtuple("History", "seed ranks hook model views parts host steps mistake")


@st.composite
def histories(draw: Any) -> History:
    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    model = pick(*WHOLE * 3, "fsdp", "hsdp", "replicate")
    is_whole = model in WHOLE
    # The ranks of fsdp have no whole gradients.
    hook = pick(*[*HOOKS][: None if is_whole else 1 if model == "fsdp" else 2])
    unfit = {"grad_dtype"} if model != "module" else set()
    unfit |= {"conjugates", "sparse_rows"} if "topk" in hook else set()
    unfit |= {"sparse_rows"} if model == "ddp" else set()  # needs such a gradient of each rank
    parts = [part for part in PARTS if part not in unfit and (is_whole or part in PLAIN)]
    steps = st.tuples(
        st.sampled_from([*EVENTS][: None if is_whole else 3]),
        st.sampled_from(["none", "zeros", "keep"]),
        st.lists(st.sampled_from([1, 1, 2]), min_size=1, max_size=2),
        st.booleans() if is_whole else st.just(False),
    )
    if model == "ddp":  # it would take a batch under no_sync() for the forward's
        steps = steps.filter(lambda step: step[0] != "forward" or len(step[2]) == 1)
    seed, ranks = draw(st.integers(0, 60_000)), 4 if model == "hsdp" else pick(2, 3)
    views = model in ("module", "ddp") and pick(False, True)
    chosen = draw(st.lists(st.sampled_from(parts), unique=True, max_size=5))
    host = pick("localhost", "127.0.0.1", "::1", "fd00::5")
    taken = draw(st.lists(steps, max_size=7))
    history = History(seed, ranks, hook, model, views, chosen, host, taken, "")
    fit = (name for name, (_, fits) in MISTAKES.items() if fits(history))
    return history._replace(mistake=pick("", *fit))


class Training:
    """A history of all ranks without the library, or of one with a hook."""

    handle: Any = None

    def __init__(self, history: History, *ranks: int) -> None:
        self.history = history
        self.nets: dict[int, Any] = {}
        for rank in ranks:
            torch.manual_seed(history.seed)
            net = self.nets[rank] = Net(history.parts)
            own = [name for name in net.state_dict() if name.startswith("parts.own.")]
            DDP._set_params_and_buffers_to_ignore_for_model(net, own)
            for name, value in (*net.named_parameters(), *net.named_buffers()):
                # A hook gives all ranks the first one's values, except those that it ignores.
                if history.model in WHOLE and (ranks == (rank,) or name in own):
                    _add(rank, [value])
        self.models = nn.ModuleList(self.nets.values())
        self.optimizer: Any = torch.optim.SGD(self.models.parameters(), RATE)
        self.found: dict[int, list[dict[str, Tensor]]] = {rank: [] for rank in ranks}
        self.is_local, self.is_ddp = "local" in history.hook, history.model == "ddp"
        self.syncs = self.our_buffers_are_due = self.ddp_buffers_are_due = True
        names = [n for n, p in net.named_parameters() if p.requires_grad and n not in own]
        self.all = {n: [net.get_parameter(n) for net in self.nets.values()] for n in names}
        # Of local steps (docs/local_sgd.md): those in this round, and the parameters at its begin.
        self.done, self.is_at_rest = 0, True
        self.of_first_rank: dict[str, Tensor] = {}
        self.anchors = {
            name: first.detach().to(torch.promote_types(first.dtype, torch.float32), copy=True)
            for name, (first, *_) in self.all.items()
        }
        self.outer = torch.optim.SGD(self.anchors.values(), **OUTER)

    def attach(self) -> None:
        (net,), hook = self.nets.values(), HOOKS[self.history.hook]()
        if self.history.model in WHOLE:
            road = Road(self.history.model, self.history.views)
            self.models = nn.ModuleList([road.wrap(net, BUCKET_CAP_MB)])
            self.handle = road.attach(self.models[0], hook, BUCKET_CAP_MB)
        else:
            mesh = Mesh.of(f"{self.history.model}-{self.history.ranks}")
            for part in (*net.parts.values(), net):
                mesh.apply(part)
            self.optimizer = torch.optim.SGD(net.parameters(), RATE)
            self.handle = attach(net, hook)

    def train(self) -> None:
        for number, (event, zero, batches, is_partial) in enumerate(self.history.steps, 1):
            if zero != "keep":
                self.optimizer.zero_grad(set_to_none=zero == "none")
            for first, net in itertools.product(self.history.parts[:1], self.nets.values()):
                net.parts[first].requires_grad_(event != "freeze" and first != "frozen")
            EVENTS[event](self, number)
            for batch, forwards in enumerate(batches, 1):
                self.syncs = batch == len(batches)
                self.backward(forwards, is_partial, number, batch)
            self.note()
            self.optimizer.step()
            self.done += 1
            if self.done == 2:
                self.exchange()
            self.note()
        self.synchronize()
        self.note()

    def note(self) -> None:
        for rank, net in self.nets.items():
            found = {f"{name}.grad": _gradient(each) for name, each in net.named_parameters()}
            named = (*net.named_parameters(), *net.named_buffers())
            self.found[rank].append(found | {name: whole(each) for name, each in named})

    def forward(self, is_partial: bool = False, *which: int) -> Any:
        """The sum of the ranks' losses."""
        # DDP's own reducer sends buffers before each forward after one with gradients.
        trains, (first, *others) = torch.is_grad_enabled(), self.nets.values()
        due = self.ddp_buffers_are_due if self.is_ddp else trains and self.our_buffers_are_due
        for net in others if due and self.history.model in WHOLE else ():
            for (name, value), source in zip(net.named_buffers(), first.buffers(), strict=True):
                if not name.startswith("parts.own."):
                    value.data.copy_(source)
        self.our_buffers_are_due &= not trains
        self.ddp_buffers_are_due = trains and self.syncs
        losses = []
        for rank, model in zip(self.nets, self.models, strict=True):
            dice = random.Random(f"{self.history.seed} {rank} {which[:2]}")
            used = [part for part in self.history.parts if not is_partial or dice.random() < 0.6]
            losses.append(model(dice.getrandbits(32) + sum(which[2:]), used))
        return sum(losses)

    evaluate = torch.no_grad()(forward)

    def write(self, number: int, by: list[float]) -> None:
        for rank, net in self.nets.items():
            dice = random.Random(number)
            _add(by[rank], [p for p in net.parameters() if by[rank] and dice.random() < 0.5])

    def load(self, number: int, *, as_data: bool) -> None:
        for net in self.nets.values():
            numbers, state = torch.Generator().manual_seed(number), net.state_dict()
            new = {n: torch.rand(v.shape, generator=numbers).to(v.dtype) for n, v in state.items()}
            if not as_data:
                net.load_state_dict(new)
            for name, each in net.named_parameters() if as_data else ():
                # DDP's own reducer needs the first strides.
                each.data = torch.empty_like(each).copy_(new[name]) if self.is_ddp else new[name]

    def backward(self, forwards: int, *which: Any) -> None:
        with self.handle.no_sync() if self.handle and not self.syncs else contextlib.nullcontext():
            torch.stack(
                [self.forward(*which, number) for number in range(forwards)]
            ).sum().backward()
        if self.handle or not self.syncs:
            return
        self.our_buffers_are_due = True
        self.find_anchors()
        self.is_at_rest = False
        for every in () if self.is_local else self.all.values():
            mean = torch.stack([_gradient(each) for each in every]).mean(0)
            for each in every:
                each.grad = mean.clone()

    def synchronize(self) -> Any:
        if self.handle:
            return self.handle.synchronize() if self.is_local else None
        self.find_anchors()
        pairs = ((self.anchors[name], each) for name in self.all for each in self.all[name])
        if self.done or any(not torch.equal(anchor.to(each.dtype), each) for anchor, each in pairs):
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        if self.handle or not self.is_local:
            return
        for name, anchor in self.anchors.items():
            moves = torch.stack([anchor.to(each.dtype) - each for each in self.all[name]])
            anchor.grad = moves.mean(0).to(anchor.dtype)
        self.outer.step()
        for name, anchor in self.anchors.items():
            for each in self.all[name]:
                each.copy_(anchor)
        self.done, self.is_at_rest = 0, True

    @torch.no_grad()
    def find_anchors(self) -> None:
        """A write between rounds is a load if it is the same on all ranks; else it is training."""
        if not self.is_at_rest:
            return
        self.of_first_rank = {}  # a state of such a training continues from these
        for name, (first, *others) in self.all.items():
            if all(torch.equal(first, each) for each in others):
                if not torch.equal(self.anchors[name].to(first.dtype), first):
                    self.anchors[name].copy_(first)
            else:
                self.of_first_rank[name] = first.clone()

    def restore(self) -> None:
        """Load the hook's own state."""
        if self.handle:
            self.handle.load_state_dict(self.handle.state_dict())
        for name, value in self.of_first_rank.items() if not self.is_at_rest else ():
            self.anchors[name].data.copy_(value)


def _gradient(parameter: Any) -> Any:
    """A gradient, with zeros if there is none."""
    if parameter.grad is None:
        return whole(torch.zeros_like(parameter, dtype=parameter.grad_dtype))
    gradient = whole(parameter.grad)
    return gradient.to_dense() if gradient.layout is torch.sparse_coo else gradient


def _train_with_hook(training: Training) -> None:
    """Train on one rank, then make the mistake."""
    training.attach()
    ((rank, net),), mistake = training.nets.items(), training.history.mistake
    check = autograd.FiniteCheck()
    check.watch(net)
    training.train()
    training.optimizer.zero_grad()
    if mistake == "nan":
        net.trunk.bias.data.fill_(torch.nan)
    elif mistake == "step inside backward":
        net.trunk.weight.register_post_accumulate_grad_hook(lambda _: training.optimizer.step())
    elif mistake == "zero optimizer":
        training.optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=RATE)
    elif mistake == "cast of complex":
        training.handle.replace(hooks.cast())
    elif mistake == "unfreeze":
        net.requires_grad_(True)
    elif mistake == "fixed buffer":
        training.handle.remove()
        net.register_buffer("fixed", torch.zeros(1 if rank else 3).expand(3))
        training.attach()
    training.backward(1)
    training.optimizer.step()
    dist.all_reduce(count := check.count)  # a rank may have empty shards
    assert bool(count) == (mistake == "nan"), f"FiniteCheck counts {count}"
    training.handle.remove()


def problem(history: History) -> str:
    """What is wrong with a history; empty if nothing is."""
    errors: list[str] = [""] * history.ranks
    trainings: dict[int, Training] = {}

    def on_rank(rank: int) -> None:
        trainings[rank] = Training(history, rank)
        try:
            _train_with_hook(trainings[rank])
        except Exception as error:
            errors[rank] = f"{type(error).__name__}: {error}"

    host, port = history.host, history.seed + 1
    tolerance = 0.05 if {"bf16", "fp16", "grad_dtype"} & {*history.parts} else 1e-4
    try:
        read = addresses.host_and_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        assert read == (host, port), f"{host} and {port} are read as {read}"
        with contextlib.suppress(RuntimeError):  # a machine without IPv6
            if host in ("127.0.0.1", "::1"):
                assert elastic_ranks.own_address(host) == host, elastic_ranks.own_address(host)
        with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 50):
            run_ranks(on_rank, history.ranks, seed=history.seed, timeout=20.0)
        for error in errors:
            assert re.search(MISTAKES[history.mistake][0], error), "wrong errors"
        plain = Training(history, *range(history.ranks))
        plain.train()
        for rank, found in plain.found.items():
            got = trainings[rank].found[rank]
            torch.testing.assert_close(got, found, rtol=tolerance, atol=tolerance)
    except Exception as error:
        return f"{type(error).__name__}: {error} {errors}"
    return ""


def _raise_own(group: Any, what: str, error: Exception | None, *_: Any) -> None:
    if error is not None:
        raise error


_before: Any = LocalSteps.before_optimizer_step
_SHARDED = "autograd.finite_check.is_fully_sharded autograd.registration.is_fully_sharded"
_DTYPE = "reducer.buckets.gradient_dtype buckets.grad_bucket.gradient_dtype"
_STEP = "attachment.local_steps.LocalSteps.before_optimizer_step"
_CHANGED = "attachment.reducer_road.ReducerRoad._buffers_changed"
_LAZY = "reducer.buckets.BucketState._lazy"
_IGNORED = "attachment.parameters.ignored_names"
_READ = "addresses.host_and_port"

#: Repairs that are undone, by number: the replaced names, and what replaces them.
FAULTS: dict[str, tuple[str, Any]] = {
    "1 a rank's own write is a load": ("attachment.local_steps.agree_on_anchors", mock.Mock()),
    "1 no write is a load": ("hooks.local_sgd.local_sgd.anchor_here", lambda *_: {}),
    "2 local steps take any optimizer": (_STEP, lambda steps, _, ids: _before(steps, None, ids)),
    "3 hooks on sharded parameters are never called": (_SHARDED, lambda _: False),
    "4 rank 0's values replace what is ignored": (
        "attachment.parameters.ignored_names",
        lambda _: (),
    ),
    "5 buckets have the parameters' dtype": (_DTYPE, lambda parameter: parameter.dtype),
    "6 optimizers step inside backward": ("step.bucket_hooks.is_in_backward", lambda: False),
    "7 each forward writes the buffers": (_CHANGED, property(lambda _: True, lambda *_: None)),
    "8 gradients stay lazy": (_LAZY, property(lambda _: (), lambda *_: None)),
    "9 brackets belong to the host": (_READ, lambda text: (text[: text.rindex(":")], 1)),
    "9 each host has an IPv4 address": ("elastic.ranks.own_address", lambda _: "127.0.0.1"),
    "10 each rank checks alone": ("attachment.attaching.agree", _raise_own),
}


@contextlib.contextmanager
def planted(fault: str) -> Any:
    names, new = FAULTS[fault] if fault else ("", None)
    with contextlib.ExitStack() as stack:
        for name in names.split():
            added = isinstance(new, property)  # in place of an attribute of each object
            stack.enter_context(mock.patch(f"torch_commhook.{name}", new, create=added))
        yield


def search(fault: str, seed: int, count: int) -> tuple[Counter[str], dict[str, Any]]:
    """The models of random histories, and the smallest history that fails, if any does."""
    models: Counter[str] = Counter()

    def fails(history: History) -> bool:
        models[history.model] += 1
        return problem(history) != ""

    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    options = hypothesis.settings(max_examples=count, database=None, deadline=None, phases=phases)
    with planted(fault), contextlib.suppress(hypothesis.errors.NoSuchExample):
        found = hypothesis.find(histories(), fails, settings=options, random=random.Random(seed))
        row = {"fault": fault, "seed": seed, "history": repr(found), "problem": problem(found)}
        print(row, flush=True)
        return models, row
    return models, {"fault": fault}


def main() -> int:
    begun, is_full = time.monotonic(), len(sys.argv) == 1
    seeds = [int(seed) for seed in sys.argv[1:] or range(8)]
    faults = [*FAULTS] if is_full else []
    with ProcessPoolExecutor(2, initializer=warnings.simplefilter, initargs=("ignore",)) as pool:
        none, zero, most = [""] * len(seeds), [0] * len(faults), [1000] * len(faults)
        rows = list(pool.map(search, none + faults, seeds + zero, [250] * len(seeds) + most))
    models = sum((counts for counts, row in rows if not row["fault"]), Counter[str]())
    wrong = [row for _, row in rows if "seed" in row and not row["fault"]]
    found = [row for _, row in rows if row["fault"]]
    missed = [row["fault"] for row in found if "seed" not in row]
    print(f"{models.total():,} histories: {len(wrong)} wrong; faults missed: {missed}")
    if is_full:
        counts = {"histories": models.total(), "models": dict(sorted(models.items()))}
        store(TABLE, begun, **counts, wrong=wrong, planted=found)
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
