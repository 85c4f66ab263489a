"""PyTorch's tests of what a process group in Python may define, on ours.

They call a method on the Python object. C++ calls it too, through the binding of PyTorch's class.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import CoalescingGroup, DoneWork, MarkingGroup, completed
from torch.distributed import distributed_c10d

from torch_commhook import ProcessGroup, Work
from torch_commhook.process_group import WrapperProcessGroup

base: Any = dist.ProcessGroup
needs_reconfigure = pytest.mark.skipif(
    not hasattr(base, "reconfigure"), reason="this torch does not reconfigure groups"
)
needs_windows = pytest.mark.skipif(
    not hasattr(base, "new_window"), reason="this torch has no windows"
)


# ---- names and numbers ---------------------------------------------------------------------------


class SpelledAsInCpp(ProcessGroup):
    """What a group tells of itself, by C++'s names."""

    def getRank(self) -> int:  # noqa: N802
        return 123

    def getSize(self) -> int:  # noqa: N802
        return 456

    def getBackendName(self) -> str:  # noqa: N802
        return "own"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.own_name = "py:" + name

    def getGroupName(self) -> str:  # noqa: N802
        return self.own_name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self.own_desc = "py:" + desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.own_desc


class SpelledAsInPython(ProcessGroup):
    """The same, by the names of PyTorch's bindings."""

    def rank(self) -> int:
        return 123

    def size(self) -> int:
        return 456

    def name(self) -> str:
        return "own"

    def _set_group_name(self, name: str) -> None:
        self.own_name = "py:" + name

    def _set_group_desc(self, desc: str) -> None:
        self.own_desc = "py:" + desc

    group_name = property(lambda self: self.own_name)
    group_desc = property(lambda self: self.own_desc)


@pytest.mark.parametrize("kind", [SpelledAsInCpp, SpelledAsInPython])
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


@pytest.mark.parametrize("kind", [SpelledAsInCpp, SpelledAsInPython])
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
            work = DoneWork()
            self.left = weakref.ref(work)
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


@needs_reconfigure
@pytest.mark.parametrize("owner", ["the object", "C++"])
def test_several_backends_are_not_reconfigured(owner: str) -> None:
    group = ProcessGroup(0, 1)
    types = dist.ProcessGroup.BackendType
    group._register_backend(torch.device("cpu"), types.GLOO)
    group._register_backend(torch.device("cuda"), types.NCCL)
    kind: Any = base if owner == "C++" else ProcessGroup
    for call in (
        lambda: kind.supports_reconfigure.fget(group),
        lambda: kind.get_reconfigure_handle(group),
        lambda: kind.reconfigure(group, _options()),
    ):
        with pytest.raises(RuntimeError, match="multiple backends"):
            call()


@needs_reconfigure
def test_errors_of_reconfiguring_come_out() -> None:
    def fails(self: Any, *options: Any) -> Any:
        raise ValueError("boo")

    names = {"get_reconfigure_handle": fails, "reconfigure": fails}
    group = type("Own", (ProcessGroup,), {**names, "supports_reconfigure": property(fails)})(0, 1)
    for _ in range(2):  # the first error leaves nothing behind
        for call in (
            lambda: base.supports_reconfigure.fget(group),
            lambda: base.get_reconfigure_handle(group),
            lambda: base.reconfigure(group, _options()),
        ):
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
