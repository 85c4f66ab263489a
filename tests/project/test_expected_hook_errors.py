# ruff: noqa: E501
"""The errors of hooks, of their results, and of their expressions, as in test_expected_errors.py."""

from __future__ import annotations

import functools
import math
from typing import Any

import expecttest
import hook_examples
import named_hooks
import torch
from refusals import refusals

from torch_commhook import GradBucket, check_hook, codecs, hooks, parse_hook_result, run_hook
from torch_commhook.cli.hook_expression import HookExpressionError, parse_hook
from torch_commhook.testing import simulate

NAMES: dict[str, Any] = {
    "__name__": __name__,
    "check_hook": check_hook,
    "codecs": codecs,
    "functools": functools,
    "hooks": hooks,
    "math": math,
    "ones": torch.ones,
    "parse_hook_result": parse_hook_result,
    "run_hook": run_hook,
    "simulate": simulate,
    "torch": torch,
}


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
            hooks.chunk_topk(0)
            hooks.chunk_topk(chunk=100)
            hooks.chunk_topk(bits=3)
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
    ValueError: blockwise: bits must be 2, 4 or 8, got 3
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
hooks.chunk_topk(0)
    ValueError: chunk_topk: k must be at least 1 and at most chunk, 4096, got 0
hooks.chunk_topk(chunk=100)
    ValueError: chunk_topk: chunk must be a power of two from 64 to 4096, got 100
hooks.chunk_topk(bits=3)
    ValueError: chunk_topk: bits must be 2, 4 or 8, got 3
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
    TypeError: check_hook: hook 'test_expected_hook_errors.<lambda>' must be callable as hook(state, bucket), got the signature (bucket)
check_hook(lambda a, b, c: a)
    TypeError: check_hook: hook 'test_expected_hook_errors.<lambda>' must be callable as hook(state, bucket), got the signature (a, b, c)
check_hook(is_coroutine)
    TypeError: check_hook: hook 'test_expected_hook_errors.is_coroutine' must return a Future or a tensor, got a coroutine function (async def), which nothing would await
check_hook(AsyncCallable())
    TypeError: check_hook: hook 'test_expected_hook_errors.AsyncCallable object' must return a Future or a tensor, got a coroutine function (async def), which nothing would await
check_hook(is_generator)
    TypeError: check_hook: hook 'test_expected_hook_errors.is_generator' must return a Future or a tensor, got a generator function (it holds a yield)
check_hook(takes_int)
    ValueError: check_hook: hook 'test_expected_hook_errors.takes_int' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'int'>
check_hook(functools.partial(takes_int))
    ValueError: check_hook: hook 'partial of test_expected_hook_errors.takes_int' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'int'>
check_hook(takes_gradient)
    ValueError: check_hook: hook 'test_expected_hook_errors.takes_gradient' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'torch.Tensor'>
check_hook(returns_none)
    ValueError: check_hook: hook 'test_expected_hook_errors.returns_none' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the annotation <class 'NoneType'>
check_hook(returns_list)
    ValueError: check_hook: hook 'test_expected_hook_errors.returns_list' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the annotation list[torch.Tensor]
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
    TypeError: hook 'test_expected_hook_errors.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got None
run_hook(lambda state, bucket: 3, None, bucket)
    TypeError: hook 'test_expected_hook_errors.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got int
run_hook(lambda state, bucket: [ones(6)], None, bucket)
    TypeError: hook 'test_expected_hook_errors.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got list
run_hook(lambda state, bucket: 3, None, None)
    TypeError: hook 'test_expected_hook_errors.<lambda>' on None: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got int
run_hook(lambda state, bucket: bucket.buffer(), None, None)
    AttributeError: 'NoneType' object has no attribute 'buffer'
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
