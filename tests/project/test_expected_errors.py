# ruff: noqa: E501
"""What is refused and what is said about it, as texts: a call, and below it the error.

``EXPECTTEST_ACCEPT=1`` writes the new text into this file.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import expecttest
import hook_examples
import named_hooks
import pytest
import torch
from hostile_states import GONE, changed
from refusals import refusals
from torch import nn

from torch_commhook import (
    GradBucket,
    attach,
    check_hook,
    codecs,
    hooks,
    parse_hook_result,
    run_hook,
)
from torch_commhook.cli.hook_expression import HookExpressionError, parse_hook
from torch_commhook.native import bucket_ops as ops
from torch_commhook.testing import simulate

NAMES: dict[str, Any] = {
    "__name__": __name__,
    "GradBucket": GradBucket,
    "attach": attach,
    "check_hook": check_hook,
    "codecs": codecs,
    "functools": functools,
    "commhook": torch.ops.commhook,
    "hooks": hooks,
    "math": math,
    "nn": nn,
    "ones": torch.ones,
    "ops": ops,
    "parse_hook_result": parse_hook_result,
    "run_hook": run_hook,
    "simulate": simulate,
    "torch": torch,
}


@pytest.mark.usefixtures("one_rank")
class TestAttach(expecttest.TestCase):
    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
    def test_wrong_arguments(self) -> None:
        taken = nn.Linear(2, 2)
        handle = attach(taken, hooks.cast())
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        frozen = nn.Linear(2, 2).requires_grad_(False)
        names = {
            **NAMES,
            "net": nn.Linear(2, 2),
            "taken": taken,
            "ddp": ddp,
            "frozen": frozen,
            "half": nn.Sequential(taken, nn.Linear(2, 2)),
            "handle": handle,
        }
        calls = """
            attach([], hooks.cast())
            attach(torch.jit.script(nn.Linear(2, 2)), hooks.cast())
            attach(net, None)
            attach(net, hooks.cast)
            attach(net, hooks.blockwise)
            attach(net, hooks.topk)
            attach(net, codecs.blockwise(bits=4))
            attach(net, codecs.topk)
            handle.replace(codecs.sign())
            attach(net, lambda bucket: bucket)
            attach(net, hooks.cast(), state=3)
            attach(net, hooks.cast(), process_group=1)
            attach(net, hooks.cast(), bucket_cap_mb=0)
            attach(net, hooks.cast(), bucket_cap_mb="25")
            attach(net, hooks.cast(), scaler=3)
            attach(nn.Linear(2, 2, device="meta"), hooks.cast())
            attach(nn.ReLU(), hooks.cast())
            attach(frozen, hooks.cast())
            attach(ddp, hooks.cast(), bucket_cap_mb=1)
            attach(ddp, hooks.cast(), init_sync=False)
            attach(ddp.module, hooks.cast())
            attach(taken, hooks.allreduce())
            attach(half, hooks.allreduce())
        """
        text = refusals(calls, names)
        handle.remove()
        self.assertExpectedInline(
            text,
            """\
attach([], hooks.cast())
    TypeError: attach: model must be a torch.nn.Module, got list
attach(torch.jit.script(nn.Linear(2, 2)), hooks.cast())
    TypeError: attach: model must not be a ScriptModule, which takes no Python hooks
attach(net, None)
    TypeError: check_hook: a hook must be callable as hook(state, bucket), got None
attach(net, hooks.cast)
    TypeError: check_hook: hook 'torch_commhook.hooks.mean.cast' must be an instance or a function, got the class itself; call it first
attach(net, hooks.blockwise)
    TypeError: attach: hooks.blockwise makes a hook; call it: hooks.blockwise()
attach(net, hooks.topk)
    TypeError: attach: hooks.topk makes a hook; call it: hooks.topk()
attach(net, codecs.blockwise(bits=4))
    TypeError: attach: a codec is no hook; use hooks.blockwise(bits=4)
attach(net, codecs.topk)
    TypeError: attach: a codec is no hook; use hooks.topk(...)
handle.replace(codecs.sign())
    TypeError: HookHandle.replace: a codec is no hook; use hooks.sign()
attach(net, lambda bucket: bucket)
    TypeError: check_hook: hook 'test_expected_errors.<lambda>' must be callable as hook(state, bucket), got the signature (bucket)
attach(net, hooks.cast(), state=3)
    TypeError: attach: state must be None for hook 'cast(bfloat16)', which keeps its own, got int
attach(net, hooks.cast(), process_group=1)
    TypeError: torch_commhook: process_group must be a ProcessGroup, got int
attach(net, hooks.cast(), bucket_cap_mb=0)
    ValueError: attach: bucket_cap_mb must be a positive number of MiB, got 0
attach(net, hooks.cast(), bucket_cap_mb="25")
    ValueError: attach: bucket_cap_mb must be a positive number of MiB, got '25'
attach(net, hooks.cast(), scaler=3)
    TypeError: attach: scaler must be a torch.amp.GradScaler, or have its get_scale(), got int
attach(nn.Linear(2, 2, device="meta"), hooks.cast())
    ValueError: attach: parameter 'weight' is on the meta device; materialise the model (model.to_empty(device=...), then load or initialise it) before attaching
attach(nn.ReLU(), hooks.cast())
    ValueError: attach: torch.nn.modules.activation.ReLU has no parameter that requires grad
attach(frozen, hooks.cast())
    ValueError: attach: torch.nn.modules.linear.Linear has no parameter that requires grad
attach(ddp, hooks.cast(), bucket_cap_mb=1)
    ValueError: attach: bucket_cap_mb must be given to DistributedDataParallel, which has it already; got 1 for a model of that class
attach(ddp, hooks.cast(), init_sync=False)
    ValueError: attach: init_sync must be given to DistributedDataParallel, which has it already; got False for a model of that class
attach(ddp.module, hooks.cast())
    RuntimeError: attach: the gradient of parameter 'weight' is averaged by a DistributedDataParallel already; attach the hook to that, the one around torch.nn.modules.linear.Linear: attach(ddp, hook). It is trainer.model in Lightning, trainer.model_wrapped in transformers, and what prepare() returns in Accelerate
