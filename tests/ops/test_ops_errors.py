"""What the bucket operators refuse, with which exception, and that the message says what to mend.

Every message names the operator, the argument (with its index), the contract and the value.
"""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from ops_reference import LEVELS, check_that_devices_must_agree, cpu_level
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import torch_commhook.native.bucket_ops as ops

DTYPES = "float64, float32, float16 or bfloat16"


@pytest.fixture(params=["reference", "native"], autouse=True)
def level(request):
    """Both kernels that check: the reference, and the fastest of this processor."""
    if request.param == "reference":
        with cpu_level("reference"):
            yield
    else:
        assert ops.cpu_capability() in LEVELS[1:]
        yield


def f(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def bad_tensors(op, argument, call):
    """The refusals of one tensor among an operator's arguments, which are ``call(tensor)``."""
    name = re.escape(argument)
    for dtype in ("int32", "int64", "bool", "uint8", "complex64", "float8_e4m3fn"):
        message = f"{name} must be of dtype {DTYPES}, got torch.{dtype}$"
        yield op, TypeError, message, call(torch.zeros(3, dtype=getattr(torch, dtype)))
    message = rf"{name} must be dense \(torch.strided\), got layout (torch\.sparse_coo|Sparse)$"
    yield op, TypeError, message, call(f(3).to_sparse())


def refused():
    """All that can be seen from shapes, dtypes and layouts, so that fakes must see it too.

    Of each call, the operator, the error, a pattern of what follows the operator's name, and the
    arguments.
    """
    for op in ("flatten", "flatten_stats"):
        yield from bad_tensors(op, "tensors[0]", lambda t: {"tensors": [t, f(2)]})
        yield from bad_tensors(op, "tensors[2]", lambda t: {"tensors": [f(2), f(1), t]})
        message = "tensors must hold at least one tensor, got none$"
        yield op, ValueError, message, {"tensors": []}
        message = (
            "dtype must be given if the tensors have different dtypes, got none for "
            r"tensors\[0\] of torch.float32 and tensors\[2\] of torch.float16"
        )
        yield op, TypeError, message, {"tensors": [f(2), f(2), f(2).half()]}
        message = f"dtype must be {DTYPES}, got torch.int32$"
        yield op, TypeError, message, {"tensors": [f(2)], "dtype": torch.int32}
    op = "flatten"
    yield from bad_tensors(op, "out", lambda t: {"tensors": [f(3)], "out": t})
    yield from bad_tensors(op, "tensors[1]", lambda t: {"tensors": [f(2), t], "out": f(5)})
    for length in (4, 6, 0):
        message = f"out must hold 5 elements, as many as the tensors, got {length}$"
        yield op, ValueError, message, {"tensors": [f(2), f(3)], "out": f(length)}
    message = r"out must be contiguous, got sizes [\[(]2, 3[\])] with strides [\[(]1, 2[\])]$"
    yield op, ValueError, message, {"tensors": [f(2), f(4)], "out": f(3, 2).t()}
    message = "dtype must be that of out, torch.float32, or None, got torch.float16$"
    yield op, TypeError, message, {"tensors": [f(2)], "out": f(2), "dtype": torch.float16}
    for op, like in (("unflatten", "like"), ("unflatten_into", "tensors")):
        yield from bad_tensors(op, "buffer", lambda t, like=like: {"buffer": t, like: [f(3)]})
        yield from bad_tensors(
            op, f"{like}[1]", lambda t, like=like: {"buffer": f(5), like: [f(2), t]}
        )
        for length, sizes in ((4, [2, 3]), (6, [2, 3]), (0, [2, 3]), (2, [])):
            message = f"buffer must hold {sum(sizes)} elements, as many as {like}, got {length}$"
            yield op, ValueError, message, {"buffer": f(length), like: [f(size) for size in sizes]}
        message = r"buffer must be contiguous, got sizes [\[(]6,?[\])] with strides [\[(]2,?[\])]$"
        yield op, ValueError, message, {"buffer": f(12)[::2], like: [f(6)]}


@pytest.mark.parametrize("is_fake", [False, True])
@pytest.mark.parametrize(("op", "error", "message", "given"), list(refused()))
def test_refused(op, error, message, given, is_fake):
    """By the kernels, and by the fakes with the same exception."""
    with FakeTensorMode() if is_fake else nullcontext() as mode:
        if is_fake:
            given = tree_map_only(torch.Tensor, mode.from_tensor, given)
        with pytest.raises(error) as caught:
            getattr(ops, op)(**given)
    first_line = str(caught.value).splitlines()[0]
    assert re.match(f"{op}: {message}", first_line), first_line


# ---- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "other"), [("cpu", "meta"), ("meta", "cpu")])
def test_tensors_of_several_devices(device, other):
    check_that_devices_must_agree(device, other)


def test_a_buffer_of_another_device():
    with pytest.raises(ValueError, match=r"^flatten: tensors\[0\] must be on .*meta, got cpu$"):
        ops.flatten([f(2)], out=torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"^unflatten_into: tensors\[0\] must be on .*meta"):
        ops.unflatten_into(torch.empty(2, device="meta"), [f(2)])


# ---- what is no tensor ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1.0, "x", [1.0]])
def test_no_tensor(value):
    for call in (
        lambda: ops.flatten([f(2), value]),
        lambda: ops.flatten(value),
        lambda: ops.flatten_stats([value]),
        lambda: torch.ops.commhook.flatten.out([f(2)], out=value),
        lambda: ops.unflatten(value, [f(2)]),
        lambda: ops.unflatten(f(2), [value]),
        lambda: ops.unflatten_into(value, [f(2)]),
        lambda: ops.unflatten_into(f(2), [value]),
        lambda: ops.flatten([f(2)], scale="x"),
        lambda: ops.flatten([f(2)], scale=None),
    ):
        with pytest.raises((TypeError, RuntimeError)):
            call()


# ---- shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [lambda b: b, lambda b: b[2:], lambda b: b[5:], lambda b: b[::5], lambda b: b.view(2, 3)],
)
def test_out_that_shares_memory_with_a_tensor(view):
    out = f(8)[1:7]
    shared = view(out)
    rest = f(out.numel() - shared.numel())
    message = "^flatten: out must share no memory with the tensors, got one that overlaps "
    with pytest.raises(ValueError, match=message + r"tensors\[0\]$"):
        ops.flatten([shared, rest], out=out)
    with pytest.raises(ValueError, match=message + r"tensors\[1\]$"):
        ops.flatten([rest, shared], out=out)


