"""PyTorch's tests of what a process group in Python may define, and of DDP on one, on ours.

They call a method on the Python object. C++ calls it too, through the binding of PyTorch's class.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import (
    COUNTED,
    RESULTS,
    TORCH,
    CoalescingGroup,
    DoneWork,
    LonelyGroup,
    MarkingGroup,
    completed,
)
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from torch_commhook import ProcessGroup, Work
from torch_commhook.process_group import WrapperProcessGroup, register

base: Any = dist.ProcessGroup
needs_reconfigure = pytest.mark.skipif(
    not hasattr(base, "reconfigure"), reason="this torch does not reconfigure groups"
)
needs_windows = pytest.mark.skipif(
    not hasattr(base, "new_window"), reason="this torch has no windows"
)


# ---- names and numbers ---------------------------------------------------------------------------


def _gives(part: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self, part)


def _puts(part: str) -> Callable[[Any, str], None]:
    return lambda self, text: setattr(self, part, "py:" + text)


#: What a group tells of itself, by C++'s names and by those of PyTorch's bindings.
SPELLINGS: dict[str, dict[str, Any]] = {
    "C++": {
        "getRank": lambda self: 123,
        "getSize": lambda self: 456,
        "getBackendName": lambda self: "own",
        **{"setGroupName": _puts("own_name"), "getGroupName": _gives("own_name")},
        **{"setGroupDesc": _puts("own_desc"), "getGroupDesc": _gives("own_desc")},
    },
    "Python": {
        "rank": lambda self: 123,
        "size": lambda self: 456,
        "name": lambda self: "own",
        **{"_set_group_name": _puts("own_name"), "group_name": property(_gives("own_name"))},
        **{"_set_group_desc": _puts("own_desc"), "group_desc": property(_gives("own_desc"))},
    },
}
in_each_spelling = pytest.mark.parametrize(
    "kind", [type("Own", (ProcessGroup,), methods) for methods in SPELLINGS.values()], ids=SPELLINGS
)


@in_each_spelling
def test_what_a_group_tells_of_itself(kind: type[ProcessGroup]) -> None:
    group = kind(0, 1)
    assert (group.name(), group.rank(), group.size()) == ("own", 123, 456)
    assert (base.name(group), base.rank(group), base.size(group)) == ("own", 123, 456)
    group._set_group_name("name")
    assert group.group_name == base.group_name.fget(group) == "py:name"
    base._set_group_desc(group, "desc")
    assert group.group_desc == base.group_desc.fget(group) == "py:desc"


def test_a_group_without_a_description() -> None:
    assert ProcessGroup(0, 1).group_desc == dist.ProcessGroup(0, 1).group_desc


def test_a_group_made_with_a_store() -> None:
    store = dist.HashStore()
    store.set("key", "value")
    group = MarkingGroup(store, 0, 1)
    assert group.get_group_store() is store
    assert group.get_group_store().get("key") == b"value"
    assert (base.name(group), group.rank(), group.size()) == ("marking", 0, 1)
    assert ProcessGroup(0, 1).get_group_store() is None


@in_each_spelling
def test_abort_and_shutdown_do_nothing(kind: type[ProcessGroup]) -> None:
    group = kind(0, 1)
    for owner in (kind, base):
        owner.abort(group)
        owner.shutdown(group)
    assert group.size() == 456


# ---- collectives ---------------------------------------------------------------------------------

OWN = torch.arange(4.0)


def test_an_operator_finds_the_group_by_its_name() -> None:
    group = MarkingGroup(None, 0, 1)
    name: Any = "by an operator"
    distributed_c10d._register_process_group(name, group)
    try:
        output = torch.empty(4)
        operators = torch.ops._c10d_functional
        operators.all_gather_into_tensor_out(OWN, 1, name, out=output)
        operators.wait_tensor(output)
    finally:
        distributed_c10d._unregister_process_group(name)
    assert group.called == ["all_gather_single"]
    assert output.tolist() == OWN.tolist()


def test_the_coalescing_manager() -> None:
    group = CoalescingGroup(None, 0, 1)
    device = torch.device("cpu")
    with distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:
        assert (group.started, group.ended) == (1, 0)
    manager.wait()
    assert (group.started, group.ended) == (1, 1)
    assert len(manager.works) == 1


# ---- reconfiguring -------------------------------------------------------------------------------


class Reconfigurable(ProcessGroup):
    """Keeps the options that it was reconfigured with."""

    options: Any = None

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return "a handle"

    def reconfigure(self, options: Any) -> Any:
        self.options = options
        return completed(None)


def _options() -> Any:
    options = distributed_c10d.ReconfigureOptions()
    options.uuid, options.handles = 13, ["first", "second"]
    options.timeout, options.hints = timedelta(seconds=7), {"key": "value"}
    return options


@needs_reconfigure
def test_the_functions_that_reconfigure_a_group() -> None:
    group = Reconfigurable(0, 1)
    functions: Any = dist
    assert functions._supports_reconfigure(group=group)
    assert functions._get_reconfigure_handle(group=group) == "a handle"
    work = functions._reconfigure(
        uuid=7, handles=["a", "b"], group=group, timeout=timedelta(seconds=30), hints={"k": "v"}
    )
    assert work is not None
    got = group.options
    assert (got.uuid, list(got.handles), dict(got.hints)) == (7, ["a", "b"], {"k": "v"})
    assert got.timeout == timedelta(seconds=30)


@needs_reconfigure
def test_cpp_reconfigures_a_group() -> None:
    group = Reconfigurable(0, 1)
    assert base.supports_reconfigure.fget(group)
    assert base.get_reconfigure_handle(group) == "a handle"
    options = _options()
    work = base.reconfigure(group, options)
    assert work.wait()
    assert work.get_future().wait() is None
    for part in ("uuid", "handles", "timeout", "hints"):
        assert getattr(group.options, part) == getattr(options, part)


@needs_reconfigure
def test_the_work_of_reconfiguring_lives_as_long_as_cpp_needs_it() -> None:
    class Own(Reconfigurable):
        def reconfigure(self, options: Any) -> Any:
            self.left = weakref.ref(work := DoneWork())
            return work

    group = Own(0, 1)
    work = base.reconfigure(group, _options())
    gc.collect()
    assert group.left() is not None
    assert work.wait()
    del work
    gc.collect()
    assert group.left() is None


@needs_reconfigure
def test_a_group_that_cannot_be_reconfigured() -> None:
    own = type("Own", (Reconfigurable,), {"supports_reconfigure": property(lambda self: False)})
    assert base.supports_reconfigure.fget(own(0, 1)) is False
    assert base.supports_reconfigure.fget(ProcessGroup(0, 1)) is False


class Delegating(ProcessGroup):
    """Leaves it to the backend, through ``super()``."""

    @property
    def supports_reconfigure(self) -> bool:
        return super().supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        return super().get_reconfigure_handle()

    def reconfigure(self, options: Any) -> Any:
        return super().reconfigure(options)


def _gloo_that_reconfigures(make: Callable[..., Any]) -> tuple[Any, Any]:
    store = dist.HashStore()
    try:
        gloo = dist.ProcessGroupGloo(store, 0, 1, enable_reconfigure=True)
    except TypeError:
        pytest.skip("Gloo of this torch is not reconfigured")
    group = make(store, 0, 1)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group, gloo


@needs_reconfigure
@pytest.mark.parametrize("kind", [ProcessGroup, Delegating])
def test_a_backend_is_reconfigured(kind: type[ProcessGroup]) -> None:
    group, gloo = _gloo_that_reconfigures(kind)
    try:
        assert base.supports_reconfigure.fget(group)
        handle = base.get_reconfigure_handle(group)
        assert handle == gloo.get_reconfigure_handle()
        options = distributed_c10d.ReconfigureOptions()
        options.uuid, options.handles = 14, [handle]
        assert base.reconfigure(group, options).wait()
    finally:
        group.shutdown()


def _reconfigures(group: Any, owner: Any) -> list[Callable[[], Any]]:
    """The calls that reconfigure it, as a class has them."""
    return [
        lambda: owner.supports_reconfigure.fget(group),
        lambda: owner.get_reconfigure_handle(group),
        lambda: owner.reconfigure(group, _options()),
    ]


@needs_reconfigure
@pytest.mark.parametrize("owner", [ProcessGroup, base], ids=["the object", "C++"])
def test_several_backends_are_not_reconfigured(owner: Any) -> None:
    group = ProcessGroup(0, 1)
    types = dist.ProcessGroup.BackendType
    group._register_backend(torch.device("cpu"), types.GLOO)
    group._register_backend(torch.device("cuda"), types.NCCL)
    for call in _reconfigures(group, owner):
        with pytest.raises(RuntimeError, match="multiple backends"):
            call()


@needs_reconfigure
def test_errors_of_reconfiguring_come_out() -> None:
    def fails(self: Any, *options: Any) -> Any:
        raise ValueError("boo")

    names = {"get_reconfigure_handle": fails, "reconfigure": fails}
    group = type("Own", (ProcessGroup,), {**names, "supports_reconfigure": property(fails)})(0, 1)
    for call in 2 * _reconfigures(group, base):  # the first error leaves nothing behind
        with pytest.raises(ValueError, match=r"^boo$"):
            call()


# ---- windows -------------------------------------------------------------------------------------


@needs_windows
def test_the_functions_that_make_a_window() -> None:
    class Own(ProcessGroup):
        supports_window = True
        given: Any = "nothing"

        def new_window(self, tensor: torch.Tensor | None = None) -> str:
            self.given = tensor
            return "a window"

    group = Own(0, 1)
    functions: Any = dist
    assert functions._supports_window(group=group)
    assert functions._new_window(group=group) == "a window"
    assert group.given is None
    x = torch.zeros(4)
    assert functions._new_window(x, group=group) == "a window"
    assert group.given is x


def test_a_work_does_not_keep_the_group() -> None:
    group = WrapperProcessGroup(MarkingGroup(None, 0, 1))
    left = weakref.ref(group)
    work = base.allreduce(group, [torch.zeros(2)], dist.AllreduceOptions())
    assert isinstance(work, Work | dist.Work)
    del group
    gc.collect()
    assert left() is None
    assert work.wait()


# ---- DDP on a group of one rank ------------------------------------------------------------------


by_result = pytest.mark.parametrize("result", RESULTS)
as_view = pytest.mark.parametrize("gradient_as_bucket_view", [False, True])


def compare(
    make: Callable[[], nn.Module],
    *,
    group: LonelyGroup | None = None,
    steps: int = 2,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    call: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    **options: Any,
) -> None:
    """Train a model alone and with DDP on a lonely group: the gradients are equal."""
    torch.manual_seed(0)
    model = make()
    ddp = wrap(DDP(copy.deepcopy(model), process_group=group or LonelyGroup("our Work"), **options))
    for _ in range(steps):
        x = torch.randn(8, 20)
        for each in (model, ddp):
            each.zero_grad()
            call(each, x).square().sum().backward()
        for expected, got in zip(model.parameters(), ddp.parameters(), strict=True):
            assert (expected.grad is None) == (got.grad is None)
            if expected.grad is not None:
                assert torch.equal(got.grad, expected.grad)
                assert expected.grad.any()
            with torch.no_grad():
                for parameter in (expected, got):
                    parameter -= 0 if parameter.grad is None else 0.01 * parameter.grad


@by_result
@as_view
def test_two_steps(result: str, gradient_as_bucket_view: bool) -> None:
    group = LonelyGroup(result)
    compare(
        lambda: nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 4), nn.Softmax(1)),
        group=group,
        bucket_cap_mb=0.001,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    assert (group.waits > 0) == (group.futures > 0) == (result in COUNTED)


def test_without_init_sync_nothing_is_asked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    synced, not_synced = LonelyGroup("our Work"), LonelyGroup("our Work")
    DDP(model, process_group=synced)
    DDP(model, process_group=not_synced, init_sync=False)
    assert synced.waits > 0
    assert (not_synced.waits, not_synced.futures) == (0, 0)


# ---- checkpointing -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two linear layers, of which some are run in checkpoints."""

    def __init__(
        self,
        layers: tuple[int, ...],  # the numbers of the layers that are run, after the first one
        *,
        reentrant: bool,  # the kind of checkpoint
        shared: bool = False,  # whether both layers have one weight
        alternating: bool = False,  # whether a call runs only one layer, each in its turn
    ) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        if shared:
            self.all[0].weight = self.all[1].weight
        self.layers, self.reentrant, self.alternating = layers, reentrant, alternating
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.alternating:
            self.calls += 1
            layers: tuple[int, ...] = (self.calls % 2,)
        else:
            x, layers = self.all[0](x), self.layers
        for layer in layers:
            x = checkpoint(self.all[layer], x, use_reentrant=self.reentrant)
        return x