attach(taken, hooks.allreduce())
    RuntimeError: attach: hook 'cast(bfloat16)' is attached to this model already; remove() it, or replace() it through its handle
attach(half, hooks.allreduce())
    RuntimeError: attach: parameter '0.weight' belongs to another module as well, to which hook 'cast(bfloat16)' is attached already
""",
        )

    def test_a_handle_that_was_removed(self) -> None:
        handle = attach(nn.Linear(2, 2), hooks.error_feedback(hooks.sign()))
        handle.remove()
        calls = """
            handle.replace(hooks.cast())
            handle.synchronize()
            handle.load_state_dict({})
        """
        self.assertExpectedInline(
            refusals(calls, {**NAMES, "handle": handle}),
            """\
handle.replace(hooks.cast())
    RuntimeError: HookHandle.replace: hook 'error_feedback(sign())' is not attached any more; use attach()
handle.synchronize()
    RuntimeError: HookHandle.synchronize: hook 'error_feedback(sign())' is not attached any more
handle.load_state_dict({})
    RuntimeError: HookHandle.load_state_dict: hook 'error_feedback(sign())' is not attached any more
""",
        )


class TestOperators(expecttest.TestCase):
    def test_wrong_dtypes_shapes_and_layouts(self) -> None:
        names = {
            **NAMES,
            "message": zeros_of_bytes(16),
            "bytes": zeros_of_bytes,
            "x": torch.ones(64),
        }
        calls = """
            ops.flatten([])
            ops.flatten([x.int()])
            ops.flatten([x, x.to_sparse()])
            ops.flatten([x, x.half()])
            ops.flatten([x], dtype=torch.int32)
            ops.flatten([x], out=x[1:].clone())
            ops.flatten([x], out=x)
            ops.flatten([x], out=ones(64, requires_grad=True))
            ops.flatten([x, ones(2, device="meta")])
            ops.unflatten(x, [ones(63)])
            ops.unflatten(ones(128)[::2], [x])
            ops.unflatten_into(ones(128), [x, x])
            ops.unflatten_into(ones(64), [ones(1).expand(64)])
            ops.cpu_capability("sse")
            commhook.topk_encode([], message)
            commhook.topk_encode([x.long()], message)
            commhook.topk_encode([x], message[:12])
            commhook.topk_encode([x], message[:0])
            commhook.topk_encode([x[:1]], message)
            commhook.topk_encode([x], message.float())
            commhook.topk_encode([x], bytes(32)[::2])
            commhook.topk_encode([x], bytes(17)[1:])
            commhook.topk_encode([x], message, error=ones(63))
            commhook.topk_encode([x], message, error=x.half())
            commhook.topk_encode([x.expand(1 << 26, 64)], message)
            commhook.topk_encode([ones(64, requires_grad=True)], message)
            commhook.blockwise_encode([x], message, bits=8, block_size=64, symmetric=True)
            commhook.blockwise_encode([x], message, bits=3, block_size=64, symmetric=True)
            commhook.blockwise_encode([x], message, bits=8, block_size=0, symmetric=True)
            commhook.sign_encode([x], message, block_size=33)
            commhook.sign_decode(message, [x], block_size=64)
            commhook.fp8_encode([x], message, format="e3m4", block_size=64)
            commhook.sum_rows(x, x)
        """
        self.assertExpectedInline(
            refusals(calls, names),
            """\
ops.flatten([])
    ValueError: flatten: tensors must hold at least one tensor, got none
ops.flatten([x.int()])
    TypeError: flatten: tensors[0] must be of dtype float64, float32, float16 or bfloat16, got torch.int32
ops.flatten([x, x.to_sparse()])
    TypeError: flatten: tensors[1] must be dense (torch.strided), got layout Sparse
ops.flatten([x, x.half()])
    TypeError: flatten: dtype must be given where the tensors differ in theirs, got none for tensors[0] of torch.float32 and tensors[1] of torch.float16
ops.flatten([x], dtype=torch.int32)
    TypeError: flatten: dtype must be float64, float32, float16 or bfloat16, got torch.int32
ops.flatten([x], out=x[1:].clone())
    ValueError: flatten: out must hold 64 elements, as many as the tensors, got 63
ops.flatten([x], out=x)
    ValueError: flatten: out must share no memory with the tensors, got one that overlaps tensors[0]
ops.flatten([x], out=ones(64, requires_grad=True))
    RuntimeError: flatten: out must not require grad while gradients are recorded, got a leaf tensor that does; call it under torch.no_grad()
ops.flatten([x, ones(2, device="meta")])
    ValueError: flatten: tensors[1] must be on the device of tensors[0], cpu, got meta
ops.unflatten(x, [ones(63)])
    ValueError: unflatten: buffer must hold 63 elements, as many as like, got 64
ops.unflatten(ones(128)[::2], [x])
    ValueError: unflatten: buffer must be contiguous, got sizes [64] with strides [2]
ops.unflatten_into(ones(128), [x, x])
    ValueError: unflatten_into: tensors must share no memory with each other, got tensors[1] and tensors[0] that overlap
ops.unflatten_into(ones(64), [ones(1).expand(64)])
    ValueError: unflatten_into: tensors[0] must reach each of its elements once, got sizes [64] with strides [0]
ops.cpu_capability("sse")
    ValueError: cpu_capability: limit must be reference, default, avx2 or avx512, got 'sse'
commhook.topk_encode([], message)
    ValueError: topk_encode: tensors must hold at least one tensor, got none
commhook.topk_encode([x.long()], message)
    TypeError: topk_encode: tensors[0] must be of dtype float64, float32, float16 or bfloat16, got torch.int64
commhook.topk_encode([x], message[:12])
    ValueError: topk_encode: message must hold 8 bytes for each entry, of which there are from 1 to 64, got 12 bytes
commhook.topk_encode([x], message[:0])
    ValueError: topk_encode: message must hold 8 bytes for each entry, of which there are from 1 to 64, got 0 bytes
