"""The order of collectives of two stages on one process group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.collectives import compressed_call
from torch_commhook.collectives.futures import SecondStages
from torch_commhook.testing import run_ranks

ROADS = ["module", "ddp", "unused", "views"]
BUCKETS = 3


class Layers(nn.Module):
    """As many buckets as layers. Of one layer some ranks' gradients may be missing."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20, bias=bias) for _ in range(BUCKETS))
        self.left_out: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.left_out:
                x = layer(x).tanh()
        return x


class WithoutOverlap(hooks.compressed):
    """A subclass, of which the library does not know whether it waits."""


Log = dict[int, list[str]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What each rank issues, in order: the first letter of the collective."""
    found: Log = {}

    def noting(letter: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            found.setdefault(dist.get_rank(), []).append(letter)
            return issue(*args, **keywords)

        return run

    powersgd = sys.modules["torch_commhook.hooks.powersgd"]
    for module, name, letter in [
        (compressed_call, "issue_all_to_all", "1"),
        (compressed_call, "issue_all_gather", "2"),
        (powersgd, "all_reduce", "1"),
        (powersgd, "issue_all_reduce", "2"),
    ]:
        monkeypatch.setattr(module, name, noting(letter, getattr(module, name)))
    return found


def _wrapped(model: Layers, road: str, hook: Any) -> tuple[nn.Module, Any]:
    if road == "module":
        return model, attach(model, hook, bucket_cap_mb=0.001)
    wrapped = DDP(
        model,
        bucket_cap_mb=0.001,
        find_unused_parameters=road == "unused",
        gradient_as_bucket_view=road == "views",
    )
    return wrapped, attach(wrapped, hook)


def _train(rank: int, road: str, make: Callable[[], Any], bias: bool = False) -> list[Tensor]:
    model = Layers(bias)
    trained, handle = _wrapped(model, road, make())
    for number in range(3):
        model.left_out = 1 if road == "unused" and rank == number == 1 else None
        model.zero_grad()
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * number + rank))
        trained(x).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    handle.remove()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _blockwise() -> Any:
    return hooks.error_feedback(hooks.blockwise(8, 64))


MAKERS: dict[str, Callable[[], Any]] = {
    "blockwise": _blockwise,
    "powersgd": lambda: hooks.powersgd(2),
    "clip": lambda: hooks.clip(0.1, hooks.fp8()),
    "after": lambda: hooks.after(1, _blockwise()),
    "adaptive": lambda: hooks.adaptive(2000, block_size=64),
}


def of_steps(letters: list[str], step: str) -> bool:
    """Whether they are those of two steps or more. DDP may have one bucket in its first step."""
    steps = "".join(letters)
    if len(steps) % len(step) == 2:
        assert steps.startswith("12")
        steps = steps[2:]
    return steps == step * (len(steps) // len(step)) and len(steps) >= 2 * len(step)


def issued_with_the_bits_of_no_overlap(
    log: Log, road: str, make: Callable[[], Any], bias: bool = False
) -> Log:
    """What ranks issue in training, whose parameters do not depend on the overlap of stages."""
    got = run_ranks(_train, 2, road, make, bias)
    issued = dict(log)
    log.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks.Hook, "lets_stages_wait", False)
        want = run_ranks(_train, 2, road, make, bias)
    assert all(all(map(torch.equal, *each)) for each in zip(got, want, strict=True))
    return issued


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_second_stage_follows_the_next_first_one(log: Log, name: str, road: str) -> None:
    """With the bits that they have where nothing overlaps."""
    overlapping = issued_with_the_bits_of_no_overlap(log, road, MAKERS[name])
    for rank in range(2):
        assert of_steps(overlapping[rank], "112122"), overlapping[rank]
        assert of_steps(log[rank], "12" * BUCKETS), log[rank]


def _parts() -> Any:
    return hooks.policy([("dim <= 1", hooks.fp8()), ("*.0.*", hooks.powersgd(2))], _blockwise())


@pytest.mark.parametrize("road", ROADS)
def test_the_parts_of_a_policy_follow_each_other(log: Log, road: str) -> None:
    """Also across the buckets, each of which has a weight and a bias."""
    issued = issued_with_the_bits_of_no_overlap(log, road, _parts, bias=True)
    first = "" if road in ("module", "unused") else "112122"  # DDP's one bucket has three parts
    step = "1" + "12" * (2 * BUCKETS - 1) + "2"
    steps = step * (2 if first else 3)
    assert all("".join(issued[rank]) == first + steps for rank in range(2)), issued


class TwoKinds(nn.Module):
    """DDP's second bucket has the float64 layer alone, also when it has formed buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.double_layer = nn.Linear(20, 20, bias=False, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[2](self.double_layer(x.double()).float())


def _forms_buckets_anew(rank: int) -> None:
    trained = DDP(TwoKinds(), bucket_cap_mb=0.001)
    handle = attach(trained, _blockwise())
    for _ in range(3):
        trained(torch.ones(4, 20)).square().sum().backward()
    handle.remove()


def test_a_bucket_that_stays_is_not_taken_for_the_last(log: Log) -> None:
    run_ranks(_forms_buckets_anew, 2)
    assert all("".join(letters) == "1122" + "11212122" * 2 for letters in log.values()), log


def _joins(rank: int, road: str) -> None:
    """Rank 1 has one batch more."""
    trained, handle = _wrapped(Layers(), road, _blockwise())
    with handle.join():
        for _ in range(2 + rank):
            trained(torch.ones(4, 20)).square().sum().backward()
    handle.remove()


@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_rank_that_has_joined_keeps_the_order(log: Log, road: str) -> None:
    run_ranks(_joins, 2, road)
    assert log[0] == log[1]
    assert of_steps(log[0], "112122"), log[0]


@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_subclass_is_not_taken_for_one_that_does_not_wait(log: Log, road: str) -> None:
    codec = hooks.blockwise(8, 64).codec
    run_ranks(_train, 2, road, lambda: WithoutOverlap(codec))
    assert all(of_steps(log[rank], "12" * BUCKETS) for rank in range(2))


# ---- failures ------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


class FailsAt:
    """A method of a codec: raises when it is called so often that :attr:`left` is 0."""

    def __init__(self, codec: Any, name: str) -> None:
        self._real = getattr(codec, name)
        self.left = 100

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OwnError("boo")
        return self._real(*args, **keywords)


def _fails(rank: int, road: str, stage: str, call: int) -> tuple[list[str], list[str], int]:
    """Fails in the third step, when it calls a codec's method so often."""
    model = Layers()
    hook = hooks.blockwise(8, 64)
    fails = vars(hook.codec)[stage] = FailsAt(hook.codec, stage)
    trained, handle = _wrapped(model, road, hook)
    said, notes = [], []
    for number in range(3):
        if number == 2:
            fails.left = call
        try:
            trained(torch.ones(4, 20)).square().sum().backward()
            said.append("good")
        except OwnError as error:
            said.append(str(error))
            notes = [note for note in getattr(error, "__notes__", []) if "stage" in note]
    handle.remove()
    return said, notes, len(handle._attached.second_stages)


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("stage", ["encode", "reduce"])
def test_a_failure_lets_those_fail_that_wait(log: Log, stage: str, road: str) -> None:
    """On all ranks: none of them issues a stage behind it, or waits for one that never comes."""
    for said, _, waiting in run_ranks(_fails, 2, road, stage, 2):
        assert said == ["good", "good", "boo"]
        assert waiting == 0
    issued = "1" if stage == "encode" else "1121"
    first = "12" if road == "ddp" else "112122"
    assert ["".join(log[rank]) for rank in range(2)] == [f"{first}112122{issued}"] * 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_note_names_the_bucket_before_where_its_stage_failed(road: str) -> None:
    """Not where the last bucket's own stage did."""
    for call, found in [(2, ["in the second stage of the previous bucket"]), (3, [])]:
        for said, notes, waiting in run_ranks(_fails, 2, road, "reduce", call):
            assert (said[-1], notes, waiting) == ("boo", found, 0)


def _leaves_the_bucket(rank: int) -> int:
    """The second bucket's gradient is moved away from DDP's view of it."""
    model = Layers()
    trained, handle = _wrapped(model, "views", hooks.blockwise(8, 64))
    for _ in range(2):
        trained(torch.ones(4, 20)).square().sum().backward()
    gradient = model.layers[1].weight.grad
    gradient.data = gradient.data.clone()
    with pytest.raises(RuntimeError, match="is outside the memory"):
        trained(torch.ones(4, 20)).square().sum().backward()
    handle.remove()
    return len(handle._attached.second_stages)


def test_a_failure_before_the_hook_lets_those_fail_that_wait(log: Log) -> None:
    """The first bucket's second stage waits when DDP's reducer refuses the second bucket."""
    assert run_ranks(_leaves_the_bucket, 2) == [0, 0]
    assert ["".join(log[rank]) for rank in range(2)] == ["121121221"] * 2


def _leaves_a_backward(rank: int, removes: bool) -> int:
    """User code raises between the second bucket and the third."""
    model = Layers()
    handle = attach(model, hooks.blockwise(8, 64), bucket_cap_mb=0.001)

    def fails(_: Tensor) -> None:
        raise OwnError("boo")

    x = model.layers[0](torch.ones(4, 20))
    x.register_hook(fails)
    with pytest.raises(OwnError):
        model.layers[2](model.layers[1](x)).sum().backward()
    assert len(handle._attached.second_stages) == 1
    if removes:
        handle.remove()
    else:
        with pytest.raises(RuntimeError, match="make a new one"):
            model(torch.ones(4, 20)).sum().backward()
    return len(handle._attached.second_stages)


@pytest.mark.parametrize("removes", [False, True])
def test_a_backward_that_was_left_keeps_no_stage(log: Log, removes: bool) -> None:
    """Once there is another one, or the hook is taken off."""
    assert run_ranks(_leaves_a_backward, 2, removes) == [0, 0]
    assert all("".join(letters) == "112" for letters in log.values()), log


def test_stages_wait_for_the_next_call() -> None:
    stages, done = SecondStages(), []

    def fails() -> None:
        raise OwnError("boo")

    def add(number: int, issue: Callable[[], None] | None = None) -> None:
        stages.add(
            issue or (lambda: done.append(number)), lambda error: done.append(f"{number} {error}")
        )

    add(1)
    assert done == []
    stages.issue()
    stages.issue()
    add(2, fails)
    add(3)
    with pytest.raises(OwnError):
        stages.issue()
    add(4)
    stages.give_up(OwnError("left"))
    assert done == [1, "2 boo", "3 boo", "4 left"]
    assert len(stages) == 0
