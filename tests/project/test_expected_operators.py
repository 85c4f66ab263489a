# ruff: noqa: E501
"""The operators, as texts: their schemas, and the graphs that compiled autograd makes of hooks.

``EXPECTTEST_ACCEPT=1`` writes the new text into this file.
"""

from __future__ import annotations

import importlib
import pkgutil

import expecttest
import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd

import torch_commhook
from torch_commhook import attach, hooks

#: Those of the command and of frameworks register nothing, and need packages that are optional.
COMMAND = ("torch_commhook.cli", "torch_commhook.__main__", "torch_commhook.integrations.")


class TestSchemas(expecttest.TestCase):
    def test_the_schemas_of_all_operators(self) -> None:
        # Some operators are registered with the module that uses them.
        for module in pkgutil.walk_packages(torch_commhook.__path__, "torch_commhook."):
            if not module.name.startswith(COMMAND) and "._" not in module.name:
                importlib.import_module(module.name)
        schemas = [
            str(schema)
            for schema in torch._C._jit_get_all_schemas()
            if schema.name.startswith("commhook::")
        ]
        self.assertExpectedInline(
            "\n".join(sorted(schemas)) + "\n",
            """\
commhook::begin_step(Tensor(a0!) token, str name) -> ()
commhook::blockwise_decode(Tensor message, Tensor(a!)[] tensors, *, int bits, int block_size, bool symmetric, int shards=1, SymInt[]? sizes=None) -> ()
commhook::blockwise_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, int bits, int block_size, bool symmetric, float scale=1.) -> ()
commhook::blockwise_encode(Tensor[] tensors, Tensor(a!) message, *, int bits, int block_size, bool symmetric, int shards=1, SymInt[]? sizes=None, float scale=1., Tensor(b!)? error=None, Tensor? rounding=None) -> ()
commhook::blockwise_reduce(Tensor messages, Tensor(a!) message, int numel, *, int bits, int block_size, bool symmetric, float scale=1., Tensor(b!)? error=None, Tensor? rounding=None) -> ()
commhook::blockwise_reduce_shards(Tensor[] messages, Tensor(a!) message, int numel, *, int bits, int block_size, bool symmetric, float scale=1., Tensor(b!)? error=None, Tensor? rounding=None, Tensor? failed=None) -> ()
commhook::broadcast_coalesced(Tensor(a!)[] tensors, int buffer_size, int rank, str group_name) -> ()
commhook::built_for_torch() -> str
commhook::bytes_of_floats(Tensor values) -> Tensor
commhook::check_finite(Tensor[] tensors, Tensor(a!) count) -> ()
commhook::check_hook_result(Tensor result, Tensor value, str hook) -> ()
commhook::chunk_topk_decode(Tensor message, Tensor(a!)[] tensors, *, int k, int chunk, int bits) -> ()
commhook::chunk_topk_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, int k, int chunk, int bits, float scale=1.) -> ()
commhook::chunk_topk_encode(Tensor[] tensors, Tensor(a!) message, *, int k, int chunk, int bits, float scale=1., Tensor(b!)? error=None, Tensor? rounding=None) -> ()
commhook::commit_step(Tensor(a0!) used, Tensor[] results, str name) -> ()
commhook::count_step(Tensor(a0!) token, Tensor[] results, str traffic, str key) -> ()
commhook::cpu_capability(str? limit=None) -> str
commhook::decay_error(Tensor(a0!) error, float decay, Tensor? rounding=None) -> ()
commhook::flatten(Tensor[] tensors, *, float scale=1., ScalarType? dtype=None) -> Tensor
commhook::flatten.out(Tensor[] tensors, *, float scale=1., Tensor(a!) out) -> Tensor(a!)
commhook::flatten_stats(Tensor[] tensors, *, float scale=1., ScalarType? dtype=None) -> (Tensor buffer, Tensor sum_of_squares, Tensor nonfinite_count)
commhook::floats_of_bytes(Tensor message) -> Tensor
commhook::fp8_decode(Tensor message, Tensor(a!)[] tensors, *, str format, int block_size, int shards=1, SymInt[]? sizes=None) -> ()
commhook::fp8_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, str format, int block_size, float scale=1.) -> ()
commhook::fp8_encode(Tensor[] tensors, Tensor(a!) message, *, str format, int block_size, int shards=1, SymInt[]? sizes=None, float scale=1., Tensor(b!)? error=None) -> ()
commhook::fp8_reduce(Tensor messages, Tensor(a!) message, int numel, *, str format, int block_size, float scale=1., Tensor(b!)? error=None) -> ()
commhook::fp8_reduce_shards(Tensor[] messages, Tensor(a!) message, int numel, *, str format, int block_size, float scale=1., Tensor(b!)? error=None, Tensor? failed=None) -> ()
commhook::has_cuda_kernels() -> bool
commhook::keep_unsent(Tensor(a0!)[] errors, Tensor[] results, Tensor[] gradients, Tensor used, SymInt[] table) -> ()
commhook::leave_out(Tensor(a0!) used, Tensor touched, SymInt[] missing, bool needs_all, str key) -> ()
commhook::low_rank_gather_left(Tensor[] gradients, Tensor(a!) matrices, Tensor right, Tensor(b!) left, *, bool adds=False) -> ()
commhook::low_rank_left(Tensor matrices, Tensor right, Tensor(a!) left) -> ()
commhook::low_rank_product(Tensor left, Tensor right, Tensor(a!) matrices) -> ()
commhook::low_rank_right(Tensor matrices, Tensor left, Tensor(a!) right) -> ()
commhook::low_rank_right_error(Tensor(a!) matrices, Tensor left, Tensor(b!) right) -> ()
commhook::note_backward(Tensor(a0!) token, str key) -> ()
commhook::powersgd_left(Tensor[] sources, Tensor(a1!) work, Tensor q, str plan, float scale, bool adds) -> Tensor
commhook::powersgd_restore(Tensor(a0!) q, Tensor(a1!) work, Tensor wire, Tensor left, Tensor right, str plan, bool keeps_error) -> Tensor
commhook::powersgd_right(Tensor(a0!) work, Tensor wire, str plan, float scale, bool keeps_error) -> (Tensor, Tensor)
commhook::randomk_decode(Tensor message, Tensor(a!)[] tensors, Tensor rounding) -> ()
commhook::randomk_encode(Tensor[] tensors, Tensor(a!) message, Tensor rounding, *, bool unbiased=False, float scale=1., Tensor(b!)? error=None) -> ()
commhook::sign_decode(Tensor message, Tensor(a!)[] tensors, *, int block_size, int shards=1, SymInt[]? sizes=None) -> ()
commhook::sign_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, int block_size, float scale=1.) -> ()
commhook::sign_encode(Tensor[] tensors, Tensor(a!) message, *, int block_size, int shards=1, SymInt[]? sizes=None, float scale=1., Tensor(b!)? error=None) -> ()
commhook::sign_reduce(Tensor messages, Tensor(a!) message, int numel, *, int block_size, float scale=1., Tensor(b!)? error=None) -> ()
commhook::sign_reduce_shards(Tensor[] messages, Tensor(a!) message, int numel, *, int block_size, float scale=1., Tensor(b!)? error=None, Tensor? failed=None) -> ()
commhook::start_all_gather(Tensor tensor, SymInt[]? sizes, str group_name, bool is_second) -> Tensor
commhook::start_all_reduce(Tensor tensor, str group_name, bool is_second) -> Tensor
commhook::start_all_to_all(Tensor tensor, SymInt[] sends, SymInt[] gets, str group_name) -> Tensor
commhook::sum_rows(Tensor rows, Tensor(a!) out) -> ()
commhook::symmetric_barrier(Tensor(a!)[] controls, int rank, *, float timeout) -> ()
commhook::symmetric_gather(Tensor[] shards, Tensor(a!) message, *, Tensor? failed=None) -> ()
commhook::topk_decode(Tensor message, Tensor(a!)[] tensors) -> ()
commhook::topk_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, float scale=1.) -> ()
commhook::topk_encode(Tensor[] tensors, Tensor(a!) message, *, float scale=1., Tensor(b!)? error=None, Tensor? rounding=None) -> ()
commhook::total_norm(Tensor[] results) -> Tensor
commhook::unflatten(Tensor buffer, Tensor[] like, *, float scale=1.) -> Tensor[]
commhook::unflatten_into(Tensor buffer, Tensor(a!)[] tensors, *, float scale=1.) -> ()
commhook::without_unused(Tensor result, Tensor used, SymInt[] members, SymInt[] lengths) -> Tensor
commhook::write_missing(Tensor(a0!) token, Tensor used, Tensor[] gradients, SymInt[] numbers, str key) -> ()
""",
        )