commhook.topk_encode([x[:1]], message)
    ValueError: topk_encode: message must hold 8 bytes for each entry, of which there are from 1 to 1, got 16 bytes
commhook.topk_encode([x], message.float())
    TypeError: topk_encode: message must be of dtype uint8, got torch.float32
commhook.topk_encode([x], bytes(32)[::2])
    ValueError: topk_encode: message must be contiguous, got sizes [16] with strides [2]
commhook.topk_encode([x], bytes(17)[1:])
    ValueError: topk_encode: message must begin at an address that is a multiple of 4, got a remainder of 1
commhook.topk_encode([x], message, error=ones(63))
    ValueError: topk_encode: error must be contiguous and hold 64 elements, got sizes [63] with strides [1]
commhook.topk_encode([x], message, error=x.half())
    TypeError: topk_encode: error must be of dtype float32 or bfloat16, got torch.float16
commhook.topk_encode([x.expand(1 << 26, 64)], message)
    ValueError: topk_encode: tensors must hold less than 2^31 elements, got 4294967296
commhook.topk_encode([ones(64, requires_grad=True)], message)
    RuntimeError: topk_encode: tensors[0] must not require grad while gradients are recorded, got a leaf tensor that does; call it under torch.no_grad()
commhook.blockwise_encode([x], message, bits=8, block_size=64, symmetric=True)
    ValueError: blockwise_encode: message must hold 80 bytes, got 16
commhook.blockwise_encode([x], message, bits=3, block_size=64, symmetric=True)
    ValueError: blockwise_encode: bits must be 4 or 8, got 3
commhook.blockwise_encode([x], message, bits=8, block_size=0, symmetric=True)
    ValueError: blockwise_encode: block_size must be a multiple of 8 of at most 4096, got 0
commhook.sign_encode([x], message, block_size=33)
    ValueError: sign_encode: block_size must be a multiple of 32 of at most 4096, got 33
commhook.sign_decode(message, [x], block_size=64)
    ValueError: sign_decode: message must hold 32 bytes, got 16
commhook.fp8_encode([x], message, format="e3m4", block_size=64)
    ValueError: fp8_encode: format must be 'e4m3' or 'e5m2', got 'e3m4'
commhook.sum_rows(x, x)
    ValueError: sum_rows: rows must be contiguous, of two dimensions, with one row or more, got sizes [64] with strides [1]
""",
        )


def zeros_of_bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


class TestHooks(expecttest.TestCase):
    def test_options_of_hooks(self) -> None:
        calls = """
            hooks.cast(torch.float32)
            hooks.cast("float16")
            hooks.compressed(3)
            hooks.blockwise(bits=3)
            hooks.blockwise(seed="a")
            hooks.blockwise(block_size=7)
            hooks.blockwise(rounding="up")
            hooks.fp8("e3m4")
            hooks.sign(33)
            hooks.topk(0)
            hooks.topk(1.5)
            hooks.randomk("half")
            hooks.clip(0)
            hooks.clip("1")
            hooks.clip(float("nan"))
            hooks.clip(10**400)
            hooks.policy(5)
            hooks.policy("a")
            hooks.policy([("dim = 1", hooks.allreduce())])
            hooks.policy(["dim <= 1"])
            hooks.policy([("dim <= 1", 3)])
            hooks.policy([("dim <= 1", hooks.clip(1.0))])
            hooks.policy([], hooks.after(1, hooks.adaptive(1000)))
            hooks.adaptive(0)
            hooks.adaptive(1.5)
            hooks.cpp(3)
            hooks.hierarchical(3, intra_group=0, inter_group=0)
            hooks.hierarchical(codecs.sign(), intra_group=None, inter_group=None)
        """
        self.assertExpectedInline(
            refusals(calls, NAMES),
            """\
hooks.cast(torch.float32)
    TypeError: cast: dtype must be torch.float16 or torch.bfloat16, got torch.float32
hooks.cast("float16")
    TypeError: cast: dtype must be torch.float16 or torch.bfloat16, got float16
hooks.compressed(3)
    TypeError: compressed: codec must be a Codec, got int; see torch_commhook.codecs
hooks.blockwise(bits=3)
    ValueError: blockwise: bits must be 4 or 8, got 3
hooks.blockwise(seed="a")
    TypeError: compressed: seed must be an int, got str
hooks.blockwise(block_size=7)
    ValueError: blockwise: block_size must be a multiple of 8 of at most 4096, got 7
hooks.blockwise(rounding="up")
    ValueError: blockwise: rounding must be 'nearest' or 'stochastic', got 'up'
hooks.fp8("e3m4")
    ValueError: fp8: format must be 'e4m3' or 'e5m2', got 'e3m4'
hooks.sign(33)
    ValueError: sign: block_size must be a multiple of 32 of at most 4096, got 33
hooks.topk(0)
    ValueError: topk: density must be more than 0 and at most 1, got 0
hooks.topk(1.5)
    ValueError: topk: density must be more than 0 and at most 1, got 1.5
hooks.randomk("half")
    TypeError: randomk: density must be a number, got 'half'
hooks.clip(0)
    ValueError: clip: max_norm must be positive, got 0
hooks.clip("1")
    TypeError: clip: max_norm must be a number, got str
hooks.clip(float("nan"))
    ValueError: clip: max_norm must be positive, got nan
hooks.clip(10**400)
    ValueError: clip: max_norm must be a number that a float can hold, got an int of 1329 bits
hooks.policy(5)
    TypeError: policy: rules must be a sequence of pairs of a condition and a hook, got int
hooks.policy("a")
    TypeError: policy: rules must be a sequence of pairs of a condition and a hook, got str
hooks.policy([("dim = 1", hooks.allreduce())])
    ValueError: policy: rules[0] must have a condition such as 'dim <= 1', 'numel < 1000' or '*.bias', got 'dim = 1'
hooks.policy(["dim <= 1"])
    TypeError: policy: rules[0] must be a pair of a condition and a hook, got 'dim <= 1'