reentrant = pytest.mark.parametrize("reentrant", [False, True])
TWICE = r"Expected to mark a variable ready only once\."


@reentrant
@as_view
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("layers", [(1,), (1, 1)], ids=["once", "twice"])
def test_a_checkpoint(
    reentrant: bool,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused_parameters: bool,
    layers: tuple[int, ...],
) -> None:
    is_refused = reentrant and not static_graph and (find_unused_parameters or len(layers) > 1)
    with pytest.raises(RuntimeError, match=TWICE) if is_refused else nullcontext():
        compare(
            lambda: Checkpointed(layers, reentrant=reentrant),
            steps=5,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )


@as_view
@pytest.mark.parametrize("shared", [False, True])
def test_another_layer_in_each_step(gradient_as_bucket_view: bool, shared: bool) -> None:
    compare(
        lambda: Checkpointed((), reentrant=False, shared=shared, alternating=True),
        steps=5,
        find_unused_parameters=True,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


def _shared_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    model[0].weight = model[1].weight
    return model


@reentrant
@as_view
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_shared_weight_in_a_checkpoint_around_the_model(
    reentrant: bool, gradient_as_bucket_view: bool, static_graph: bool
) -> None:
    compare(
        _shared_layers,
        steps=5,
        call=lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant),
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
    )