def captured(hook: hooks.Hook) -> str:
    """The targets of ours and of c10d in each graph of three backward passes.

    Without overloads, and through what makes a mutating operator functional. Graphs that are alike
    stand there once.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = attach(model, hook)
    graphs: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append([_target(node) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    backend = aot_autograd(fw_compiler=compiler)
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    numbers: dict[str, list[str]] = {}
    for number, targets in enumerate(graphs):
        ours = [f"    {each}\n" for each in targets if each.startswith(("commhook", "_c10d"))]
        numbers.setdefault("".join(ours), []).append(str(number))
    return "".join(f"graph {', '.join(each)}\n{text}" for text, each in numbers.items())


def _target(node: torch.fx.Node) -> str:
    target = node.target
    if "auto_functionalized" in str(target):
        target = node.args[0]
    return str(target).removesuffix(".default")


@pytest.mark.usefixtures("one_rank", "fresh_compiler")
class TestGraphs(expecttest.TestCase):
    def test_cast(self) -> None:
        self.assertExpectedInline(
            captured(hooks.cast()),
            """\
graph 0, 1
    commhook.flatten
    commhook.unflatten_into
""",
        )

    def test_error_feedback_of_blockwise(self) -> None:
        self.assertExpectedInline(
            captured(hooks.error_feedback(hooks.blockwise())),
            """\
graph 0, 1
    commhook.blockwise_encode
    commhook.start_all_to_all
    _c10d_functional.wait_tensor
    commhook.blockwise_reduce
    commhook.start_all_gather
    _c10d_functional.wait_tensor
    commhook.blockwise_decode
    commhook.unflatten_into
    commhook.count_step
""",
        )