hooks.policy([("dim <= 1", 3)])
    TypeError: policy: rules[0] must have one of torch_commhook.hooks, got int
hooks.policy([("dim <= 1", hooks.clip(1.0))])
    ValueError: policy: rules[0] must not be about all gradients together, got clip(1)
hooks.policy([], hooks.after(1, hooks.adaptive(1000)))
    ValueError: policy: default must not be about all gradients together, got after(1, adaptive(1000))
hooks.adaptive(0)
    ValueError: adaptive: budget must be at least 1, got 0
hooks.adaptive(1.5)
    TypeError: adaptive: budget must be an int, got float
hooks.cpp(3)
    TypeError: cpp: name must be a str, got int
hooks.hierarchical(3, intra_group=0, inter_group=0)
    TypeError: hierarchical: codec must be a Codec, got int; see torch_commhook.codecs
hooks.hierarchical(codecs.sign(), intra_group=None, inter_group=None)
    TypeError: hierarchical: intra_group must be a ProcessGroup, got None
""",
        )

    def test_hooks_around_others(self) -> None:
        calls = """
            hooks.error_feedback(hooks.allreduce())
            hooks.error_feedback(print)
            hooks.error_feedback(hooks.error_feedback(hooks.sign()))
            hooks.error_feedback(hooks.policy())
            hooks.error_feedback(hooks.after(1, hooks.cast(), before=hooks.sign()))
            hooks.after(-1, hooks.sign())
            hooks.after(1.5, hooks.sign())
            hooks.after(1, hooks.sign(), before=3)
            hooks.after(1, hooks.cast(), before=hooks.error_feedback(hooks.sign()))
            hooks.after(1, hooks.error_feedback(hooks.sign()), before=hooks.blockwise())
            hooks.after(1, hooks.policy(), before=hooks.error_feedback(hooks.sign()))
            hooks.after(1, hooks.policy([], hooks.cast()), before=hooks.policy([], hooks.cast()))
        """
        self.assertExpectedInline(
            refusals(calls, NAMES),
            """\
hooks.error_feedback(hooks.allreduce())
    ValueError: error_feedback: hook must be one whose messages lose something, got allreduce()
hooks.error_feedback(print)
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got builtin_function_or_method
hooks.error_feedback(hooks.error_feedback(hooks.sign()))
    ValueError: error_feedback: hook must be one that does not remember what it loses already, got error_feedback(sign())
hooks.error_feedback(hooks.policy())
    ValueError: error_feedback: hook must be one that does not remember what it loses already, got policy()
hooks.error_feedback(hooks.after(1, hooks.cast(), before=hooks.sign()))
    ValueError: error_feedback: hook must be one whose messages lose something, got after(1, cast(bfloat16), before=sign())
hooks.after(-1, hooks.sign())
    ValueError: after: step must be at least 0, got -1
hooks.after(1.5, hooks.sign())
    TypeError: after: step must be an int, got float
hooks.after(1, hooks.sign(), before=3)
    TypeError: after: before must be one of torch_commhook.hooks, got int
hooks.after(1, hooks.cast(), before=hooks.error_feedback(hooks.sign()))
    ValueError: after: hook must remember what it loses, as before does, whose losses it is to send, got cast(bfloat16) after error_feedback(sign()); use error_feedback
hooks.after(1, hooks.error_feedback(hooks.sign()), before=hooks.blockwise())
    ValueError: after: before must remember what it loses, as hook does, got blockwise() before error_feedback(sign()); use error_feedback
hooks.after(1, hooks.policy(), before=hooks.error_feedback(hooks.sign()))
    ValueError: after: what a policy remembers of parts of a bucket is no use to another hook, got policy() after error_feedback(sign())
hooks.after(1, hooks.policy([], hooks.cast()), before=hooks.policy([], hooks.cast()))
    ValueError: after: what a policy remembers of parts of a bucket is no use to another hook, got policy([], cast(bfloat16)) after policy([], cast(bfloat16))
""",
        )

    def test_powersgd(self) -> None:
        calls = """
            hooks.powersgd(rank=1.5)
            hooks.powersgd(rank=True)
            hooks.powersgd(rank=0)
            hooks.powersgd(seed="a")
            hooks.powersgd(min_compression_rate="2")
            hooks.powersgd(min_compression_rate=0.5)
            hooks.powersgd(min_compression_rate=math.nan)
            simulate(hooks.powersgd(), [[torch.eye(30).to_sparse()]])
            simulate(hooks.powersgd(), [[torch.eye(30, dtype=torch.complex64)]])
        """
        self.assertExpectedInline(
            refusals(calls, NAMES),
            """\
hooks.powersgd(rank=1.5)
    TypeError: powersgd: rank must be an int, got float
hooks.powersgd(rank=True)
    TypeError: powersgd: rank must be an int, got bool
hooks.powersgd(rank=0)
    ValueError: powersgd: rank must be at least 1, got 0
hooks.powersgd(seed="a")
    TypeError: powersgd: seed must be an int, got str
hooks.powersgd(min_compression_rate="2")
    TypeError: powersgd: min_compression_rate must be a number, got str
hooks.powersgd(min_compression_rate=0.5)
    ValueError: powersgd: min_compression_rate must be at least 1 and finite, got 0.5
hooks.powersgd(min_compression_rate=math.nan)
    ValueError: powersgd: min_compression_rate must be at least 1 and finite, got nan
simulate(hooks.powersgd(), [[torch.eye(30).to_sparse()]])
    TypeError: powersgd(rank=1) on bucket 0 of 1: gradients must be dense, got layout torch.sparse_coo; allreduce() takes sparse ones
simulate(hooks.powersgd(), [[torch.eye(30, dtype=torch.complex64)]])
    TypeError: powersgd(rank=1) on bucket 0 of 1: gradients must be real, got torch.complex64; allreduce() takes complex ones
