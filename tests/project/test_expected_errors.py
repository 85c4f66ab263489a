# ruff: noqa: E501
"""What is refused and what is said about it, as texts: a call, and below it the error.

``EXPECTTEST_ACCEPT=1`` writes the new text into this file.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hook_examples
import pytest
import torch
from hostile_states import GONE, changed
from refusals import RefusalCase
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
from torch_commhook.hooks.expressions import HookExpressionError, parse_hook
from torch_commhook.native import bucket_ops as ops
from torch_commhook.testing import simulate

NAMES: dict[str, Any] = {
    "__name__": __name__,
    "GradBucket": GradBucket,
    "attach": attach,
    "check_hook": check_hook,
    "codecs": codecs,
    "commhook": torch.ops.commhook,
    "functools": functools,
    "hooks": hooks,
    "nn": nn,
    "ones": torch.ones,
    "ops": ops,
    "parse_hook_result": parse_hook_result,
    "run_hook": run_hook,
    "torch": torch,
}


@pytest.mark.usefixtures("one_rank")
class TestAttach(RefusalCase):
    def test_wrong_arguments(self) -> None:
        taken = nn.Linear(2, 2)
        handle = attach(taken, hooks.cast())
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        frozen = nn.Linear(2, 2).requires_grad_(False)
        names = {**NAMES, "net": nn.Linear(2, 2), "taken": taken, "ddp": ddp, "frozen": frozen}
        self.assert_refused(
            {**names, "handle": handle},
            """\
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
attach(net, hooks.cast(), state=3)
    TypeError: attach: state must be None for hook 'cast(bfloat16)', which keeps its own, got int
attach(net, hooks.cast(), process_group=1)
    TypeError: torch_commhook: process_group must be a ProcessGroup, got int
attach(net, hooks.cast(), bucket_cap_mb="25")
    ValueError: attach: bucket_cap_mb must be a positive number of MiB, got '25'
attach(net, hooks.cast(), scaler=3)
    TypeError: attach: scaler must be a torch.amp.GradScaler, or have its get_scale(), got int
attach(frozen, hooks.cast())
    ValueError: attach: torch.nn.modules.linear.Linear has no parameter that requires grad
attach(ddp, hooks.cast(), init_sync=False)
    ValueError: attach: init_sync must be given to DistributedDataParallel, which has it already; got False for a model of that class
attach(ddp.module, hooks.cast())
    RuntimeError: attach: a DistributedDataParallel averages the gradient of parameter 'weight' already; attach the hook to that, the one around torch.nn.modules.linear.Linear: attach(ddp, hook). It is trainer.model in Lightning, trainer.model_wrapped in transformers, and what prepare() returns in Accelerate
attach(taken, hooks.allreduce())
    RuntimeError: attach: hook 'cast(bfloat16)' is attached to this model already; remove() it, or replace() it through its handle
""",
        )
        handle.remove()

    def test_a_handle_that_was_removed(self) -> None:
        handle = attach(nn.Linear(2, 2), hooks.error_feedback(hooks.sign()))
        handle.remove()
        self.assert_refused(
            {**NAMES, "handle": handle},
            """\
handle.replace(hooks.cast())
    RuntimeError: HookHandle.replace: hook 'error_feedback(sign())' is no longer attached; use attach()
handle.synchronize()
    RuntimeError: HookHandle.synchronize: hook 'error_feedback(sign())' is no longer attached
handle.load_state_dict({})
    RuntimeError: HookHandle.load_state_dict: hook 'error_feedback(sign())' is no longer attached
""",
        )


class TestOperators(RefusalCase):
    def test_wrong_dtypes_shapes_and_layouts(self) -> None:
        own = {"message": zeros_of_bytes(16), "bytes": zeros_of_bytes, "x": torch.ones(64)}
        self.assert_refused(
            {**NAMES, **own},
            """\
ops.flatten([])
    ValueError: flatten: tensors must hold at least one tensor, got none
ops.flatten([x.int()])
    TypeError: flatten: tensors[0] must be of dtype float64, float32, float16 or bfloat16, got torch.int32
ops.flatten([x, x.to_sparse()])
    TypeError: flatten: tensors[1] must be dense (torch.strided), got layout Sparse