@pytest.mark.parametrize("view", [lambda b: b, lambda b: b[5:], lambda b: b[::5]])
def test_a_buffer_that_shares_memory_with_a_destination(view):
    buffer = f(6)
    shared = view(buffer)
    message = r"^unflatten_into: tensors\[1\] must share no memory with buffer, got one that overl"
    with pytest.raises(ValueError, match=message):
        ops.unflatten_into(buffer, [f(6 - shared.numel()), shared])


@pytest.mark.parametrize(
    "views",
    [
        lambda m: (m, m),
        lambda m: (m[:4], m[3:]),
        lambda m: (m[3:], m[:4]),
        lambda m: (m, m[2:3]),
        lambda m: (m.view(4, 3).t(), m[11:]),
        lambda m: (m, m[::2]),
        lambda m: (m[::2], m),
        lambda m: (m[1::2], m[1::2]),
        lambda m: (m[::11], m[4:]),
        lambda m: (m[4:6], m[1:6:4]),
        lambda m: (m[0:8:2], m[2:12:2]),
        lambda m: (m[0:12:3], m[1:12:2]),
        lambda m: (m.view(3, 4)[:, :3], m.view(3, 4)[:, 2:]),
        lambda m: (m.view(2, 6)[:, ::2], m.view(2, 6)[:, 1:5:3]),
        lambda m: (m.view(3, 4)[:, :2], m.view(torch.float64)[3:5]),
        lambda m: (m.view(torch.bfloat16)[1::4], m[2:]),
    ],
)
def test_destinations_that_overlap(views):
    first, second = views(torch.zeros(12))
    buffer = f(first.numel() + second.numel() + 5)
    message = (
        "^unflatten_into: tensors must share no memory with each other, got "
        r"tensors\[2\] and tensors\[0\] that overlap$"
    )
    with pytest.raises(ValueError, match=message):
        ops.unflatten_into(buffer, [first, f(5), second])


@pytest.mark.parametrize(
    "tensor",
    [
        f(1).expand(6),
        f(3, 1).expand(3, 2),
        f(4).as_strided((3, 2), (1, 1)),
        f(9).as_strided((2, 3), (3, 2)),
    ],
)
def test_a_destination_that_overlaps_itself(tensor):
    message = (
        r"^unflatten_into: tensors\[1\] must reach each of its elements once, got sizes \[.*\] "
        r"with strides \[.*\]$"
    )
    with pytest.raises(ValueError, match=message):
        ops.unflatten_into(f(tensor.numel() + 1), [f(1), tensor])


def test_nothing_is_written_by_a_refused_call():
    destination = torch.zeros(4)
    with pytest.raises(ValueError, match="share no memory"):
        ops.unflatten_into(f(8), [destination, destination])
    with pytest.raises(ValueError, match="must hold 3 elements"):
        ops.flatten([f(3)], out=destination)
    assert (destination == 0).all() and destination._version == 0