""",
        )

    def test_local_sgd(self) -> None:
        calls = """
            hooks.local_sgd(0)
            hooks.local_sgd(2.0)
            hooks.local_sgd(2, outer=0.7)
            hooks.local_sgd(2, hook=len)
            hooks.local_sgd(2, hook=hooks.local_sgd(2))
            hooks.local_sgd(4, fragments=2.0)
            hooks.local_sgd(4, fragments=0)
            hooks.local_sgd(4, fragments=5)
            hooks.local_sgd(4, delay=True)
            hooks.local_sgd(4, delay=4)
            hooks.local_sgd(7, fragments=2, delay=4)
            hooks.local_sgd(4, delay=-1)
            hooks.local_sgd(4, mix="half")
            hooks.local_sgd(4, mix=1)
            hooks.local_sgd(4, mix=-0.5)
            hooks.local_sgd(4, mix=math.nan)
            hooks.local_sgd(4, hook=hooks.error_feedback(hooks.sign()), error_reset=True, mix=0.5)
            hooks.local_sgd(4, hook=hooks.adaptive(1000), fragments=2)
            hooks.clip(1.0, hooks.local_sgd(2))
            hooks.after(3, hooks.local_sgd(2))
            hooks.error_feedback(hooks.local_sgd(2))
            hooks.policy([], hooks.local_sgd(2))
            hooks.outer_sgd("1")
            hooks.outer_sgd(0.0)
            hooks.outer_sgd(0.7, 1.0)
            hooks.outer_sgd(0.7, nesterov=1)
        """
        self.assertExpectedInline(
            refusals(calls, NAMES),
            """\
hooks.local_sgd(0)
    ValueError: local_sgd: H must be at least 1, got 0
hooks.local_sgd(2.0)
    TypeError: local_sgd: H must be an int, got float
hooks.local_sgd(2, outer=0.7)
    TypeError: local_sgd: outer must be an outer_sgd, got float
hooks.local_sgd(2, hook=len)
    TypeError: local_sgd: hook must be one of torch_commhook.hooks, got builtin_function_or_method
hooks.local_sgd(2, hook=hooks.local_sgd(2))
    ValueError: local_sgd: hook must bring the ranks together, got local_sgd(2)
hooks.local_sgd(4, fragments=2.0)
    TypeError: local_sgd: fragments must be an int, got float
hooks.local_sgd(4, fragments=0)
    ValueError: local_sgd: fragments must be from 1 to 4, which is H, got 0
hooks.local_sgd(4, fragments=5)
    ValueError: local_sgd: fragments must be from 1 to 4, which is H, got 5
hooks.local_sgd(4, delay=True)
    TypeError: local_sgd: delay must be an int, got bool
hooks.local_sgd(4, delay=4)
    ValueError: local_sgd: delay must be from 0 to below H / fragments, which is 4, got 4
hooks.local_sgd(7, fragments=2, delay=4)
    ValueError: local_sgd: delay must be from 0 to below H / fragments, which is 3.5, got 4
hooks.local_sgd(4, delay=-1)
    ValueError: local_sgd: delay must be from 0 to below H / fragments, which is 4, got -1
hooks.local_sgd(4, mix="half")
    TypeError: local_sgd: mix must be a number, got str
hooks.local_sgd(4, mix=1)
    ValueError: local_sgd: mix must be from 0 to below 1, got 1
hooks.local_sgd(4, mix=-0.5)
    ValueError: local_sgd: mix must be from 0 to below 1, got -0.5
hooks.local_sgd(4, mix=math.nan)
    ValueError: local_sgd: mix must be from 0 to below 1, got nan
hooks.local_sgd(4, hook=hooks.error_feedback(hooks.sign()), error_reset=True, mix=0.5)
    ValueError: local_sgd: error_reset must be False where there are fragments, delay or mix, got True; error feedback sends what is lost with the fragment's next exchange
hooks.local_sgd(4, hook=hooks.adaptive(1000), fragments=2)
    ValueError: local_sgd: with fragments, hook must not be about all of them together, got adaptive(1000)
hooks.clip(1.0, hooks.local_sgd(2))
    ValueError: clip: hook must bring the ranks together in each step, got local_sgd(2); it can go inside of that, as its hook
hooks.after(3, hooks.local_sgd(2))
    ValueError: after: hook must bring the ranks together in each step, got local_sgd(2); it can go inside of that, as its hook
hooks.error_feedback(hooks.local_sgd(2))
    ValueError: error_feedback: hook must bring the ranks together in each step, got local_sgd(2); it can go inside of that, as its hook
hooks.policy([], hooks.local_sgd(2))
    ValueError: policy: default must not be about all gradients together, got local_sgd(2)
hooks.outer_sgd("1")
    TypeError: outer_sgd: lr must be a number, got str
hooks.outer_sgd(0.0)
    ValueError: outer_sgd: lr must be positive, got 0.0
hooks.outer_sgd(0.7, 1.0)
    ValueError: outer_sgd: momentum must be from 0 to below 1, got 1.0
hooks.outer_sgd(0.7, nesterov=1)
    TypeError: outer_sgd: nesterov must be a bool, got int
""",
        )


async def is_coroutine(state: object, bucket: GradBucket) -> torch.Tensor:
    return bucket.buffer()


def is_generator(state: object, bucket: GradBucket):  # type: ignore[no-untyped-def]
    yield bucket.buffer()


class AsyncCallable:
    async def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
        return bucket.buffer()


def takes_int(state: object, bucket: int) -> torch.Tensor:
    raise NotImplementedError


def takes_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def returns_none(state: object, bucket: GradBucket) -> None:
    pass


def returns_list(state: object, bucket: GradBucket) -> list[torch.Tensor]:
    raise NotImplementedError


class TestResults(expecttest.TestCase):
    def test_what_is_no_hook(self) -> None:
        names = {**NAMES, **globals()}
        calls = """
            check_hook(3)
            check_hook(None)
            check_hook(hook_examples.Callable)
            check_hook(hooks.cast)
            check_hook(lambda bucket: bucket)
            check_hook(lambda a, b, c: a)
            check_hook(is_coroutine)
            check_hook(AsyncCallable())
            check_hook(is_generator)
            check_hook(takes_int)
            check_hook(functools.partial(takes_int))
            check_hook(takes_gradient)
            check_hook(returns_none)
            check_hook(returns_list)
        """
        self.assertExpectedInline(
            refusals(calls, names),
            """\
