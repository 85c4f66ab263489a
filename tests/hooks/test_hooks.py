"""The library's hooks under DDP, on two ranks: values, wire bytes, buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, collectives, hooks
from torch_commhook.hooks.expressions import parse_hook

WORLD_SIZE = 2
#: Unit roundoff of the dtype that travels, and how often a value is rounded to it: once by each
#: rank and once by the sum.
ROUNDING = {"allreduce()": 0.0, "cast(float16)": 2.0**-11, "cast(bfloat16)": 2.0**-8}


class Net(torch.nn.Module):
    """Several buckets' worth of parameters, one of them channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 40, 3).to(memory_format=torch.channels_last)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(6))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).amax((2, 3))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def _input(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def _exact_mean(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The float64 mean of what each rank computes by itself."""
    sums: list[torch.Tensor] = []
    for rank in range(WORLD_SIZE):
        net = _net(dtype)
        net(_input(rank, step).to(dtype)).square().sum().backward()
        own = [gradient.double() for gradient in _gradients(net)]
        sums = own if not sums else [a + b for a, b in zip(sums, own, strict=True)]
    return [total / WORLD_SIZE for total in sums]


def _train(rank: int, way: str, name: str, dtype: torch.dtype, options: dict) -> None:
    net = _net(dtype)
    model = DDP(net, bucket_cap_mb=0.01, **options)
    hook = parse_hook(name)
    if way == "attach":
        handle = attach(model, hook)
    else:
        model.register_comm_hook(None, hook)
    numel = sum(parameter.numel() for parameter in net.parameters())
    for step in range(3):
        model.zero_grad()
        model(_input(rank, step).to(dtype)).square().sum().backward()
        exact = _exact_mean(step, dtype)
        bound = max(3 * ROUNDING[name], 4 * torch.finfo(dtype).eps)
        for (path, parameter), want in zip(net.named_parameters(), exact, strict=True):
            got = parameter.grad
            assert got is not None and got.dtype == dtype
            assert got.stride() == parameter.stride(), path
            error = (got.double() - want).abs().max()
            assert error <= bound * want.abs().max() + 1e-12, (path, step, error)
        assert all(map(torch.equal, *of_all_ranks(_gradients(net))))
    if way == "attach":
        stats = handle.stats()
        width = dtype.itemsize if name == "allreduce()" else 2
        assert stats.steps == 3
        assert stats.bytes_sent_last_step == numel * width  # 2 (W - 1) / W = 1 for 2 ranks
        assert stats.bytes_sent == 3 * numel * width
        assert len(stats.buckets) >= 2
        assert sum(bucket.numel for bucket in stats.buckets) == numel


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("way", ["attach", "register_comm_hook"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=lambda options: next(iter(options), "default"),
)
@on_processes
def test_gradients_are_the_mean(rank: int, way: str, name: str, options: dict) -> None:
    _train(rank, way, name, torch.float32, options)


@pytest.mark.parametrize("state", ["group", "none"])
@on_ranks(2)
def test_a_state_that_is_a_group_is_averaged_over(rank: int, state: str) -> None:
    alone = [dist.new_group([r]) for r in range(WORLD_SIZE)][rank]
    model = DDP(torch.nn.Linear(3, 2), process_group=alone)
    model.register_comm_hook(alone if state == "group" else None, hooks.allreduce())
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert (gradient == (1.0 + rank if state == "group" else 1.5)).all()


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2)
def test_parameters_of_other_dtypes(rank: int, name: str, dtype: torch.dtype) -> None:
    _train(rank, "attach", name, dtype, {})


@on_ranks(2)
def test_all_reduce_gives_the_tensor(rank: int) -> None:
    tensor = torch.full((3,), float(rank + 1))
    assert collectives.all_reduce(tensor).wait() is tensor
    assert tensor.tolist() == [3.0, 3.0, 3.0]