@pytest.mark.parametrize("place", ["tensors", "out", "buffer", "destinations"])
def test_a_storage_that_was_freed(place):
    freed = torch.ones(1 << 20)
    freed.untyped_storage().resize_(0)
    calls = {
        "tensors": lambda: ops.flatten([f(2), freed]),
        "out": lambda: ops.flatten([torch.ones(1 << 20)], out=freed),
        "buffer": lambda: ops.unflatten(freed, [torch.ones(1 << 20)]),
        "destinations": lambda: ops.unflatten_into(torch.ones(1 << 20), [freed]),
    }
    with pytest.raises(ValueError, match=r"must have a storage of 4194304 bytes or more, got one"):
        calls[place]()
    ops.unflatten(torch.ones(1 << 20), [freed])  # whose contents are not read


def test_what_only_looks_like_shared_memory_is_accepted():
    memory = torch.zeros(12)
    columns = torch.zeros(3, 4)
    ops.unflatten_into(torch.arange(12.0), [columns[:, 1], columns[:, 2:], columns[:, :1]])
    assert columns.tolist() == [[9, 0, 3, 4], [10, 1, 5, 6], [11, 2, 7, 8]]
    # Neighbours, in any order, and empty tensors inside others.
    ops.unflatten_into(torch.arange(12.0), [memory[6:], memory[:6], memory[3:3]])
    assert memory.tolist() == [*range(6, 12), *range(6)]
    ops.flatten([memory[:6], memory[8:8]], out=memory[6:])
    assert memory.tolist() == [*range(6, 12)] * 2
    # One source may stand twice, or reach its elements twice.
    assert ops.flatten([memory[:1], memory[:1], memory[:1].expand(2)]).tolist() == [6] * 4


def test_tensors_that_interleave_are_accepted():
    columns = torch.zeros(4, 30)
    ops.unflatten_into(torch.arange(120.0), [columns[:, :7], columns[:, 7:9], columns[:, 9:]])
    ops.unflatten_into(torch.arange(120.0), list(columns.t().unbind()))  # too many to compare pairs
    # Apart, though neither strides nor columns say so.
    memory = torch.zeros(12)
    ops.unflatten_into(torch.arange(1.0, 8.0), [memory[0:10:3], memory[1:9:6], memory[2:3]])
    assert memory.tolist() == [1, 5, 7, 2, 0, 0, 3, 6, 0, 4, 0, 0]


# ---- gradients -----------------------------------------------------------------------------------


def test_a_destination_that_requires_grad():
    def leaf():
        return torch.ones(3, requires_grad=True)

    recorded = "must not require grad while gradients are recorded, got a"
    with pytest.raises(RuntimeError, match=f"^flatten: out {recorded} leaf tensor .*no_grad"):
        ops.flatten([f(3)], out=leaf())
    with pytest.raises(RuntimeError, match=f"^flatten: out {recorded} non-leaf tensor"):
        ops.flatten([f(3)], out=leaf() * 2)
    with pytest.raises(RuntimeError, match=rf"^flatten: tensors\[1\] {recorded} leaf.*without out"):
        ops.flatten([f(1), leaf()], out=f(4))
    with pytest.raises(RuntimeError, match=rf"^unflatten_into: tensors\[1\] {recorded} leaf"):
        ops.unflatten_into(f(4), [f(1), leaf()])
    with pytest.raises(RuntimeError, match=f"^unflatten_into: buffer {recorded} leaf"):
        ops.unflatten_into(leaf(), [f(3)])
    with torch.no_grad():
        parameter = leaf()
        ops.unflatten_into(2 * f(3), [parameter])
        ops.flatten([leaf()], out=leaf())
    assert (parameter == 2).all() and parameter.requires_grad


# ---- cpu_capability ------------------------------------------------------------------------------


def test_an_unknown_capability():
    before = ops.cpu_capability()
    message = "^cpu_capability: limit must be reference, default, avx2 or avx512, got 'sse'$"
    with pytest.raises(ValueError, match=message):
        ops.cpu_capability("sse")
    assert ops.cpu_capability() == before


@pytest.mark.parametrize("op", ["flatten", "flatten_stats"])
@pytest.mark.parametrize("number", [-1, 99])
def test_a_number_that_is_no_dtype(op, number):
    # PyTorch passes numbers on unchecked, and crashes where it makes a Python dtype of one.
    for tensor in (f(2), f(2).requires_grad_()):
        with pytest.raises(TypeError, match=f"{op}: dtype must be .* got dtype number {number}"):
            getattr(torch.ops.commhook, op)([tensor], dtype=number)
