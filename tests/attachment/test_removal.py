"""Hooks that are removed: in the midst of a backward, after one that failed, and what stays."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import BUCKET_CAP_MB, Net, batch, differing, gradients_of
from mode_cases import compiled_backward
from on_ranks import on_processes
from rank_pool import RankPool
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.hooks.expressions import parse_hook

HOOKS: dict[str, Any] = {
    "python": hooks.allreduce,
    "cpp": lambda: hooks.cpp("allreduce"),
}
by_hook = pytest.mark.parametrize("hook", HOOKS)
by_model = pytest.mark.parametrize("use_ddp", [False, True], ids=["module", "ddp"])


def attached(model: nn.Module, use_ddp: bool, hook: Any) -> tuple[nn.Module, Any]:
    if use_ddp:
        model = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
        return model, attach(model, hook)
    return model, attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)


# ---- in the midst of a backward ------------------------------------------------------------------

PLACES = ["tensor", "hook", "prehook", "posthook", "post_accumulate_hook"]


@pytest.mark.parametrize(
    ("road", "place"),
    [
        *((road, place) for road in ("module", "ddp") for place in PLACES),
        *(("compiled", place) for place in PLACES[1:]),
    ],
)
@on_processes
def test_in_the_midst_of_a_backward(rank: int, road: str, place: str) -> None:
    """The backward goes on to its end, and another hook can be attached after it."""
    torch._dynamo.reset()
    model, handle = attached(Net(), road == "ddp", hooks.allreduce())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.02)
    model(batch(rank)).sum().backward()  # the buckets are formed anew after it
    mean = gradients_of(model)
    model.zero_grad()

    def remove(*values: Any) -> None:
        handle.remove()

    def removing_hook(state: object, bucket: GradBucket) -> Any:
        handle.remove()
        return hooks.allreduce().average(bucket)

    x = batch(rank).requires_grad_(place == "tensor")
    if place == "tensor":
        x.register_hook(remove)  # the last to be called
    elif place == "hook":
        handle.replace(removing_hook)
    else:
        getattr(handle, f"register_{place}")(remove)
    with compiled_backward(road == "compiled"):
        model(x).sum().backward()
    averaged = gradients_of(model)
    model.zero_grad()
    again = attach(model, hooks.allreduce())
    model(batch(rank)).sum().backward()
    assert differing(mean, averaged) == [] and differing(mean, gradients_of(model)) == []
    assert again.is_attached


@pytest.mark.usefixtures("one_rank")
def test_another_one_waits_for_the_end() -> None:
    model, handle = attached(Net(), False, hooks.allreduce())

    def exchange(gradients: Any) -> None:
        handle.remove()
        attach(model, hooks.cast())

    handle.register_prehook(exchange)
    with pytest.raises(RuntimeError, match=r"that is still running; attach the next one after"):
        model(batch(0)).sum().backward()
    attach(model, hooks.cast()).remove()


REPLACED = [
    ("error_feedback(blockwise(bits=4))", "error_feedback(powersgd(rank=1))"),
    ("adaptive(20000)", "allreduce()"),
    ("policy()", "sign()"),
    ("allreduce()", "error_feedback(topk(0.1))"),
]


@pytest.mark.usefixtures("one_rank")
@by_model
@pytest.mark.parametrize(("first", "second"), REPLACED)
def test_a_backward_goes_on_with_the_hook_that_is_replaced_in_it(
    first: str, second: str, use_ddp: bool
) -> None:
    found = []
    for replaces in (False, True):
        torch.manual_seed(0)
        model, handle = attached(Net(), use_ddp, parse_hook(first))
        for _ in range(2):
            model.zero_grad()
            model(batch(0)).sum().backward()

        def replace(gradients: Any, of: Any = handle, replaces: bool = replaces) -> None:
            if replaces and repr(of.hook) == repr(parse_hook(first)):
                of.replace(parse_hook(second))

        handle.register_prehook(replace)
        model.zero_grad()
        model(batch(0)).sum().backward()
        found.append(gradients_of(model))
        if replaces:
            model(batch(0)).sum().backward()
            assert handle.stats().steps == 1
            steps = 0 if second in ("allreduce()", "sign()") else 1
            assert handle.state_dict().get("steps", 0) == steps
        handle.remove()
    assert differing(*found) == []


# ---- what stays ----------------------------------------------------------------------------------


def _boom(gradient: torch.Tensor) -> None:
    raise ValueError("boom")


@pytest.mark.usefixtures("one_rank")
@by_hook
@pytest.mark.parametrize("failed", [False, True], ids=["well", "failed"])
def test_a_removed_handle_keeps_no_parameters(hook: str, failed: bool) -> None:
    model, handle = attached(Net(), False, HOOKS[hook]())
    handle.remove()
    model.layers[0].requires_grad_(False)
    model, handle = attached(model, False, HOOKS[hook]())
    model(batch(0)).sum().backward()
    if failed:
        model.layers[2].weight.register_hook(_boom)
        with pytest.raises(ValueError, match="boom"):
            model(batch(0)).sum().backward()
    handle.remove()
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    torch.ones(2, requires_grad=True).sum().backward()  # PyTorch drops what the last one has left
    gc.collect()
    assert [reference() is None for reference in left] == [True] * len(left)
    assert handle.stats().steps == 1


MEMORIES = [
    "allreduce()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(powersgd(rank=2))",
    "adaptive(20000)",
    "policy()",
    "local_sgd(2)",
    "local_sgd(2, hook=error_feedback(blockwise()), error_reset=True)",
    "local_sgd(2, hook=error_feedback(blockwise()), delay=1)",
]


@pytest.fixture
def swapping() -> Iterator[None]:
    """Conversions of a module's parameters go through ``torch.utils.swap_tensors``."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def flat(state: dict[str, Any], *above: str) -> dict[tuple[str, ...], Any]:
    """The values of a state, by the keys that lead to them; numbers of tensors as lists."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, *above, key)
        else:
            plain = value.tolist() if isinstance(value, torch.Tensor) else value
            found[(*above, key)] = plain
    return found


def stepped(model: nn.Module, inner: nn.Module) -> None:
    model(batch(0)).sum().backward()
    torch.optim.SGD(inner.parameters(), lr=0.01).step()
    inner.zero_grad()
    torch.ones(2, requires_grad=True).sum().backward()  # PyTorch drops what the last one has left


@pytest.mark.usefixtures("one_rank", "swapping")
@by_model
@pytest.mark.parametrize("hook", MEMORIES)
def test_a_removed_handle_has_its_state_and_no_parameters(hook: str, use_ddp: bool) -> None:
    inner = Net()
    model, handle = attached(inner, use_ddp, parse_hook(hook))
    for _ in range(2):
        stepped(model, inner)
    before, steps = flat(handle.state_dict()), handle.stats().steps
    handle.remove()
    assert flat(handle.state_dict()) == before
    del model  # a DDP itself keeps the parameters
    gc.collect()
    assert not any(weakref.getweakrefcount(parameter) for parameter in inner.parameters())
    inner.to(torch.float64)  # raises where something refers to the parameters
    assert (handle.stats().steps, handle.is_attached) == (steps, False)
    after = flat(handle.state_dict())
    if use_ddp:  # which is gone, and with it the way to the parameters of ``local_sgd``
        before = {key: value for key, value in before.items() if "local_sgd_parameter" not in key}
        after = {key: value for key, value in after.items() if "local_sgd_parameter" not in key}
    assert after == before


@pytest.mark.usefixtures("one_rank", "swapping")
@by_model
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failed"])
def test_a_handle_that_is_removed_in_a_backward_lets_parameters_go_after_it(
    fails: bool, use_ddp: bool
) -> None:
    """Until then the hook goes on with what it remembers."""
    inner = Net()
    model, handle = attached(inner, use_ddp, parse_hook("error_feedback(blockwise(bits=4))"))
    for _ in range(2):  # DDP forms its buckets anew after the first
        stepped(model, inner)
    state = flat(handle.state_dict())

    def remove(gradients: Any) -> None:
        handle.remove()
        if fails:
            raise ValueError("boom")

    handle.register_prehook(remove)
    with pytest.raises(ValueError, match="boom") if fails else nullcontext():
        stepped(model, inner)
    inner.zero_grad()
    torch.ones(2, requires_grad=True).sum().backward()
    found = flat(handle.state_dict())
    assert found.keys() == state.keys()
    assert found[("steps",)] == (2 if fails else 3)
    if not fails:
        errors = [key for key in state if "error" in key]
        assert errors and any(found[key] != state[key] for key in errors)
    del model
    gc.collect()
    inner.to(torch.float64)


class Hooked(nn.Linear):
    """A model that a hook's state refers to."""


