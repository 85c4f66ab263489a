"""A watch of replicas: it finds ranks that differ, names them, and can repair them."""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as torch_optimizer

from torch_commhook import ReplicasDifferError, ReplicaWatch, attach, hooks, watch_replicas
from torch_commhook.attachment.replicas import digests_of
from torch_commhook.testing import run_ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def flip(tensor: Tensor, bit: int = 20) -> None:
    """Flip a bit of a tensor's last element of 4 bytes."""
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[-1] ^= 1 << bit


class Training:
    def __init__(self, rank: int, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.rank = rank
        self.model = network()
        self.handle = attach(self.model, hooks.allreduce())
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self._number = 0

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._number += 1
            torch.manual_seed(10 * self._number + self.rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(6, 4)).square().sum().backward()
            self.optimizer.step()

    def state(self) -> list[Tensor]:
        states = [value for each in self.optimizer.state.values() for value in each.values()]
        return [each.detach().clone() for each in [*self.model.parameters(), *states]]


# ---- what is found, and when ---------------------------------------------------------------------


def test_comparisons_end_in_the_next_step() -> None:
    def train(rank: int) -> list[int | None]:
        run = Training(rank)
        with watch_replicas(run.model, every=3) as watch:
            checked = []
            for _ in range(7):
                run.step()
                checked.append(watch.checked)
        return [*checked, watch.checked]

    assert run_ranks(train, 2) == [[None, 1, 1, 3, 3, 3, 6, 6]] * 2


@pytest.mark.parametrize("what", ["parameter", "state"])
def test_a_flipped_bit_is_named_on_all_ranks(what: str) -> None:
    def train(rank: int) -> tuple[list[int], str, list[int], int]:
        run = Training(rank)
        watch = watch_replicas(run.model, every=2)
        run.step(4)
        if rank == 1:
            last = list(run.model.parameters())[-1]
            flip(last if what == "parameter" else run.optimizer.state[last]["exp_avg"])
        with pytest.raises(ReplicasDifferError, match="rank 1 has other values of") as caught:
            run.step(3)
        error = pickle.loads(pickle.dumps(caught.value))
        watch.remove()
        return error.ranks, error.names[-1], [error.step], watch.steps

    assert run_ranks(train, 3) == [([1], "2.bias", [6], 7)] * 3


def test_a_bypassed_ddp() -> None:
    def train(rank: int) -> list[str]:
        model = DDP(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = watch_replicas(model)
        model.module(torch.full((2, 3), float(rank))).sum().backward()
        optimizer.step()
        with pytest.raises(ReplicasDifferError, match="none is that of most ranks") as caught:
            watch.check()
        watch.remove()
        assert caught.value.ranks == [0, 1]
        return caught.value.names

    assert run_ranks(train, 2) == [["module.weight"]] * 2


def test_replicas_of_shards() -> None:
    def train(rank: int) -> tuple[list[str], list[int]] | None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = watch_replicas(model)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        optimizer.step()
        if rank == 3:  # with the second shard
            weight: Any = model[1].weight
            flip(weight.to_local())
        try:
            watch.check()
            return None
        except ReplicasDifferError as error:
            return error.names, error.ranks
        finally:
            with watch:
                pass

    alike, differs = None, (["1.weight"], [3])
    assert run_ranks(train, 6) == [alike, differs] * 3


def test_buffers_are_compared_on_request() -> None:
    def train(rank: int) -> list[str]:
        run = Training(rank)
        with watch_replicas(run.model) as watch:
            run.step()
            watch.check()
        with watch_replicas(run.model, buffers=True) as watch:
            with pytest.raises(ReplicasDifferError) as caught:
                watch.check()
        return caught.value.names

    assert run_ranks(train, 2) == [["1.running_mean", "1.running_var"]] * 2


# ---- what follows --------------------------------------------------------------------------------


def test_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def train(rank: int) -> int | None:
        run = Training(rank)
        with watch_replicas(run.model, every=1, on_difference="warn") as watch:
            run.step()
            if rank == 2:
                flip(next(run.model.parameters()))
            run.step(2)
        return watch.checked

    with caplog.at_level(logging.WARNING, "torch_commhook.attachment.replicas"):
        assert run_ranks(train, 3) == [3] * 3
    texts = [each.getMessage() for each in caplog.records if "rank 2 has other" in each.message]
    assert len(texts) == 6 and "'0.weight'" in texts[0]  # two comparisons on three ranks


@pytest.mark.parametrize("what", ["parameter", "state", "lost state"])
def test_a_repair(what: str) -> None:
    def train(rank: int) -> list[Tensor]:
        run = Training(rank)
        watch = watch_replicas(run.model, every=1, on_difference="repair")
        run.step(2)
        if rank == 0:
            first = next(run.model.parameters())
            if what == "parameter":
                flip(first)
            elif what == "state":
                flip(run.optimizer.state[first]["exp_avg_sq"])
            else:
                run.optimizer.state[first].clear()
        run.step(2)
        run.step()
        after = run.state()
        watch.check()
        watch.remove()
        return after

    found = run_ranks(train, 3)
    for state in found[1:]:
        assert all(map(torch.equal, state, found[0]))


def test_of_two_ranks_nobody_knows_who_is_right() -> None:
    def train(rank: int) -> None:
        run = Training(rank)
        watch = watch_replicas(run.model, every=1, on_difference="repair")
        if rank == 1:
            flip(next(run.model.parameters()))
        with pytest.raises(ReplicasDifferError, match=r"ranks 0, 1 have different values"):
            watch.check()
        watch.remove()

    run_ranks(train, 2)


def test_ranks_at_different_steps() -> None:
    def train(rank: int) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = watch_replicas(model, every=100)
        watch.steps = 5 + rank  # as if one had skipped a step
        with pytest.raises(RuntimeError, match=r"equally many steps .*; they have taken \[5, 6\]"):
            watch.check()
        watch.remove()
        del optimizer

    run_ranks(train, 2)


# ---- optimizers ----------------------------------------------------------------------------------


def test_steps_inside_an_optimizer_do_not_count() -> None:
    def train(rank: int) -> tuple[int, int | None]:
        run = Training(
            rank,
            lambda parameters, lr: ZeroRedundancyOptimizer(
                parameters, optimizer_class=torch.optim.SGD, lr=lr
            ),
        )
        with watch_replicas(run.model, every=1) as watch:
            run.step(3)
        return watch.steps, watch.checked

    assert run_ranks(train, 2) == [(3, 3)] * 2


def test_one_of_several_optimizers_counts() -> None:
    def train(rank: int) -> int:
        model = network()
        first, *others = model.parameters()
        other = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(each, lr=0.1) for each in ([first], others)]
        elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
        with watch_replicas(model) as watch:
            for optimizer in (*optimizers, elsewhere):
                optimizer.step()
        return watch.steps

    assert run_ranks(train, 2) == [1, 1]


def test_a_watch_ends_with_its_model() -> None:
    def train(rank: int) -> None:
        model = network()
        watch_replicas(model)
        assert torch_optimizer._global_optimizer_post_hooks
        dist.barrier()
        del model
        gc.collect()

    run_ranks(train, 2)
    assert not torch_optimizer._global_optimizer_post_hooks


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every must be an int, got float"),
        ({"on_difference": "mend"}, ValueError, "must be one of 'raise', 'warn', 'repair', got"),
        ({"buffers": 1}, TypeError, "buffers must be a bool, got int"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    def train(rank: int) -> None:
        model = arguments.get("model", network())
        options = {name: value for name, value in arguments.items() if name != "model"}
        with pytest.raises(error, match=text):
            watch_replicas(model, **options)

    run_ranks(train, 2)


def test_models_without_replicas() -> None:
    def alone(rank: int) -> None:
        with pytest.raises(ValueError, match="no parameter has a replica: there is one rank"):
            watch_replicas(network())

    def sharded(rank: int) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="no parameter has a replica"):
            watch_replicas(model)
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
        with pytest.raises(ValueError, match="DTensors can't be repaired"):
            watch_replicas(model, on_difference="repair")

    def local(rank: int) -> None:
        model = network()
        watch = watch_replicas(model)
        handle = attach(model, hooks.local_sgd(4))
        for call in (watch.check, lambda: watch_replicas(model)):
            with pytest.raises(ValueError, match="keeps the ranks' parameters apart"):
                call()
        handle.remove()
        watch.remove()

    run_ranks(alone, 1)
    run_ranks(sharded, 2)
    run_ranks(local, 2)


# ---- the sum of bits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("numel", [1, 7, 8, 33])
def test_each_bit_counts(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(0)
    size = numel * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 200, (3 + size,), dtype=torch.uint8)
    start = 0 if dtype.itemsize > 1 else 3  # a view at any place
    own = data[start : start + size].view(dtype)
    (before,) = digests_of([own])
    for byte in range(size):
        for bit in range(1 if dtype == torch.bool else 8):
            data[start + byte] ^= 1 << bit
            assert digests_of([own]) != [before]
            data[start + byte] ^= 1 << bit
    assert digests_of([own]) == [before]


def test_strides_and_other_tensors() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert digests_of([tensor.T]) == digests_of([tensor.T.contiguous()])
    assert digests_of([torch.empty(0), tensor]) == [0, *digests_of([tensor])]
    assert digests_of([torch.tensor(3.0)]) == digests_of([torch.tensor([3.0])])
    with pytest.raises(ReplicasDifferError):
        raise ReplicasDifferError("text", 1, [], [])
    assert ReplicaWatch.__doc__ and dist.is_available()
