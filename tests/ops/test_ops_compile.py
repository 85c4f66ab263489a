"""The bucket operators under torch.compile and torch.export: no graph breaks, the bits of eager."""

from __future__ import annotations

import pytest
import torch
from ops_reference import (
    assert_same_bits,
    maker,
    one_thread,  # noqa: F401
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import torch_commhook.native.bucket_ops as ops

BACKENDS = ["aot_eager", "inductor"]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def tensors(rows: int = 8) -> list[torch.Tensor]:
    new = maker(torch.float32, seed=rows)
    return [new(rows, 3), new(5, rows).t(), new(rows), new(2, rows)[:, ::2]]


def pass_through_every_operator(inputs, buffer, destinations):
    """Work on both sides of each operator, so that the compiler has something to fuse with."""
    doubled = [tensor * 2 for tensor in inputs]
    flat = ops.flatten(doubled, scale=0.5, dtype=torch.bfloat16)
    stats = ops.flatten_stats(doubled)
    ops.flatten(doubled, scale=3.0, out=buffer)
    read_after_write = buffer + 1
    ops.unflatten_into(buffer, destinations, scale=0.5)
    mixed = destinations[0] * 2 + stats.sum_of_squares
    parts = ops.unflatten(flat.float() + 1, doubled, scale=0.25)
    return [flat, *stats, read_after_write, mixed, *parts]


def run(function, rows: int = 8):
    inputs = tensors(rows)
    count = sum(tensor.numel() for tensor in inputs)
    buffer, destinations = torch.zeros(count), [torch.zeros_like(tensor) for tensor in inputs]
    results = function(inputs, buffer, destinations)
    return [*results, buffer, *destinations]


def assert_all_same(actual, expected):
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(one, other, f"result {i}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operator(backend):
    compiled = torch.compile(pass_through_every_operator, backend=backend, fullgraph=True)
    expected = run(pass_through_every_operator)
    for _ in range(2):
        assert_all_same(run(compiled), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward(backend):
    def loss(inputs):
        stats = ops.flatten_stats([tensor * 2 for tensor in inputs], scale=0.5)
        parts = ops.unflatten(ops.flatten(inputs, dtype=torch.float64).exp(), inputs)
        return stats.sum_of_squares + sum(part.double().sum() for part in parts)

    results = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors()]
        value = function(inputs)
        value.backward()
        results.append([value.detach(), *(tensor.grad for tensor in inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def graphs_of(function, *args) -> list[torch.fx.GraphModule]:
    """The graphs that a compiler gets from the function, functional and traced to ATen."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*args)
    return graphs


def test_writes_are_kept_where_nothing_is_returned():
    def write(buffer, first, second, out):
        ops.unflatten_into(buffer, [first, second])
        ops.flatten([first, second], scale=2.0, out=out)

    buffer = torch.arange(6.0)
    first, second, out = torch.zeros(2), torch.zeros(2, 2).t(), torch.zeros(6)
    graphs = graphs_of(write, buffer, first, second, out)
    assert first.tolist() == [0, 1] and second.tolist() == [[2, 3], [4, 5]]
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    code = "".join(graph.code for graph in graphs)
    assert code.count("unflatten_into") >= 1 and code.count("commhook.flatten") >= 1, code


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_one_buffer_are_written(backend):
    def write(buffer, memory):
        ops.unflatten_into(buffer, [memory[1:4], memory[6:].view(2, 2).t()])
        ops.flatten([buffer[:2] + 7], out=memory[4:6])
        return memory.sum()

    results = []
    for function in (write, torch.compile(write, backend=backend, fullgraph=True)):
        memory = torch.zeros(10)
        results.append([function(torch.arange(1.0, 8.0), memory), memory])
    assert_all_same(*results)
    assert results[1][1].tolist() == [0, 1, 2, 3, 8, 9, 4, 6, 5, 7]


def test_sizes_that_change_do_not_compile_again():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        pass_through_every_operator, backend=counter, fullgraph=True, dynamic=True
    )
    run(compiled, 8)
    compilations = counter.frame_count
    for rows in (8, 12, 14, 32):
        assert_all_same(run(compiled, rows), run(pass_through_every_operator, rows))
    assert counter.frame_count == compilations


def test_another_scale_is_not_mistaken_for_the_first():
    def function(values, scale):
        return ops.flatten([values], scale=scale)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for scale in (1.0, 0.5, 0.25):
        assert compiled(torch.ones(3), scale).tolist() == [scale] * 3


def test_errors_of_shapes_come_while_compiling():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(buffer, destination):
        ops.unflatten_into(buffer, [destination])

    with pytest.raises(Exception, match="buffer must hold 3 elements, as many as tensors, got 4"):
        function(torch.zeros(4), torch.zeros(3))


class Bucketed(torch.nn.Module):
    """Flattens what two layers give, and takes the result apart again."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        parts = [hidden, self.second(hidden)]
        stats = ops.flatten_stats(parts, scale=0.5, dtype=torch.bfloat16)
        buffer = torch.empty(hidden.shape[0] * 6)
        with torch.no_grad():
            ops.flatten([part.detach() for part in parts], out=buffer)
        return ops.unflatten(stats.buffer, parts, scale=2.0), stats.nonfinite_count, buffer


@pytest.mark.parametrize("road", ["export", "decompose", "save"])
def test_export(road, tmp_path):
    torch.manual_seed(0)
    module = Bucketed()
    program = torch.export.export(
        module, (torch.randn(5, 3),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}}
    )
    if road == "decompose":
        program = program.run_decompositions()
    elif road == "save":
        torch.export.save(program, tmp_path / "program.pt2")
        program = torch.export.load(tmp_path / "program.pt2")
    code = program.graph_module.code
    assert "commhook.flatten_stats" in code and "commhook.unflatten" in code
    for rows in (2, 5, 9):
        x = torch.randn(rows, 3)
        parts, count, buffer = module(x)
        with torch.no_grad():
            exported_parts, exported_count, exported_buffer = program.module()(x)
        assert_all_same([*exported_parts, exported_count], [*parts, count])
        assert_same_bits(exported_buffer, buffer)