check_hook(3)
    TypeError: check_hook: a hook must be callable as hook(state, bucket), got int
check_hook(None)
    TypeError: check_hook: a hook must be callable as hook(state, bucket), got None
check_hook(hook_examples.Callable)
    TypeError: check_hook: hook 'hook_examples.Callable' must be an instance or a function, got the class itself; call it first
check_hook(hooks.cast)
    TypeError: check_hook: hook 'torch_commhook.hooks.mean.cast' must be an instance or a function, got the class itself; call it first
check_hook(lambda bucket: bucket)
    TypeError: check_hook: hook 'test_expected_errors.<lambda>' must be callable as hook(state, bucket), got the signature (bucket)
check_hook(lambda a, b, c: a)
    TypeError: check_hook: hook 'test_expected_errors.<lambda>' must be callable as hook(state, bucket), got the signature (a, b, c)
check_hook(is_coroutine)
    TypeError: check_hook: hook 'test_expected_errors.is_coroutine' must return a Future or a tensor, got a coroutine function (async def), which nothing would await
check_hook(AsyncCallable())
    TypeError: check_hook: hook 'test_expected_errors.AsyncCallable object' must return a Future or a tensor, got a coroutine function (async def), which nothing would await
check_hook(is_generator)
    TypeError: check_hook: hook 'test_expected_errors.is_generator' must return a Future or a tensor, got a generator function (it holds a yield)
check_hook(takes_int)
    ValueError: check_hook: hook 'test_expected_errors.takes_int' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'int'>
check_hook(functools.partial(takes_int))
    ValueError: check_hook: hook 'partial of test_expected_errors.takes_int' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'int'>
check_hook(takes_gradient)
    ValueError: check_hook: hook 'test_expected_errors.takes_gradient' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'torch.Tensor'>
check_hook(returns_none)
    ValueError: check_hook: hook 'test_expected_errors.returns_none' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the annotation <class 'NoneType'>
check_hook(returns_list)
    ValueError: check_hook: hook 'test_expected_errors.returns_list' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the annotation list[torch.Tensor]
""",
        )

    def test_results_of_the_wrong_kind(self) -> None:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.ones(6))
        names = {**NAMES, "bucket": hook_examples.one_bucket(), "future": future}
        calls = """
            parse_hook_result(ones(7), bucket)
            parse_hook_result(ones(5), bucket)
            parse_hook_result(ones(6).double(), bucket)
            parse_hook_result(ones(6, device="meta"), bucket)
            parse_hook_result(ones(6).to_sparse(), bucket)
            parse_hook_result([ones(6), ones(6)], bucket)
            parse_hook_result([], bucket)
            parse_hook_result([3], bucket)
            parse_hook_result(None, bucket)
            parse_hook_result(future, bucket)
            run_hook(lambda state, bucket: None, None, bucket)
            run_hook(lambda state, bucket: 3, None, bucket)
            run_hook(lambda state, bucket: [ones(6)], None, bucket)
            run_hook(lambda state, bucket: 3, None, None)
            run_hook(lambda state, bucket: bucket.buffer(), None, None)
        """
        self.assertExpectedInline(
            refusals(calls, names),
            """\
parse_hook_result(ones(7), bucket)
    ValueError: bucket 1 of 4: the result must have 6 elements, one for each of the bucket's, got 7 elements
parse_hook_result(ones(5), bucket)
    ValueError: bucket 1 of 4: the result must have 6 elements, one for each of the bucket's, got 5 elements
parse_hook_result(ones(6).double(), bucket)
    TypeError: bucket 1 of 4: the result must have dtype torch.float32, got torch.float64
parse_hook_result(ones(6, device="meta"), bucket)
    ValueError: bucket 1 of 4: the result must be on cpu, got meta
parse_hook_result(ones(6).to_sparse(), bucket)
    TypeError: bucket 1 of 4: the result must have the bucket's layout, torch.strided, got torch.sparse_coo
parse_hook_result([ones(6), ones(6)], bucket)
    ValueError: bucket 1 of 4: the result must be a tensor, or a list or tuple of one tensor, got a list of 2
parse_hook_result([], bucket)
    ValueError: bucket 1 of 4: the result must be a tensor, or a list or tuple of one tensor, got a list of 0
parse_hook_result([3], bucket)
    TypeError: bucket 1 of 4: the result must be a tensor, or a list or tuple of one tensor, got a list of int
parse_hook_result(None, bucket)
    TypeError: bucket 1 of 4: the result must be a tensor, or a list or tuple of one tensor, got None
parse_hook_result(future, bucket)
    TypeError: bucket 1 of 4: the result must be a tensor, or a list or tuple of one tensor, got torch.jit.Future; a callback must return the tensor, not another Future
run_hook(lambda state, bucket: None, None, bucket)
    TypeError: hook 'test_expected_errors.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got None
run_hook(lambda state, bucket: 3, None, bucket)
    TypeError: hook 'test_expected_errors.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got int
run_hook(lambda state, bucket: [ones(6)], None, bucket)
    TypeError: hook 'test_expected_errors.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got list
run_hook(lambda state, bucket: 3, None, None)
    TypeError: hook 'test_expected_errors.<lambda>' on None: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got int
run_hook(lambda state, bucket: bucket.buffer(), None, None)
    AttributeError: 'NoneType' object has no attribute 'buffer'