@as_view
def test_a_shared_weight_checkpointed_twice(gradient_as_bucket_view: bool) -> None:
    compare(
        lambda: Checkpointed((1, 1), reentrant=True, shared=True),
        steps=5,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=True,
    )


# ---- buffers and outputs -------------------------------------------------------------------------


@pytest.mark.skipif(
    TORCH < (2, 13), reason="this torch's DDP broadcasts into buffers that a backward needs"
)
def test_buffers_are_broadcast_between_two_forwards() -> None:
    group = LonelyGroup("our Work")
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)), process_group=group)
    waits = group.waits
    x = torch.randn(4, 10)
    (model(x).square().mean() + model(x).square().mean()).backward()
    assert group.waits > waits
    assert all(parameter.grad is not None for parameter in model.parameters())


@dataclass
class Outputs:
    """What a model gives: a tensor that may be missing, and others by name."""

    first: Tensor | None
    others: dict[str, Tensor]


class WithOutputs(nn.Module):
    def __init__(self, *, skip_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 10), nn.Linear(20, 10)
        self.skip_first = skip_first

    def forward(self, x: Tensor) -> Outputs:
        first = None if self.skip_first else self.first(x).relu()
        return Outputs(first, {"a": self.second(x), "b": self.second(x).relu()})


@pytest.mark.parametrize("skip_first", [False, True])
def test_outputs_in_a_dataclass(skip_first: bool) -> None:
    def call(model: Any, x: Tensor) -> Tensor:
        outputs = model(x)
        total = outputs.others["a"] + outputs.others["b"]
        return total if skip_first else total + outputs.first

    compare(lambda: WithOutputs(skip_first=skip_first), call=call, find_unused_parameters=True)


# ---- compilers -----------------------------------------------------------------------------------


def test_a_compiled_model(one_rank: None, fresh_compiler: None) -> None:
    group = LonelyGroup("Future")
    register(group, "compiled")
    group._set_group_desc("compiled")
    in_compiler = functools.partial(torch.compile, backend="eager")
    compare(lambda: nn.Linear(20, 4), group=group, steps=3, wrap=in_compiler)
    dist.destroy_process_group(group)