@on_ranks(2)
def test_scaling_comes_before_the_cast(rank: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    module = torch.nn.Module()
    module.weight = parameter
    # A mean of 5e4 fits into float16, whose largest value is 65504; a gradient of 1e5 does not.
    module.forward = lambda: (parameter * (1e5 if rank == 0 else 0.0)).sum()  # type: ignore[method-assign]
    model = DDP(module)
    attach(model, hooks.cast(torch.float16))
    model().backward()
    assert parameter.grad is not None
    assert torch.allclose(parameter.grad, torch.full((4,), 5e4), rtol=2.0**-11)


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_no_sync_accumulates(rank: int, view: bool) -> None:
    model = DDP(_net(), bucket_cap_mb=0.01, gradient_as_bucket_view=view)
    handle = attach(model, hooks.allreduce())
    with model.no_sync():
        model(_input(rank, 0)).square().sum().backward()
    assert handle.stats().steps == 0
    model(_input(rank, 1)).square().sum().backward()
    wants = [a + b for a, b in zip(*(_exact_mean(s, torch.float32) for s in (0, 1)), strict=True)]
    for gradient, want in zip(_gradients(model), wants, strict=True):
        assert torch.allclose(gradient.double(), want, rtol=1e-4, atol=1e-5)
    assert handle.stats().steps == 1


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(3, 3)
        self.on_rank_0 = torch.nn.Linear(3, 3)
        self.never = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.used(x)
        return self.on_rank_0(x) if rank == 0 else x


def _unused(rank: int, own_hook: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    if own_hook:
        attach(model, hooks.allreduce())
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 3), rank).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@on_ranks(2)
def test_unused_parameters_are_treated_as_by_ddp(rank: int) -> None:
    ours, theirs = _unused(rank, True), _unused(rank, False)
    assert ours[-1] is None and theirs[-1] is None
    assert all(map(torch.equal, ours[:-2], theirs[:-2]))


@on_ranks(2)
def test_a_parameter_used_on_another_rank_keeps_its_dtype(rank: int) -> None:
    model = DDP(Branches(), find_unused_parameters=True)
    attach(model, hooks.cast(torch.bfloat16))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3), rank).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]  # the rest is unused
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 4


@on_ranks(2)
def test_uneven_inputs_with_join(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(3, 2), bucket_cap_mb=0.00001)
    attach(model, hooks.allreduce())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):  # rank 1 has one batch more
            optimizer.zero_grad()
            model(torch.full((2, 3), float(step + rank))).sum().backward()
            optimizer.step()
    first, second = of_all_ranks([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", ArithmeticError, "^boo"),
        (
            "too long",
            ValueError,
            "^hook '.*hook' on bucket 0 of 1: the result must have 8 elements",
        ),
        ("callback", RuntimeError, r"^hook '.*hook' on bucket 0 of 1: (.|\n)*IndexError"),
    ],
)
@on_processes
def test_errors_of_a_rank_that_has_run_out(
    rank: int, how: str, error: type[Exception], message: str
) -> None:
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(3, 2))
    steps = 0

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future:
        nonlocal steps
        steps += 1
        future = collectives.all_reduce(bucket.buffer())
        if steps < 3:
            return future
        if how == "raises":
            raise ArithmeticError("boo")
        if how == "too long":
            return future.then(lambda done: torch.ones(99))
        return future.then(lambda done: [][0])

    attach(model, hook)
    with pytest.raises(error, match=message), model.join():
        for _ in range(2 + rank):  # in the third step rank 0 has run out
            model(torch.ones(2, 3)).sum().backward()


SPARSE = {
    "attach": hooks.allreduce,
    "policy": lambda: hooks.policy([], hooks.allreduce()),
    "register": hooks.allreduce,
    "function": lambda: lambda state, bucket: bucket.buffer() / 2,
    "cast": lambda: hooks.cast(torch.bfloat16),
}


def _sparse(rank: int, way: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = DDP(torch.nn.Embedding(10, 3, sparse=True))
    if way == "register":
        model.register_comm_hook(None, SPARSE[way]())
    else:
        attach(model, SPARSE[way]())
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 4 + rank])).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None and parameter.grad.is_sparse
    return parameter.grad.to_dense()


@pytest.mark.parametrize("way", ["attach", "policy", "register", "function"])
@on_ranks(2)
def test_sparse_gradients_are_averaged(rank: int, way: str) -> None:
    """A user's function gets the gradient of its rank, which is not averaged."""
    want = torch.zeros(10, 3)
    want[1], want[4], want[5] = 1, 0.5, 0.5
    if way == "function":
        want[[1, 4 + rank]], want[5 - rank] = 0.5, 0
    assert torch.equal(_sparse(rank, way), want)