""",
        )


class TestBuckets(expecttest.TestCase):
    def test_construction(self) -> None:
        names = {**NAMES, "p": [torch.ones(3), torch.ones(2)], "b": torch.ones(5)}
        calls = """
            GradBucket(p)
            GradBucket(p, gradients=[ones(3)])
            GradBucket(p, gradients=[ones(3), ones(3)])
            GradBucket(p, buffer=ones(4))
            GradBucket(p, buffer=b, index=1)
            GradBucket(p, buffer=b, index=-1)
            GradBucket(p, buffer=b, bucket_count=0)
            GradBucket(p, buffer=ones(2).to_sparse())
            GradBucket(p, buffer=b, index=0.0)
            GradBucket(p, buffer=b, bucket_count=None)
            GradBucket(p, buffer=[1.0] * 5)
            GradBucket(p, buffer=b.long())
            GradBucket(p, buffer=b, gradients=[ones(3), 2.0])
            GradBucket([ones(3), None], buffer=b)
            GradBucket(None, buffer=b)
            GradBucket(ones(5, 1), buffer=b)
            GradBucket(p, buffer=b, gradients=ones(2, 3))
            GradBucket(p, buffer=b, sparse_grad_indices="x")
        """
        self.assertExpectedInline(
            refusals(calls, names),
            """\
GradBucket(p)
    ValueError: GradBucket: gradients or buffer must be given, got neither
GradBucket(p, gradients=[ones(3)])
    ValueError: GradBucket: gradients must be 2, one for each parameter, got 1
GradBucket(p, gradients=[ones(3), ones(3)])
    ValueError: BucketLayout: gradients[1] must have its parameter's shape (2,), got (3,)
GradBucket(p, buffer=ones(4))
    ValueError: GradBucket: buffer must be contiguous, of shape (5,), got shape (4,) with strides (1,)
GradBucket(p, buffer=b, index=1)
    ValueError: GradBucket: index must be from 0 to bucket_count - 1, got index 1 with bucket_count 1
GradBucket(p, buffer=b, index=-1)
    ValueError: GradBucket: index must be from 0 to bucket_count - 1, got index -1 with bucket_count 1
GradBucket(p, buffer=b, bucket_count=0)
    ValueError: GradBucket: index must be from 0 to bucket_count - 1, got index 0 with bucket_count 0
GradBucket(p, buffer=ones(2).to_sparse())
    ValueError: GradBucket: a sparse buffer must be the gradient of the one parameter, of shape (3,), got shape (2,) for 2 parameters
GradBucket(p, buffer=b, index=0.0)
    TypeError: GradBucket: index must be an int, got 0.0
GradBucket(p, buffer=b, bucket_count=None)
    TypeError: GradBucket: bucket_count must be an int, got None
GradBucket(p, buffer=[1.0] * 5)
    TypeError: GradBucket: buffer must be a tensor, got list
GradBucket(p, buffer=b.long())
    TypeError: GradBucket: buffer must be of dtype float64, float32, float16, bfloat16 or complex, got torch.int64
GradBucket(p, buffer=b, gradients=[ones(3), 2.0])
    TypeError: GradBucket: gradients[1] must be a tensor, got float
GradBucket([ones(3), None], buffer=b)
    TypeError: GradBucket: parameters[1] must be a tensor, got None
GradBucket(None, buffer=b)
    TypeError: GradBucket: parameters must be a list of tensors, got None
GradBucket(ones(5, 1), buffer=b)
    TypeError: GradBucket: parameters must be a list of tensors, got torch.Tensor
GradBucket(p, buffer=b, gradients=ones(2, 3))
    TypeError: GradBucket: gradients must be a list of tensors, got torch.Tensor
GradBucket(p, buffer=b, sparse_grad_indices="x")
    TypeError: GradBucket: sparse_grad_indices must be a tensor, got str
""",
        )

    def test_set_buffer(self) -> None:
        bucket = GradBucket([torch.ones(14, 12)], [torch.ones(14, 12)])
        before = bucket.buffer()
        calls = """
            bucket.set_buffer(ones(167))
            bucket.set_buffer(ones(4, 42))
            bucket.set_buffer(ones(336)[::2])
            bucket.set_buffer(ones(168, dtype=torch.float16))
            bucket.set_buffer(ones(168, dtype=torch.int64))
            bucket.set_buffer(ones(168, device="meta"))
            bucket.set_buffer([1.0] * 168)
        """
        text = refusals(calls, {**NAMES, "bucket": bucket})
        assert bucket.buffer() is before
        self.assertExpectedInline(
            text,
            """\
bucket.set_buffer(ones(167))
    ValueError: GradBucket: buffer must be contiguous, of shape (168,), got shape (167,) with strides (1,)
bucket.set_buffer(ones(4, 42))
    ValueError: GradBucket: buffer must be contiguous, of shape (168,), got shape (4, 42) with strides (42, 1)
bucket.set_buffer(ones(336)[::2])
    ValueError: GradBucket: buffer must be contiguous, of shape (168,), got shape (168,) with strides (2,)
bucket.set_buffer(ones(168, dtype=torch.float16))
    TypeError: GradBucket.set_buffer: buffer must have dtype torch.float32, got torch.float16
bucket.set_buffer(ones(168, dtype=torch.int64))
    TypeError: GradBucket: buffer must be of dtype float64, float32, float16, bfloat16 or complex, got torch.int64
bucket.set_buffer(ones(168, device="meta"))
    ValueError: GradBucket: buffer must be on the parameters' device cpu, got meta
bucket.set_buffer([1.0] * 168)
    TypeError: GradBucket: buffer must be a tensor, got list
""",
        )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
class TestStates(expecttest.TestCase):
    def test_hostile_states(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        handle = attach(model, hooks.error_feedback(hooks.blockwise(rounding="stochastic")))
        model(torch.ones(2, 4)).sum().backward()
        state = handle.state_dict()
        names = {
            "error": ("rank0", "error", "weight"),
            "load": lambda path, change: handle.load_state_dict(changed(state, path, change)),
            "GONE": GONE,
        }
        calls = """
            load((), "str")
            load((), "dict")
            load((), "empty list")
            load(("version",), "negative")
            load(("version",), GONE)
            load(("world_size",), "endless")
            load(("steps",), "float")
            load(("steps",), "negative")
            load(("rank0",), GONE)
            load(("rank0",), "keys that are no names")
            load(("rank0", "error"), "list")
            load(error, "int64")
            load(error, "complex64")
            load(error, "sparse")
            load(error, "meta")
            load(error, "quantized")
            load(error, "without memory")
            load(error, "numbers")
            load(error, "str")
            load(("shared",), "list")
            load(("buckets",), GONE)
            load(("buckets", 0), "odd names")
        """
        text = refusals(calls, names)
        handle.remove()
        self.assertExpectedInline(
            text,
            """\
