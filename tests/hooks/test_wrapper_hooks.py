"""Hooks around hooks: when, how much, which parameters, how many bits."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, hooks, process_group
from torch_commhook.hooks.base import HookTraits
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.testing import run_ranks, simulate


class Net(nn.Module):
    """A norm, an embedding, and matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(self.embedding(x)))


def step(model: nn.Module, rank: int, number: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = torch.randint(64, (8, 5), generator=torch.Generator().manual_seed(10 * number + rank))
    model(x).square().sum().backward()
    module = model.module if isinstance(model, DDP) else model
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def run(rank: int, hook: str, on_ddp: bool, steps: int) -> dict[str, Any]:
    net = Net()
    model = DDP(net, bucket_cap_mb=0.01) if on_ddp else net
    handle = attach(model, parse_hook(hook), **({} if on_ddp else {"bucket_cap_mb": 0.01}))
    gradients, sent = [], []
    for number in range(steps):
        gradients.append(step(model, rank, number))
        sent.append(handle.stats().bytes_sent_last_step)
    stats = handle.stats()
    handle.remove()
    return {"gradients": gradients, "sent": sent, "stats": stats}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


ROADS = pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])


# ---- after ---------------------------------------------------------------------------------------


@ROADS
@on_ranks(2)
def test_after_changes_between_two_steps(rank: int, on_ddp: bool) -> None:
    plain = run(rank, "allreduce()", on_ddp, 4)
    coded = run(rank, "blockwise(bits=4)", on_ddp, 4)
    both = run(rank, "after(2, blockwise(bits=4))", on_ddp, 4)
    assert all(map(same, both["gradients"], plain["gradients"][:2] + coded["gradients"][2:]))
    assert both["sent"] == plain["sent"][:2] + coded["sent"][2:]


def test_after_with_another_hook_before() -> None:
    hook = parse_hook("after(1, sign(), before=cast(float16))")
    gradients = [[torch.randn(500)] for _ in range(2)]
    assert simulate(hook, gradients).wire_bytes == 1000
    assert simulate(hook, gradients, steps=2).wire_bytes < 200


# ---- clip ----------------------------------------------------------------------------------------


def test_a_hook_that_names_its_segments_by_their_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="old.shards is deprecated: use segments") as told:

        class old(hooks.allreduce):  # noqa: N801
            def prepare(self, memory: BucketMemory) -> None:
                memory.flat("error")
                memory.shard("shard_error", 0, 2, 1)

            def shards(self, memory: BucketMemory) -> list[str]:
                return list(memory.segments)

    assert [each.filename for each in told] == [__file__]
    hook = hooks.policy([], default=old())
    with pytest.warns(DeprecationWarning, match=r"BucketMemory\.shard is deprecated: use segment"):
        memory = HookMemory().memory_of_bucket([torch.zeros(4)], 0, old().prepare)
    assert hook.segments(memory) == ["shard_error"]
    with pytest.warns(DeprecationWarning, match=r"shards is deprecated: use segments"):
        assert hook.shards(memory) == ["shard_error"]


@ROADS
@on_ranks(2)
def test_clip_is_clip_grad_norm(rank: int, on_ddp: bool) -> None:
    plain, clipped = (
        run(rank, hook, on_ddp, 2)["gradients"] for hook in ("allreduce()", "clip(2.0)")
    )
    norms = []
    for gradients, found in zip(plain, clipped, strict=True):
        wanted = [gradient.clone() for gradient in gradients.values()]
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in wanted]
        for parameter, gradient in zip(parameters, wanted, strict=True):
            parameter.grad = gradient
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 2.0)))
        torch.testing.assert_close(list(found.values()), wanted)
    assert min(norms) > 2
    untouched = run(rank, f"clip({2 * max(norms)})", on_ddp, 2)["gradients"]
    assert all(map(same, untouched, plain))