ops.flatten([x, x.half()])
    TypeError: flatten: dtype must be given if the tensors have different dtypes, got none for tensors[0] of torch.float32 and tensors[1] of torch.float16
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
commhook.topk_encode([x], message[:12])
    ValueError: topk_encode: message must hold 8 bytes for each of 1 to 64 entries, got 12 bytes
commhook.topk_encode([x[:1]], message)
    ValueError: topk_encode: message must hold 8 bytes for each of 1 to 1 entries, got 16 bytes
commhook.topk_encode([x], message.float())
    TypeError: topk_encode: message must be of dtype uint8, got torch.float32
commhook.topk_encode([x], message, error=x.half())
    TypeError: topk_encode: error must be of dtype float32 or bfloat16, got torch.float16
commhook.blockwise_encode([x], message, bits=8, block_size=64, symmetric=True)
    ValueError: blockwise_encode: message must hold 80 bytes, got 16
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


class TestBuckets(RefusalCase):
    def test_construction(self) -> None:
        names = {**NAMES, "p": [torch.ones(3), torch.ones(2)], "b": torch.ones(5)}
        self.assert_refused(
            names,
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
        self.assert_refused(
            {**NAMES, "bucket": bucket},
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
        assert bucket.buffer() is before


@pytest.mark.usefixtures("one_rank")
class TestStates(RefusalCase):
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
        self.assert_refused(
            names,
            """\
load((), "str")
    ValueError: load_state_dict: the state must come from HookHandle.state_dict(), got 'three'
load((), "dict")
    ValueError: load_state_dict: the state must come from HookHandle.state_dict(), got version None
load((), "empty list")
    ValueError: load_state_dict: the state must come from HookHandle.state_dict(), got list
load(("version",), "negative")
    ValueError: load_state_dict: the state must come from HookHandle.state_dict(), got version -1
load(("steps",), "float")
    ValueError: load_state_dict: its steps must be of type int, got 8.0
load(("steps",), "negative")
    ValueError: load_state_dict: its steps must be a number of steps, got -1
load(("rank0",), GONE)
    ValueError: load_state_dict: the state must be that of rank 0, got one with []
load(("rank0",), "keys that are no names")
    ValueError: load_state_dict: it has tuple, which the attached hook does not remember; attach a hook like the one that the state is of
load(("rank0", "error"), "list")
    ValueError: load_state_dict: its 'error' must be a dict by parameter, got list
load(error, "int64")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.int64 and layout torch.strided on device cpu
load(error, "sparse")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.float32 and layout torch.sparse_coo on device cpu
load(error, "meta")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a dense tensor of floating-point numbers, got one of torch.float32 and layout torch.strided on device meta
load(error, "str")
    ValueError: load_state_dict: 'error' of parameter 'weight' must be a tensor, got 'three'
load(("shared",), "list")
    ValueError: load_state_dict: its shared must be of type dict, got list
load(("buckets",), GONE)
    ValueError: load_state_dict: its buckets must be of type list, got None
""",
        )
        handle.remove()


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


class TestResults(RefusalCase):
    def test_what_is_no_hook(self) -> None:
        names = {**NAMES, **globals()}
        self.assert_refused(
            names,
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
        self.assert_refused(
            names,
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


class TestExpressions(RefusalCase):
    def test_wrong_expressions(self) -> None:
        """Of a module of few hooks, whose names end each message."""

        def parse(text: str) -> None:
            try:
                parse_hook(text, hook_examples.HOOKS)
            except HookExpressionError as error:
                assert "\n" not in str(error)
                raise

        self.assert_refused(
            {"parse": parse},
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
    HookExpressionError: hook 'cast(8)' is refused by cast: TypeError: cast: dtype must be a torch.dtype
parse("cast()")
    HookExpressionError: hook 'cast()' is refused by cast: missing a required argument: 'dtype'; it is cast(dtype)
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


# ---- hooks ---------------------------------------------------------------------------------------

HOOK_NAMES = dict[str, Any](codecs=codecs, hooks=hooks, math=math, simulate=simulate, torch=torch)


class TestHooks(RefusalCase):
    def test_options_of_hooks(self) -> None:
        self.assert_refused(
            HOOK_NAMES,
            """\
hooks.cast(torch.float32)
    TypeError: cast: dtype must be torch.float16 or torch.bfloat16, got torch.float32
hooks.cast("float16")
    TypeError: cast: dtype must be torch.float16 or torch.bfloat16, got 'float16'; write torch.float16
hooks.cast("bf16")
    TypeError: cast: dtype must be torch.float16 or torch.bfloat16, got 'bf16'; write torch.bfloat16
hooks.compressed(hooks.blockwise(bits=4))
    TypeError: compressed: codec must be a Codec, got compressed; a hook is not a codec; use codecs.blockwise(bits=4)
hooks.compressed(hooks.blockwise)
    TypeError: compressed: codec must be a Codec, got function; it makes a hook; use codecs.blockwise()
hooks.compressed(codecs.topk)
    TypeError: compressed: codec must be a Codec, got ABCMeta; it is a class of codecs; call it: topk(...)
hooks.compressed(3)
    TypeError: compressed: codec must be a Codec, got int; see torch_commhook.codecs
hooks.blockwise(seed="a")
    TypeError: compressed: seed must be an int, got str
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
hooks.policy([("dim < 0", hooks.allreduce())])
    ValueError: policy: rules[0] must have a condition that a parameter can meet, got 'dim < 0'
hooks.policy(["dim <= 1"])
    TypeError: policy: rules[0] must be a pair of a condition and a hook, got 'dim <= 1'
hooks.policy([("dim <= 1", 3)])
    TypeError: policy: rules[0] must have one of torch_commhook.hooks, got int
hooks.policy([("dim <= 1", hooks.topk)])
    TypeError: policy: rules[0] must have one of torch_commhook.hooks, got function; hooks.topk makes a hook; call it: hooks.topk()
hooks.policy([("dim <= 1", hooks.clip(1.0))])
    ValueError: policy: rules[0] must not need all gradients together, got clip(1)
hooks.policy([], hooks.after(1, hooks.adaptive(1000)))
    ValueError: policy: default must not need all gradients together, got after(1, adaptive(1000))
hooks.adaptive(0)
    ValueError: adaptive: budget must be at least 1, got 0
hooks.adaptive(1.5)
    TypeError: adaptive: budget must be an int, got float
hooks.adaptive(1e6)
    TypeError: adaptive: budget must be an int, got float; write 1000000
hooks.cpp(3)
    TypeError: cpp: name must be a str, got int
hooks.hierarchical(3, intra_group=0, inter_group=0)
    TypeError: hierarchical: codec must be a Codec, got int; see torch_commhook.codecs
hooks.hierarchical(codecs.sign(), intra_group=0)
    TypeError: hierarchical: inter_group must be a ProcessGroup, got None
""",
        )

    def test_hooks_around_others(self) -> None:
        self.assert_refused(
            HOOK_NAMES,
            """\
hooks.error_feedback(hooks.allreduce())
    ValueError: error_feedback: hook must be one whose messages lose something, got allreduce()
hooks.error_feedback(print)
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got builtin_function_or_method
hooks.error_feedback(codecs.sign())
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got sign; a codec is no hook; use hooks.sign()
hooks.error_feedback(codecs.topk)
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got ABCMeta; a codec is no hook; use hooks.topk(...)
hooks.error_feedback(hooks.blockwise)
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got function; hooks.blockwise makes a hook; call it: hooks.blockwise()
hooks.error_feedback(hooks.cast)
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got ABCMeta; cast is a class of hooks; call it: cast(...)
hooks.error_feedback("sign()")
    TypeError: error_feedback: hook must be one of torch_commhook.hooks, got str; torch_commhook.parse_hook reads a hook that is written as text
hooks.local_sgd(2, hook=codecs.sign())
    TypeError: local_sgd: hook must be one of torch_commhook.hooks, got sign; a codec is no hook; use hooks.sign()
hooks.error_feedback(hooks.error_feedback(hooks.sign()))
    ValueError: error_feedback: hook must be one that does not remember its errors already, got error_feedback(sign())
hooks.error_feedback(hooks.policy())
    ValueError: error_feedback: hook must be one that does not remember its errors already, got policy()
hooks.error_feedback(hooks.after(1, hooks.cast(), before=hooks.sign()))
    ValueError: error_feedback: hook must be one whose messages lose something, got after(1, cast(bfloat16), before=sign())
hooks.after(-1, hooks.sign())
    ValueError: after: step must be at least 0, got -1
hooks.after(1.5, hooks.sign())
    TypeError: after: step must be an int, got float
hooks.after(1, hooks.sign(), before=3)
    TypeError: after: before must be one of torch_commhook.hooks, got int
hooks.after(1, hooks.cast(), before=hooks.error_feedback(hooks.sign()))
    ValueError: after: hook must remember its errors, as before does, and send those of before, got cast(bfloat16) after error_feedback(sign()); use error_feedback
hooks.after(1, hooks.error_feedback(hooks.sign()), before=hooks.blockwise())
    ValueError: after: before must remember its errors, as hook does, got blockwise() before error_feedback(sign()); use error_feedback
hooks.after(1, hooks.policy(), before=hooks.error_feedback(hooks.sign()))
    ValueError: after: another hook cannot use a policy's memory of parts of a bucket, got policy() after error_feedback(sign())
hooks.after(1, hooks.policy([], hooks.cast()), before=hooks.policy([], hooks.cast()))
    ValueError: after: another hook cannot use a policy's memory of parts of a bucket, got policy([], cast(bfloat16)) after policy([], cast(bfloat16))
""",
        )

    def test_simulate(self) -> None:
        self.assert_refused(
            HOOK_NAMES,
            """\
simulate(hooks.blockwise, [[torch.ones(2)]])
    TypeError: simulate: hooks.blockwise makes a hook; call it: hooks.blockwise()
simulate(codecs.blockwise(bits=4), [[torch.ones(2)]])
    TypeError: simulate: a codec is no hook; use hooks.blockwise(bits=4)
simulate(hooks.cast, [[torch.ones(2)]])
    TypeError: simulate: hook 'torch_commhook.hooks.mean.cast' must be an instance or a function, got the class itself; call it first
simulate(hooks.cast(), 3)
    TypeError: simulate: grads_per_rank must hold a list of gradients for each rank, got int; write [[gradient_of_rank_0], [gradient_of_rank_1]]
simulate(hooks.cast(), "ab")
    TypeError: simulate: grads_per_rank must hold a list of gradients for each rank, got str; write [[gradient_of_rank_0], [gradient_of_rank_1]]
simulate(hooks.cast(), [1.0, 2.0])
    TypeError: simulate: grads_per_rank must hold a list of gradients for each rank, got float for a rank; write [[gradient_of_rank_0], [gradient_of_rank_1]]
simulate(hooks.cast(), [[1.0, 2.0], [3.0, 4.0]])
    TypeError: simulate: grads_per_rank must hold tensors, got float; write [[torch.tensor([...])], ...] for numbers
simulate(hooks.cast(), [[None]])
    TypeError: simulate: grads_per_rank must hold tensors, got None
simulate(hooks.cast(), torch.ones(2, 2))
    TypeError: simulate: grads_per_rank must hold a list of gradients for each rank, got a tensor for a rank; write [[gradient_of_rank_0], [gradient_of_rank_1]]
simulate(hooks.cast(), [torch.ones(2), torch.ones(2)])
    TypeError: simulate: grads_per_rank must hold a list of gradients for each rank, got a tensor for a rank; write [[gradient_of_rank_0], [gradient_of_rank_1]]
""",
        )

    def test_powersgd(self) -> None:
        self.assert_refused(
            HOOK_NAMES,
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
        self.assert_refused(
            HOOK_NAMES,
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
    ValueError: local_sgd: hook must not keep ranks apart itself, got local_sgd(2)
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
    ValueError: local_sgd: error_reset must be False with fragments, delay or mix, got True; error feedback sends errors with the fragment's next exchange
hooks.local_sgd(4, hook=hooks.adaptive(1000), fragments=2)
    ValueError: local_sgd: with fragments, hook must not decide about all buckets together, got adaptive(1000)
hooks.clip(1.0, hooks.local_sgd(2))
    ValueError: clip: hook must average in each step, got local_sgd(2), which keeps ranks apart; put this wrapper inside it, as its hook
hooks.after(3, hooks.local_sgd(2))
    ValueError: after: hook must average in each step, got local_sgd(2), which keeps ranks apart; put this wrapper inside it, as its hook
hooks.error_feedback(hooks.local_sgd(2))
    ValueError: error_feedback: hook must average in each step, got local_sgd(2), which keeps ranks apart; put this wrapper inside it, as its hook
hooks.policy([], hooks.local_sgd(2))
    ValueError: policy: default must not need all gradients together, got local_sgd(2)
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
