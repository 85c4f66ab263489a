# ruff: noqa: E501
"""The operators, as texts.

``EXPECTTEST_ACCEPT=1`` writes the new text into this file.
"""

from __future__ import annotations

import importlib
import pkgutil

import expecttest
import torch

import torch_commhook

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