@pytest.mark.usefixtures("one_rank")
@by_model
def test_a_hook_that_refers_to_the_model(use_ddp: bool) -> None:
    inner = Hooked(2, 2)
    model = DDP(inner) if use_ddp else inner
    handle = attach(model, lambda state, bucket: bucket.buffer(), state=model)
    seen: list[int] = []

    def note(bucket: GradBucket, of: nn.Module = model) -> None:
        seen.append(id(of))

    handle.register_post_accumulate_hook(note)
    model(torch.ones(2)).sum().backward()
    handle.remove()
    assert seen == [id(model)]
    left = weakref.ref(inner)
    del model, handle, inner, note
    gc.collect()
    assert left() is None


@pytest.mark.usefixtures("one_rank")
def test_ddp_keeps_no_workspace_of_a_hook_that_is_gone() -> None:
    model, handle = attached(Net(), True, hooks.cast())
    model(batch(0)).sum().backward()
    left = weakref.ref(handle.hook)
    handle.remove()
    del handle
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("how", ["kept", "removed"])
@by_hook
def test_a_process_ends_after_a_backward_that_failed(tmp_path: Path, hook: str, how: str) -> None:
    """The engine's queue still holds a callback, which goes when its thread does."""
    script = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_commhook import attach, hooks
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
ddp = DDP(model, bucket_cap_mb=0.0003)
handle = attach(ddp, {"hooks.allreduce()" if hook == "python" else "hooks.cpp('allreduce')"})
for _ in range(2):
    ddp(torch.ones(8)).sum().backward()
def boom(gradient):
    raise ValueError("boom")
model[1].weight.register_hook(boom)
try:
    ddp(torch.ones(8)).sum().backward()
except ValueError:
    print("boom", flush=True)
{"handle.remove()" if how == "removed" else ""}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "boom\n"), done.stderr


# ---- the store -----------------------------------------------------------------------------------


def _keys(rank: int) -> list[int]:
    store = distributed_c10d._get_default_store()
    counts = []
    for _ in range(3):
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
        model = nn.Linear(4, 4)
        handle = attach(model, hooks.blockwise())  # two groups
        model(torch.ones(1, 4)).sum().backward()
        handle.remove()
        for thread in threading.enumerate():
            if thread.name == "commhook-address":
                thread.join()
    return counts


def test_the_store_keeps_nothing(two_ranks: RankPool) -> None:
    for counts in two_ranks.run(_keys):
        assert len(set(counts)) == 1, counts
