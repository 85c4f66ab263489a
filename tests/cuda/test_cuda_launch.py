"""How the bucket operators run on CUDA: streams, graphs, launches, devices, refusals."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, KernelDevice, captured, no_waiting_on_gpu
from ops_reference import check_that_devices_must_agree, make

import torch_commhook.native.bucket_ops as ops

on_gpu = pytest.mark.cuda

commhook = torch.ops.commhook
MANY = 1000


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


# ---- streams -------------------------------------------------------------------------------------


@on_gpu
def test_the_current_stream_is_used():
    tensors = [torch.zeros(1000, device="cuda"), torch.zeros(30, 50, device="cuda").t()]
    out = torch.zeros(2500, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for tensor in tensors:
            tensor.fill_(3.0)
        # On another stream these would run before the fill.
        ops.flatten(tensors, out=out)
        stats = ops.flatten_stats(tensors)
        ops.unflatten_into(out, tensors, scale=2.0)
    stream.synchronize()
    assert (out == 3).all() and all((tensor == 6).all() for tensor in tensors)
    assert stats.sum_of_squares == 9 * 2500


@on_gpu
def test_nothing_waits_for_the_device():
    tensors = [ones(7, 9).t(), *(ones(64) for _ in range(MANY))]
    out = torch.empty(sum(tensor.numel() for tensor in tensors), device="cuda")
    with no_waiting_on_gpu():
        ops.flatten(tensors, out=out)
        ops.flatten(tensors)
        ops.flatten_stats(tensors)
        ops.unflatten(out, tensors)
        ops.unflatten_into(out, tensors)
        torch.cuda._sleep(500_000_000)
        done = torch.cuda.Event()
        ops.flatten(tensors, out=out)
        done.record()
        assert not done.query()


# ---- graphs --------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("count", [3, MANY, 4000])
def test_graphs(count):
    tensors = [torch.zeros(1 + i % 90, device="cuda") for i in range(count)]
    tensors.append(torch.zeros(60, 70, device="cuda").t())
    total = sum(tensor.numel() for tensor in tensors)
    out = torch.zeros(total, device="cuda", dtype=torch.bfloat16)
    returned = [torch.zeros_like(tensor) for tensor in tensors]

    def step():
        ops.flatten(tensors, scale=0.5, out=out)
        ops.unflatten_into(out, returned, scale=4.0)
        return ops.flatten_stats(tensors, scale=2.0)

    replay, stats = captured(step)
    for value in (1.0, 3.0):
        for tensor in tensors:
            tensor.fill_(value)
        replay()
        assert (out == 0.5 * value).all()
        assert all((tensor == 2 * value).all() for tensor in returned)
        assert stats.sum_of_squares == 4 * value * value * total and stats.nonfinite_count == 0


@on_gpu
def test_a_steady_step_allocates_nothing():
    tensors = [ones(64) for _ in range(4000)]
    out = torch.empty(64 * 4000, device="cuda", dtype=torch.half)

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    before = allocations()
    for _ in range(3):
        ops.flatten(tensors, out=out)
        ops.unflatten_into(out, tensors)
    assert allocations() == before


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("count", "launches"), [(1, 1), (161, 1), (1000, 1), (1880, 1), (1881, 2)])
def test_one_launch_for_many_tensors(count: int, launches: int):
    dtypes = (torch.float32, torch.bfloat16)
    tensors = [ones(64, dtype=dtypes[i % 2], device=DEVICE.name) for i in range(count)]
    out = torch.empty(64 * count, device=DEVICE.name, dtype=torch.half)

    def there_and_back() -> None:
        ops.flatten(tensors, out=out)
        ops.unflatten_into(out, tensors)

    names = DEVICE.kernels_of(there_and_back)
    assert sum("unflatten_into_kernel" in name for name in names) == launches, names
    assert len(names) == 2 * launches, names


# ---- the rest of PyTorch -------------------------------------------------------------------------

CHECKED = ("flatten", "flatten.out", "flatten_stats", "unflatten", "unflatten_into")


@on_gpu
@pytest.mark.parametrize("name", ["zero_dimensional", "some_empty", "strided", "channels_last"])
@pytest.mark.parametrize("operator", CHECKED)
def test_opcheck(operator, name):
    tensors = [tensor.cuda() for tensor in make(name, torch.float32)]
    buffer = torch.zeros(sum(tensor.numel() for tensor in tensors), device="cuda")
    mutates = operator in ("flatten.out", "unflatten_into")
    for tensor in (buffer, *tensors):
        tensor.requires_grad_(not mutates)
    args, kwargs = {
        "flatten": ((tensors,), {"dtype": torch.half}),
        "flatten.out": ((tensors,), {"out": buffer}),
        "flatten_stats": ((tensors,), {"dtype": torch.half}),
        "unflatten": ((buffer, tensors), {}),
        "unflatten_into": ((buffer, tensors), {}),
    }[operator]
    packet, _, overload = operator.partition(".")
    op = getattr(getattr(commhook, packet), overload or "default")
    torch.library.opcheck(op, args, {"scale": 0.5, **kwargs})


@on_gpu
def test_gradients():
    tensors = [
        tensor.cuda()[:2, :3].requires_grad_()
        for tensor in make("strided", torch.float64)
        if tensor.dim() == 2
    ]
    assert torch.autograd.gradcheck(lambda *t: ops.flatten(t, scale=0.7), tensors)
    assert torch.autograd.gradcheck(lambda *t: ops.flatten_stats(t, scale=0.7)[:2], tensors)


# ---- devices and refusals ------------------------------------------------------------------------


@on_gpu
def test_the_device_of_the_tensors_is_used():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [ones(64, device="cuda:1"), ones(5, 3, device="cuda:1").t()]
    with torch.cuda.device(0):
        stats = ops.flatten_stats(tensors, scale=2.0)
        ops.unflatten_into(stats.buffer, tensors)
        assert torch.cuda.current_device() == 0
    assert stats.buffer.device.index == 1 and stats.sum_of_squares == 4 * 79
    assert all((tensor == 2).all() for tensor in tensors)


@on_gpu
@pytest.mark.parametrize(("device", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_tensors_of_several_devices(device, other):
    check_that_devices_must_agree(device, other)


@on_gpu
def test_shared_memory():
    memory = ones(8)
    with pytest.raises(ValueError, match=r"^flatten: out must share no memory with the tensors"):
        ops.flatten([memory[:4]], out=memory[2:6])
    with pytest.raises(ValueError, match=r"^unflatten_into: tensors must share no memory with eac"):
        ops.unflatten_into(ones(8), [memory[:4], memory[3:7]])
    assert (memory == 1).all()


@on_gpu
def test_foreign_memory_that_is_not_aligned_for_its_dtype():
    tensor = KernelDevice("cuda").misaligned(4, torch.float32)
    contract = "must begin at an address that is a multiple of its element size, 4, got one 1 byte"
    for name, call in {
        r"flatten: tensors\[1\]": lambda: ops.flatten([ones(2), tensor]),
        r"flatten_stats: tensors\[0\]": lambda: ops.flatten_stats([tensor]),
        "flatten: out": lambda: ops.flatten([ones(4)], out=tensor),
        "unflatten: buffer": lambda: ops.unflatten(tensor, [ones(4)]),
        "unflatten_into: buffer": lambda: ops.unflatten_into(tensor, [ones(4)]),
        r"unflatten_into: tensors\[0\]": lambda: ops.unflatten_into(ones(4), [tensor]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} {contract}"):
            call()
    torch.cuda.synchronize()  # the device still works