@pytest.mark.parametrize(
    "hook",
    [
        hooks.clip(1.0),
        hooks.after(1, hooks.clip(1.0)),
        hooks.error_feedback(hooks.clip(1, hooks.sign())),
    ],
    ids=str,
)
def test_clip_sees_all_buckets_only_where_it_is_attached(hook: hooks.Hook) -> None:
    with pytest.raises(RuntimeError, match=r"use torch_commhook\.attach"):
        simulate(hook, [[torch.randn(3)]])


# ---- policy --------------------------------------------------------------------------------------

POLICY = "policy([('dim <= 1', allreduce()), ('embedding*', topk(1.0))], blockwise(bits=4))"


@ROADS
@on_ranks(2)
def test_policy_gives_each_parameter_its_hook(rank: int, on_ddp: bool) -> None:
    plain, mixed = (run(rank, hook, on_ddp, 3)["gradients"][2] for hook in ("allreduce()", POLICY))
    assert same(*of_all_ranks(mixed))
    for name, want in plain.items():
        if want.dim() <= 1 or name.startswith("embedding"):
            torch.testing.assert_close(mixed[name], want)
        else:
            assert 0.01 < float((mixed[name] - want).norm() / want.norm()) < 0.5, name


def test_policy_by_size_and_in_error_feedback() -> None:
    hook = parse_hook("error_feedback(policy([('numel < 100', allreduce())], sign()))")
    gradients = [[torch.randn(50), torch.randn(2048)] for _ in range(2)]
    result = simulate(hook, gradients)
    mean = (gradients[0][0] + gradients[1][0]) / 2
    torch.testing.assert_close(result.result[0], mean)
    assert result.wire_bytes == 50 * 4 + 2 * (1024 // 8 + 16)
    # What is not sent is remembered: over many steps the mean of the results is that of gradients.
    own = hook.hook
    assert own.takes_error and hook.has_stages and own.is_lossy
    with pytest.raises(RuntimeError, match="only an attached hook knows"):
        simulate(parse_hook("policy([('*.bias', allreduce())], sign())"), gradients)


# ---- adaptive ------------------------------------------------------------------------------------


@ROADS
@on_ranks(2)
def test_adaptive_keeps_its_budget(rank: int, on_ddp: bool) -> None:
    def trained(hook: str, steps: int) -> tuple[dict[str, Any], int]:
        """What a run gives, and rank 0's bytes in the last step."""
        found = run(rank, hook, on_ddp, steps)
        return found, of_all_ranks(found["sent"][-1])[0]

    _, four = trained("error_feedback(blockwise(bits=4))", 3)
    _, eight = trained("error_feedback(blockwise())", 3)
    for budget in (four, (four + eight) // 2, eight):
        found, last = trained(f"adaptive({budget}, every=2)", 5)
        assert all(sent <= budget for sent in found["sent"][2:])
        assert same(*of_all_ranks(found["gradients"][-1]))
        assert last == four if budget == four else last > four
    assert last == eight


def test_adaptive_says_that_a_budget_is_too_small() -> None:
    with pytest.warns(UserWarning, match="with 4 bits for each value a step sends"):
        simulate(hooks.adaptive(10), [[torch.randn(1000)]] * 2, steps=3)


# ---- what they tell ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "after(3, blockwise())",
        "after(3, sign(), before=cast(float16))",
        "clip(1)",
        "clip(0.12345612)",
        "clip(0.5, error_feedback(sign()))",
        "error_feedback(blockwise(bits=4))",
        "error_feedback(powersgd(rank=2, min_compression_rate=1.5, seed=3))",
        "policy()",
        "policy([('dim <= 1', allreduce())], blockwise())",
        "policy(default=sign())",
        "adaptive(1000)",
        "adaptive(1000, every=5)",
        "auto(max_error=0.05)",
        "auto(max_error=0.1, hooks=[blockwise(bits=4), error_feedback(topk(density=0.1))])",
        "blockwise(bits=4, seed=3)",
        "topk(density=0.1)",
        "powersgd(rank=1)",
        "local_sgd(8)",
        "local_sgd(8, fragments=3, delay=2, mix=0.25)",
        "local_sgd(8, outer=outer_sgd(lr=1.0, momentum=0.0, nesterov=True), hook=cast(bfloat16))",
        "local_sgd(1, hook=error_feedback(sign()), error_reset=True)",
    ],
)
def test_hooks_print_as_they_are_written(text: str) -> None:
    hook = parse_hook(text)
    for each in (hook, copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(each) == text


def test_defaults_of_hooks() -> None:
    assert repr(hooks.powersgd()) == "powersgd(rank=1)"
    outer = hooks.outer_sgd(0.7, 0.9)
    assert repr(hooks.local_sgd(8, outer=outer, fragments=1, delay=0, mix=0)) == "local_sgd(8)"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("random_first", [False, True])
def test_each_hook_draws_its_own_numbers(ranks: int, random_first: bool) -> None:
    """Of two hooks in turn one draws alike on all ranks, the other does not."""
    alike, apart = hooks.randomk(0.3, seed=3), hooks.blockwise(rounding="stochastic", seed=4)
    before, hook = (alike, apart) if random_first else (apart, alike)
    gradients = [[torch.randn(30, 20)] for _ in range(ranks)]

    def on_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = []
        for each in (hooks.after(2, hook, before=before), hook):
            parameter = nn.Parameter(torch.zeros(30, 20))
            model = Holder(parameter)
            handle = attach(model, each)
            for _ in range(4):
                parameter.grad = None
                model(gradients[rank][0]).backward()
            handle.remove()
            assert parameter.grad is not None
            both.append(parameter.grad)
        return both[0], both[1]

    found = run_ranks(on_rank, ranks)
    for mixed, alone in found:
        assert torch.equal(mixed, found[0][0])
        assert torch.equal(mixed, alone)


class Holder(nn.Module):
    """A module of one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.parameter * gradient).sum()


@on_ranks(4)
def test_error_feedback_over_a_group_of_its_own(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hook = hooks.error_feedback(hooks.blockwise(bits=4, process_group=pairs[rank // 2]))
    parameter = nn.Parameter(torch.zeros(40, 13))
    model = Holder(parameter)
    handle = attach(model, hook)
    values = [
        torch.randn(40, 13, generator=torch.Generator().manual_seed(other)) for other in range(4)
    ]
    total = torch.zeros(40, 13)
    for _ in range(50):
        parameter.grad = None
        model(values[rank]).backward()
        assert parameter.grad is not None
        total += parameter.grad
    handle.remove()
    pair = rank // 2 * 2
    assert (total / 50 - (values[pair] + values[pair + 1]) / 2).abs().max() < 0.03
    every = of_all_ranks(total)
    assert torch.equal(every[pair], every[pair + 1])


@ROADS
@on_ranks(2)
def test_clip_of_complex_gradients(rank: int, on_ddp: bool) -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    model: nn.Module = Holder(parameter)
    model = DDP(model) if on_ddp else model
    handle = attach(model, hooks.clip(1.0))
    model(torch.full((4,), 3 + 4j)).real.backward()
    assert parameter.grad is not None
    assert torch.view_as_real(parameter.grad).norm().item() == pytest.approx(1.0, rel=1e-4)
    handle.remove()


@ROADS
@on_ranks(2)
def test_clip_for_some_of_the_steps(rank: int, on_ddp: bool) -> None:
    """Where :class:`after` changes to another hook, what scales its steps changes too."""
    plain, always, first, last = (
        run(rank, hook, on_ddp, 4)["gradients"]
        for hook in (
            "allreduce()",
            "clip(2.0)",
            "after(2, allreduce(), before=clip(2.0))",
            "after(2, clip(2.0))",
        )
    )
    assert not same(plain[0], always[0])
    assert all(map(same, first, always[:2] + plain[2:]))
    assert all(map(same, last, plain[:2] + always[2:]))


def test_policy_of_complex_gradients() -> None:
    """Of two rules in one bucket; what is lost of them is refused by those that lose something."""
    shapes = [(5,), (4, 3), (2, 2)]
    values = [[torch.randn(shape, dtype=torch.complex64) for shape in shapes] for _ in range(2)]
    rules = [("dim <= 1", hooks.allreduce()), ("numel < 5", hooks.allreduce())]
    got = simulate(hooks.policy(rules, hooks.allreduce()), values).result
    for mean, *pair in zip(got, *values, strict=True):
        torch.testing.assert_close(mean, sum(pair) / 2)
    with pytest.raises(TypeError, match="complex"):
        simulate(hooks.policy(rules, hooks.blockwise()), values)


class Unprinted(hooks.Hook):
    """Of one's own, with a ``__repr__`` that nobody has written."""

    takes_error = True

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hooks.allreduce().average(bucket)


def test_what_a_class_an_object_or_a_property_says_holds_around_it() -> None:
    class Saying(Unprinted):
        is_lossy = True

        def __init__(self) -> None:
            super().__init__()
            self.settles_buckets = True

        @property
        def has_stages(self) -> bool:
            return True

    around = hooks.clip(1.0, hooks.error_feedback(Saying()))
    assert around.traits == HookTraits(
        is_lossy=True, settles_buckets=True, has_stages=True, keeps_error=True, scales_steps=True
    )


@on_ranks(2)
def test_hooks_of_ones_own_inside_of_others(rank: int) -> None:
    for hook, name in (
        (Unprinted(), "Unprinted()"),
        (hooks.error_feedback(Unprinted()), "error_feedback(Unprinted())"),
        (hooks.clip(1.0, Unprinted()), "clip(1, Unprinted())"),
    ):
        model = nn.Linear(3, 2)
        handle = attach(model, hook)
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert repr(handle.hook) == name
        handle.remove()


@on_ranks(2)
def test_stats_are_of_their_moment(rank: int) -> None:
    model = nn.Linear(3, 2)
    handle = attach(model, hooks.allreduce())
    found = []
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        found.append(handle.stats())
    handle.remove()
    assert [stats.bytes_sent for stats in found] == [32, 64]


@pytest.mark.parametrize(
    "hook",
    ["blockwise()", "error_feedback(sign())", "topk(0.1)", "randomk(0.1)", "chunk_topk()", POLICY],
)
@on_processes
def test_bytes_are_those_on_the_wire(rank: int, hook: str) -> None:
    recording = process_group.RecordingProcessGroup(dist.group.WORLD)
    net = Net()
    handle = attach(net, parse_hook(hook), process_group=recording, bucket_cap_mb=0.01)
    step(net, rank, 0)  # also what is sent when a module is attached, and once after a first step
    recording.clear()
    for number in range(3):
        step(net, rank, number)
    assert recording.total.bytes_sent == 3 * handle.stats().bytes_sent_last_step > 0
    handle.remove()


def test_all_gathered_messages_warn_where_a_cast_is_better() -> None:
    gradients = [[torch.randn(1000)] for _ in range(8)]
    with pytest.warns(UserWarning, match="more bytes than cast"):
        simulate(hooks.topk(0.1), gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(hooks.topk(0.05), gradients)
        simulate(hooks.blockwise(), gradients)


def test_stats_of_messages() -> None:
    result = run_ranks(run, 2, "error_feedback(blockwise(bits=4))", False, 3)[0]
    stats = result["stats"]
    assert 7 < stats.compression_ratio < 8
    assert stats.bytes_received == sum(bucket.bytes_received for bucket in stats.buckets)
    for bucket in stats.buckets:
        assert 0.02 < bucket.relative_error < 0.3
        assert bucket.encode_seconds > 0 and bucket.decode_seconds > 0 and bucket.wire_seconds > 0
    plain = run_ranks(run, 2, "allreduce()", False, 3)[0]["stats"]
    assert plain.compression_ratio == 1
    assert all(bucket.relative_error is None for bucket in plain.buckets)