@on_ranks(2)
def test_a_cast_refuses_sparse_gradients(rank: int) -> None:
    with pytest.raises(
        TypeError, match=r"cast\(bfloat16\) on bucket 0 of 1: .* allreduce\(\) takes"
    ):
        _sparse(rank, "cast")


@on_processes
def test_under_torch_compile(rank: int) -> None:
    net = _net()
    model = DDP(net, bucket_cap_mb=1)  # less than the first bucket's 1 MiB is refused by Dynamo
    attach(model, hooks.cast(torch.bfloat16))
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        model.zero_grad()
        compiled(_input(rank, step)).square().sum().backward()
        for gradient, want in zip(_gradients(net), _exact_mean(step, torch.float32), strict=True):
            assert (gradient - want).abs().max() <= 3 * 2.0**-8 * want.abs().max()


# ---- one rank, no DDP ----------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
class TestAlone:
    def _bucket(self, numel: int = 100) -> GradBucket:
        return GradBucket([torch.zeros(numel)], [torch.randn(numel)])

    @pytest.mark.parametrize("name", ROUNDING)
    def test_called_as_a_plain_function(self, name: str) -> None:
        bucket = self._bucket()
        before = bucket.buffer().clone()
        result = parse_hook(name)(None, bucket).wait()
        assert result is bucket.buffer() and result.dtype == torch.float32
        assert torch.allclose(result, before, rtol=2 * ROUNDING[name], atol=0)

    def test_buffers_stay_between_steps(self) -> None:
        hook = hooks.cast(torch.bfloat16)
        bucket = self._bucket()
        first = hook.average(bucket).wait()
        assert hook.average(bucket).wait().data_ptr() == first.data_ptr()
        assert len(hook._own_memory.bucket_memories()) == 1

    def test_buffers_go_when_buckets_are_formed_anew(self) -> None:
        hook = hooks.cast(torch.bfloat16)
        parameters = [torch.zeros(3), torch.zeros(4), torch.zeros(5)]

        def run(*groups: list[torch.Tensor]) -> None:
            for i, group in enumerate(groups):
                gradients = [torch.ones_like(parameter) for parameter in group]
                bucket = GradBucket(group, gradients, index=i, bucket_count=len(groups))
                assert hook.average(bucket).wait().numel() == sum(p.numel() for p in group)

        run(parameters[:1], parameters[1:])
        assert len(hook._own_memory.bucket_memories()) == 2
        run(parameters)
        assert len(hook._own_memory.bucket_memories()) == 1
        del parameters
        assert len(hook._own_memory.bucket_memories()) == 0

    def test_two_models_share_a_hook(self) -> None:
        hook = hooks.cast(torch.bfloat16)
        a, b = self._bucket(5), self._bucket(5)
        first = hook.average(a).wait()
        second = hook.average(b).wait()
        assert first.data_ptr() != second.data_ptr()

    def test_hooks_are_copied_and_pickled(self) -> None:
        hook = hooks.cast(torch.float16)
        hook(None, self._bucket())
        for twin in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            assert repr(twin) == "cast(float16)" and not twin._own_memory.bucket_memories()
            twin(None, self._bucket()).wait()

    def test_copies_keep_the_group_and_have_their_own_buffers(self) -> None:
        group = dist.group.WORLD
        hook = hooks.cast(torch.float16, process_group=group)
        bucket = self._bucket()
        hook(None, bucket)
        for twin in (copy.copy(hook), copy.deepcopy(hook)):
            assert twin.process_group is group
            assert not twin._own_memory.bucket_memories()
        assert len(hook._own_memory.bucket_memories()) == 1
        with pytest.warns(UserWarning, match=r"cast\(float16\): a process group cannot be pickled"):
            data = pickle.dumps(hook)
        assert pickle.loads(data).process_group is None

    def test_other_states_and_groups_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"'allreduce\(\)': state must be a ProcessGroup or"):
            hooks.allreduce()("nonsense", self._bucket())
        with pytest.raises(TypeError, match="process_group must be a ProcessGroup, got int"):
            hooks.allreduce(process_group=1)(None, self._bucket())


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    bucket = GradBucket([torch.zeros(3)], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="a process group is needed"):
        hooks.allreduce()(None, bucket)
