"""The checks of hooks on CUDA: values, streams, graphs, and that nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
from kernel_device import COUNTS, DEVICE, captured, no_waiting_on_gpu
from ops_reference import (
    DTYPES,
    NAN,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    check_counts,
    check_counts_of_16_bits,
    counted,
    expected_count,
    maker,
    new_count,
    spoil,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch_releases import since

from torch_commhook.autograd import FiniteCheck, register_hook
from torch_commhook.native.bucket_ops import check_finite, check_hook_result

pytestmark = pytest.mark.usefixtures("fresh_compiler")
in_kernels = pytest.mark.usefixtures("cuda_kernels")
on_gpu = pytest.mark.cuda

commhook = torch.ops.commhook


# ---- values --------------------------------------------------------------------------------------


@in_kernels
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_shapes_and_dtypes(name: str) -> None:
    check_counts(name, DEVICE.copy)


@in_kernels
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_tensors(count: int) -> None:
    new = maker(torch.float32)
    tensors = [spoil(new(1 + 37 * i % 101)) for i in range(count)]
    assert counted(*DEVICE.copy(tensors)) == expected_count(tensors)


@in_kernels
def test_every_16_bit_value() -> None:
    check_counts_of_16_bits(DEVICE.name)


@in_kernels
def test_every_alignment() -> None:
    for dtype in DTYPES:
        memory = torch.full((700,), NAN, dtype=dtype, device=DEVICE.name)
        for first in range(9):
            for length in (0, 1, 5, 64, 643):
                piece = memory[first : first + length]
                assert counted(piece) == length
                piece.zero_()
                assert counted(piece) == 0 and counted(memory) == 700 - length
                piece.fill_(NAN)


@in_kernels
def test_other_dtypes_and_layouts() -> None:
    z = torch.tensor([1 + 1j, complex(NAN, 1)], device=DEVICE.name)
    sparse = torch.tensor([[0.0, NAN], [1.0, 0.0]], device=DEVICE.name).to_sparse()
    assert counted(z, z.conj(), sparse, torch.ones(3, device=DEVICE.name).long()) == 3


# ---- streams and graphs --------------------------------------------------------------------------


@on_gpu
def test_nothing_waits_for_the_device() -> None:
    check = FiniteCheck("cuda")
    weight = torch.full((9,), NAN, device="cuda", requires_grad=True)
    check.watch([("weight", weight)])
    sparse = torch.ones(3, 3, device="cuda").to_sparse()
    tensors = [weight.detach(), sparse, torch.ones(3, 5, device="cuda").t()]
    count = new_count("cuda")
    check_finite(tensors, count)
    with no_waiting_on_gpu():
        check_finite(tensors, count)
        check_hook_result(tensors[0], tensors[0], "hook")
        check(tensors[0])
        (weight * 2).sum().backward()
        total = check.count
        check.reset()
        torch.cuda._sleep(500_000_000)
        done = torch.cuda.Event()
        check_finite(tensors, count)
        done.record()
        assert not done.query()
    assert int(count) == 3 * 9 and int(total) == 9 and int(check.count) == 0


@on_gpu
def test_several_streams_share_a_count() -> None:
    count, x = new_count("cuda"), torch.full((1_000_000,), NAN, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                check_finite([x], count)
    torch.cuda.synchronize()
    assert int(count) == 20 * x.numel()


@on_gpu
@pytest.mark.parametrize("length", [3, 1000, 4000])
def test_graphs(length: int) -> None:
    tensors = [torch.zeros(1 + i % 90, device="cuda") for i in range(length)]
    tensors.append(torch.zeros(60, 70, device="cuda").t())
    count = new_count("cuda")

    def step() -> None:
        check_hook_result(tensors[0], tensors[0], "hook")
        check_finite(tensors, count)

    replay, _ = captured(step)
    total = sum(tensor.numel() for tensor in tensors)
    for value, expected in ((1.0, 0), (NAN, total), (2.0, 0)):
        for tensor in tensors:
            tensor.fill_(value)
        count.zero_()
        replay()
        assert int(count) == expected


@on_gpu
def test_a_backward_with_hooks_in_a_graph() -> None:
    check = FiniteCheck("cuda")
    model = torch.nn.Linear(3, 2, device="cuda")
    check.watch(model)
    x, factor = torch.ones(5, 3, device="cuda"), torch.ones(2, device="cuda")
    replay, _ = captured(lambda: (model(x) * factor).sum().backward())
    check.reset()
    for step, value in enumerate((1.0, NAN, NAN)):
        factor[0] = value
        replay()
        assert int(check.count) == 4 * step
    with pytest.raises(RuntimeError, match=r"got 8 .*: 6 of 'weight', 2 of 'bias'"):
        check.raise_if_nonfinite()


@since("2.13")
@on_gpu
def test_compiled_code_goes_into_a_graph() -> None:
    check = FiniteCheck("cuda")

    def function(x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> Tensor:
            result = grad * 2
            check_hook_result(result, grad, "double")
            return result

        y = x.sin() * 2
        check(y)
        y.register_hook(check)
        y.register_hook(hook)
        return (y * y).sum()

    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    for step in range(1, 7):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(torch.tensor([1.0, NAN], device="cuda", requires_grad=True)).backward()
        assert int(check.count) == 2 * step
    assert counters["inductor"]["cudagraph_skips"] == 0


# ---- the rest of PyTorch -------------------------------------------------------------------------


@in_kernels
def test_one_launch_for_many_tensors() -> None:
    tensors = [torch.ones(64, device=DEVICE.name) for _ in range(1000)]
    count = new_count(DEVICE.name)
    (name,) = DEVICE.kernels_of(lambda: check_finite(tensors, count))
    assert "check_finite_kernel" in name


@on_gpu
def test_devices_must_agree() -> None:
    on_gpu, on_cpu = torch.ones(2, device="cuda"), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"^hook 'h' has changed the type .*cuda:0, got .*cpu\)"):
        check_hook_result(on_cpu, on_gpu, "h")
    with pytest.raises(ValueError, match=r"^check_finite: tensors\[1\] must be on .*cuda:0, got c"):
        check_finite([on_gpu, on_cpu], new_count("cuda"))
    with pytest.raises(ValueError, match=r"^check_finite: tensors\[0\] must be on .*cpu, got cuda"):
        check_finite([on_gpu], torch.zeros((), dtype=torch.int64))
    with pytest.raises(ValueError, match="make a check for each device"):
        FiniteCheck("cpu").watch([("w", on_gpu)])


@on_gpu
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    tensor = torch.ones(3, 4, device="cuda", requires_grad=grad)
    torch.library.opcheck(commhook.check_hook_result.default, (tensor, tensor.detach() * 2, "hook"))
    torch.library.opcheck(commhook.check_finite.default, ([tensor, tensor.t()], new_count("cuda")))


@on_gpu
def test_on_another_thread_than_the_main_one() -> None:
    check = FiniteCheck("cuda")  # the engine runs hooks of CUDA tensors on a thread of its own
    x = torch.ones(3, device="cuda", requires_grad=True)
    register_hook(x, check)
    (x * NAN).sum().backward()
    assert int(check.count) == 3
