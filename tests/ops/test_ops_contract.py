"""What the bucket operators owe to the rest of PyTorch: opcheck, fakes, versions, inference mode.

Their derivatives and compilation stand in test_ops_autograd.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ops_reference import (
    PAIRS,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    assert_same_bits,
    cpu_level,
    make,
    maker,
    one_thread,  # noqa: F401
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_commhook.native.bucket_ops as ops
from torch_commhook import _C

commhook = torch.ops.commhook
MUTATING = ("flatten.out", "unflatten_into")
OPERATORS = {
    "flatten": commhook.flatten.default,
    "flatten.out": commhook.flatten.out,
    "flatten_stats": commhook.flatten_stats.default,
    "unflatten": commhook.unflatten.default,
    "unflatten_into": commhook.unflatten_into.default,
}


def total(tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


def sample(operator: str, name: str, source: torch.dtype, target: torch.dtype, grad: bool = False):
    """Arguments and keywords of one call, from `source` to `target`, with a class of shapes."""
    if operator.startswith("unflatten"):
        tensors = make(name, target, seed=1)
        return (maker(source)(total(tensors)).requires_grad_(grad), tensors), {"scale": 0.5}
    tensors = [tensor.requires_grad_(grad) for tensor in make(name, source)]
    if operator == "flatten.out":
        return (tensors,), {"scale": 0.5, "out": torch.zeros(total(tensors), dtype=target)}
    return (tensors,), {"scale": 0.5, "dtype": target}


#: The shape classes, without those that are only long: opcheck runs each sample a dozen times.
SHORT_CLASSES = [
    name
    for name in (*SHAPE_CLASSES, *SOURCE_CLASSES)
    if name not in ("many_tiny", "every_short_length", "one_large", "odd_rows", "misaligned")
]


def classes_of(operator: str) -> list[str]:
    return [
        name
        for name in SHORT_CLASSES
        if not (operator == "unflatten_into" and name in SOURCE_CLASSES)
    ]


@pytest.mark.parametrize(
    ("operator", "name"), [(op, name) for op in OPERATORS for name in classes_of(op)]
)
def test_opcheck_of_shapes(operator, name):
    grad = operator not in MUTATING
    args, kwargs = sample(operator, name, torch.float32, torch.float32, grad)
    torch.library.opcheck(OPERATORS[operator], args, kwargs)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck_of_dtypes(operator, source, target):
    grad = operator not in MUTATING
    args, kwargs = sample(operator, "strided", source, target, grad)
    torch.library.opcheck(OPERATORS[operator], args, kwargs)


def test_every_operator_is_checked():
    schemas = [
        schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("commhook::")
    ]
    bucket = {
        schema.name.removeprefix("commhook::") + ("." + schema.overload_name).rstrip(".")
        for schema in schemas
        if "flatten" in schema.name
    }
    assert bucket == set(OPERATORS)


# ---- fakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["flatten", "flatten_stats", "unflatten"])
def test_fakes_give_the_metadata_of_the_kernels(operator):
    for name in (*SHAPE_CLASSES, *SOURCE_CLASSES):
        for source, target in PAIRS[::3]:
            args, kwargs = sample(operator, name, source, target)
            real = OPERATORS[operator](*args, **kwargs)
            with FakeTensorMode() as mode:
                fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
                fake = OPERATORS[operator](*fakes, **kwargs)
            if operator == "flatten":
                real, fake = [real], [fake]
            assert len(real) == len(fake)
            for one, other in zip(real, fake, strict=True):
                assert metadata(one) == metadata(other), f"{name}, {source} to {target}"


def metadata(tensor):
    """What a fake must get right. The stride of a dimension of size 1 says nothing."""
    strides = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.dtype, tensor.device, tensor.shape, strides if tensor.numel() > 0 else None


def test_fakes_take_symbolic_sizes():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        env = mode.shape_env
        n = env.create_unbacked_symint()
        torch._check(n >= 0)
        tensors = [torch.empty(n, 2), torch.empty(3)]
        buffer = ops.flatten(tensors)
        assert str(buffer.shape[0].node.expr) == f"2*{n} + 3"
        for new, model in zip(ops.unflatten(buffer, tensors), tensors, strict=True):
            assert str(new.shape) == str(model.shape)
        ops.unflatten_into(buffer, tensors)
        assert ops.flatten(tensors, out=buffer) is buffer


def test_meta_tensors():
    tensors = [torch.empty(3, 4, device="meta"), torch.empty(5, device="meta", dtype=torch.half)]
    buffer = ops.flatten(tensors, dtype=torch.bfloat16)
    assert (buffer.device.type, buffer.dtype, buffer.shape) == ("meta", torch.bfloat16, (17,))
    stats = ops.flatten_stats(tensors, dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in stats)
    assert [tensor.shape for tensor in ops.unflatten(buffer, tensors)] == [(3, 4), (5,)]
    assert ops.flatten(tensors, out=buffer) is buffer
    assert ops.unflatten_into(buffer, tensors) is None


# ---- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_versions_of_what_is_written_move(mode):
    tensors = [torch.ones(3), torch.ones(2, 4).t()]
    buffer = torch.zeros(11)
    with mode():
        ops.flatten(tensors, out=buffer)
        assert [tensor._version for tensor in (buffer, *tensors)] == [1, 0, 0]
        ops.unflatten_into(buffer, tensors)
        assert [tensor._version for tensor in (buffer, *tensors)] == [1, 1, 1]
        ops.flatten(tensors)
        ops.flatten_stats(tensors)
        ops.unflatten(buffer, tensors)
        assert [tensor._version for tensor in (buffer, *tensors)] == [1, 1, 1]


def test_views_share_the_version_of_their_base():
    base = torch.zeros(2, 5)
    ops.unflatten_into(torch.ones(5), [base[1]])
    assert base._version == 1 and base.sum() == 5
    ops.flatten([torch.ones(5)], out=base[0])
    assert base._version == 2 and base.sum() == 10


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autograd_notices_a_saved_tensor_that_was_overwritten(mode):
    for write in (
        lambda saved: ops.flatten([torch.ones(3)], out=saved),
        lambda saved: ops.unflatten_into(torch.ones(3), [saved]),
    ):
        parameter = torch.ones(3, requires_grad=True)
        saved = torch.ones(3)
        loss = (parameter * saved).sum()
        with mode():
            write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- modes ---------------------------------------------------------------------------------------


def test_inference_mode():
    with torch.inference_mode():
        tensors = [torch.ones(3), torch.ones(2, 2)]
        buffer = ops.flatten(tensors, scale=2.0)
        assert buffer.is_inference() and buffer.tolist() == [2.0] * 7
        ops.unflatten_into(buffer, tensors)
        ops.flatten(tensors, scale=2.0, out=buffer)
        assert buffer.tolist() == [4.0] * 7
        assert ops.flatten_stats(tensors).sum_of_squares == 28
        assert [tensor.shape for tensor in ops.unflatten(buffer, tensors)] == [(3,), (2, 2)]
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must not be an inference tensor outside"):
        ops.unflatten_into(torch.ones(7), tensors)
    with pytest.raises(RuntimeError, match="out must not be an inference tensor outside"):
        ops.flatten([torch.ones(7)], out=buffer)
    assert buffer.tolist() == [4.0] * 7 and tensors[0].tolist() == [2.0] * 3


def test_autocast_changes_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.flatten([torch.ones(3)]).dtype == torch.float32


def test_results_share_no_memory_with_the_inputs():
    # Not even where one contiguous tensor is all there is.
    source = torch.ones(5)
    for result in (ops.flatten([source]), *ops.unflatten(source, [source])):
        result.zero_()
    assert (source == 1).all()


# ---- past torch.ops: the same for everyone who has a say in a call -------------------------------


def two_tensors() -> list[Tensor]:
    return [torch.arange(3.0), torch.arange(8.0).view(2, 4).t()]


def flattened(given: list[Tensor]) -> Tensor:
    return ops.flatten(given, scale=0.5, out=torch.empty(11))


def unflattened(given: list[Tensor]) -> Tensor:
    into = [torch.zeros_like(tensor) for tensor in given]
    ops.unflatten_into(torch.arange(11.0), into, scale=0.5)
    return torch.cat([tensor.reshape(-1) for tensor in into])


BOTH = pytest.mark.parametrize("call", [flattened, unflattened])


def test_plain_calls_go_past_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_ops", None)
    want = torch.cat([tensor.reshape(-1) for tensor in two_tensors()]) * 0.5
    assert torch.equal(flattened(two_tensors()), want)
    assert torch.equal(ops.flatten(tuple(two_tensors()), scale=0.5, out=torch.empty(11)), want)
    assert torch.equal(unflattened(two_tensors()), torch.arange(11.0) * 0.5)
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert ops.flatten([parameter], out=torch.empty(2)).tolist() == [1, 1]


@pytest.mark.parametrize("scale", [2, True, torch.tensor(2.0)])
def test_other_numbers_go_through_torch_ops(scale: float) -> None:
    assert not _C.flatten_out([torch.ones(2)], scale, torch.empty(2))
    assert not _C.unflatten_into(torch.ones(2), [torch.empty(2)], scale)
    assert ops.flatten([torch.ones(2)], scale=scale, out=torch.empty(2)).tolist() == [scale] * 2
    into = torch.empty(2)
    ops.unflatten_into(torch.ones(2), [into], scale=scale)
    assert into.tolist() == [scale] * 2


@pytest.mark.parametrize(
    ("base", "method"),
    [(TorchDispatchMode, "__torch_dispatch__"), (TorchFunctionMode, "__torch_function__")],
)
@BOTH
def test_a_mode_sees_the_operator(
    call: Callable[[list[Tensor]], Tensor], base: type, method: str
) -> None:
    seen = []

    def see(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        seen.append(func)
        return func(*args, **(kwargs or {}))

    want = call(two_tensors())
    with type("Mode", (base,), {method: see})():
        assert torch.equal(call(two_tensors()), want)
    operators = {commhook.flatten.out, commhook.unflatten_into.default}
    if base is TorchFunctionMode:
        operators.add(commhook.unflatten_into)
    assert operators & set(seen)


def test_a_subclass_is_asked() -> None:
    seen = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    def asked_of(call: Callable[..., object], *arguments: object, **options: object) -> bool:
        seen.clear()
        call(*arguments, **options)
        return any("commhook" in name for name in seen)

    asked, out = torch.ones(2).as_subclass(Asked), torch.empty(2)
    assert asked_of(ops.flatten, [torch.ones(0), asked], out=out)
    assert out.tolist() == [1, 1]
    assert asked_of(ops.flatten, [torch.ones(2)], out=asked)
    assert asked_of(ops.unflatten_into, asked, [out])
    assert asked_of(ops.unflatten_into, out, [asked])


@BOTH
def test_traced_and_compiled(call: Callable[[list[Tensor]], Tensor]) -> None:
    want = call(two_tensors())
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(two_tensors()), want)
    traced = torch.fx.experimental.proxy_tensor.make_fx(call)(two_tensors())
    assert torch.equal(traced(two_tensors()), want) and "commhook" in traced.code


@pytest.mark.parametrize("bad", [None, 3, "x", [torch.ones(1), None], [[torch.ones(1)]]])
def test_what_is_no_list_of_tensors(bad: object) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError), match="flatten"):
        ops.flatten(bad, out=torch.empty(1))  # type: ignore[arg-type]
    with pytest.raises((TypeError, RuntimeError, ValueError), match="unflatten_into"):
        ops.unflatten_into(torch.empty(1), bad)  # type: ignore[arg-type]
    assert not _C.flatten_out(bad, 1.0, torch.empty(1))  # type: ignore[arg-type]
    assert not _C.unflatten_into(torch.empty(1), bad, 1.0)  # type: ignore[arg-type]


def test_refusals_are_the_same() -> None:
    memory = torch.ones(8)
    for call in (
        lambda: ops.flatten([memory[:4]], out=memory[2:6]),
        lambda: commhook.flatten.out([memory[:4]], out=memory[2:6]),
    ):
        with pytest.raises(ValueError, match=r"^flatten: out must share no memory"):
            call()
    for write in (ops.unflatten_into, commhook.unflatten_into):
        with pytest.raises(ValueError, match=r"^unflatten_into: tensors must share no memory"):
            write(torch.ones(8), [memory[:4], memory[3:7]])
        with pytest.raises(RuntimeError, match=r"unflatten_into: tensors\[0\] must not require"):
            write(torch.ones(2), [torch.ones(2, requires_grad=True)])


# ---- the helpers of these tests ------------------------------------------------------------------


def test_assert_same_bits_can_fail():
    ones = torch.ones(3)
    assert_same_bits(torch.tensor([math.nan, 0.0]), torch.tensor([-math.nan, 0.0]))
    for other in (torch.tensor([1.0, 1.0, 1.0 + 2**-23]), ones.double(), torch.ones(1, 3)):
        with pytest.raises(AssertionError):
            assert_same_bits(other, ones)
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ, the first at \(0,\): -0.0"):
        assert_same_bits(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_cpu_level_is_restored():
    before = ops.cpu_capability()
    with cpu_level("default"):
        assert ops.cpu_capability() == "default"
    assert ops.cpu_capability() == before