load((), "str")
    ValueError: load_state_dict: the state must be what HookHandle.state_dict() gives, got 'three'
load((), "dict")
    ValueError: load_state_dict: the state must be what HookHandle.state_dict() gives, got version None
load((), "empty list")
    ValueError: load_state_dict: the state must be what HookHandle.state_dict() gives, got list
load(("version",), "negative")
    ValueError: load_state_dict: the state must be what HookHandle.state_dict() gives, got version -1
load(("version",), GONE)
    ValueError: load_state_dict: the state must be what HookHandle.state_dict() gives, got version None
load(("world_size",), "endless")
    ValueError: load_state_dict: the state must be of 1 ranks, got one of an int of 20001 bits; torch_commhook.reshard_states makes states for another number of ranks
load(("steps",), "float")
    ValueError: load_state_dict: its steps must be of type int, got 8.0
load(("steps",), "negative")
    ValueError: load_state_dict: its steps must be a number of steps, got -1
load(("rank0",), GONE)
    ValueError: load_state_dict: the state must be that of rank 0, got one with []
load(("rank0",), "keys that are no names")
    ValueError: load_state_dict: it has tuple, which the hook that is attached does not remember; a state is for a hook like the one that it is of
load(("rank0", "error"), "list")
    ValueError: load_state_dict: its 'error' must be a dict by parameter, got list
load(error, "int64")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.int64 and layout torch.strided on device cpu
load(error, "complex64")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.complex64 and layout torch.strided on device cpu
load(error, "sparse")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.float32 and layout torch.sparse_coo on device cpu
load(error, "meta")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.float32 and layout torch.strided on device meta
load(error, "quantized")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.qint8 and layout torch.strided on device cpu
load(error, "without memory")
    ValueError: load_state_dict: 'error' of parameter 'weight' must have its numbers in memory, got a tensor without
load(error, "numbers")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.int64 and layout torch.strided on device cpu
load(error, "str")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a tensor, got 'three'
load(("shared",), "list")
    ValueError: load_state_dict: its shared must be of type dict, got list
load(("buckets",), GONE)
    ValueError: load_state_dict: its buckets must be of type list, got None
load(("buckets", 0), "odd names")
    ValueError: load_state_dict: its buckets must be lists of the model's parameters, got list in one
""",
        )


class TestExpressions(expecttest.TestCase):
    def test_wrong_expressions(self) -> None:
        """Of a module of few hooks, whose names end each message."""

        def parse(text: str) -> None:
            try:
                parse_hook(text, named_hooks.HOOKS)
            except HookExpressionError as error:
                assert "\n" not in str(error)
                raise

        names = {"parse": parse}
        calls = """
            parse("casst(bfloat16)")
            parse("secret()")
            parse("__import__('os').system('true')")
            parse("hooks.cast(bfloat16)")
            parse("cast(bfloat17)")
            parse("cast(torch.load)")
            parse("cast(8)")
            parse("cast()")
            parse("blockwise(process_group=1)")
            parse("blockwise(4, (1, 2))")
            parse("error_feedback(blockwise(4, 'x'))")
            parse("cast(**{})")
            parse("blockwise(1 + 1)")
            parse("blockwise([x for x in y])")
            parse("cast(bfloat16")
            parse("")
            parse("3")
            parse("part()")
            parse("part")
            parse("cast(bfloat16); 1")
        """
        self.assertExpectedInline(
            refusals(calls, names),
            """\
parse("casst(bfloat16)")
    HookExpressionError: hook 'casst(bfloat16)' names the unknown hook 'casst' (did you mean 'cast'?); a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("secret()")
    HookExpressionError: hook 'secret()' names the unknown hook 'secret'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("__import__('os').system('true')")
    HookExpressionError: hook "__import__('os').system('true')" names the unknown hook "__import__('os').system"; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("hooks.cast(bfloat16)")
    HookExpressionError: hook 'hooks.cast(bfloat16)' names the unknown hook 'hooks.cast'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(bfloat17)")
    HookExpressionError: hook 'cast(bfloat17)' has the argument 'bfloat17', which is neither a dtype nor a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(torch.load)")
    HookExpressionError: hook 'cast(torch.load)' has the argument 'torch.load', which is neither a dtype nor a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(8)")
    HookExpressionError: hook 'cast(8)' is refused by cast: TypeError: cast: dtype must be a torch.dtype; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast()")
    HookExpressionError: hook 'cast()' is refused by cast: TypeError: hooks_module.<locals>.cast() missing 1 required positional argument: 'dtype'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise(process_group=1)")
    HookExpressionError: hook 'blockwise(process_group=1)' gives blockwise a process_group, which can't be written on a command line; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise(4, (1, 2))")
    HookExpressionError: hook 'blockwise(4, (1, 2))' gives blockwise a process_group, which can't be written on a command line; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("error_feedback(blockwise(4, 'x'))")
    HookExpressionError: hook "error_feedback(blockwise(4, 'x'))" gives blockwise a process_group, which can't be written on a command line; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(**{})")
    HookExpressionError: hook 'cast(**{})' must not unpack a mapping (**); a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise(1 + 1)")
    HookExpressionError: hook 'blockwise(1 + 1)' must not contain '1 + 1'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise([x for x in y])")
    HookExpressionError: hook 'blockwise([x for x in y])' must not contain '[x for x in y]'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(bfloat16")
    HookExpressionError: hook 'cast(bfloat16' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("")
    HookExpressionError: hook '' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("3")
    HookExpressionError: hook '3' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("part()")
    HookExpressionError: hook 'part()' is only a part of a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("part")
    HookExpressionError: hook 'part' is only a part of a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(bfloat16); 1")
    HookExpressionError: hook 'cast(bfloat16); 1' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
""",
        )
