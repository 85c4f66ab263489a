# ruff: noqa: E501
"""What is refused as a hook and as its result, as in test_expected_errors.py."""

from __future__ import annotations

import functools
from typing import Any

import hook_examples
import torch
from refusals import RefusalCase

from torch_commhook import GradBucket, check_hook, hooks, parse_hook_result, run_hook

NAMES: dict[str, Any] = {
    "__name__": __name__,
    "check_hook": check_hook,
    "functools": functools,
    "hooks": hooks,
    "ones": torch.ones,
    "parse_hook_result": parse_hook_result,
    "run_hook": run_hook,
    "torch": torch,
}


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
    TypeError: check_hook: hook 'test_expected_hook_results.<lambda>' must be callable as hook(state, bucket), got the signature (bucket)
check_hook(lambda a, b, c: a)
    TypeError: check_hook: hook 'test_expected_hook_results.<lambda>' must be callable as hook(state, bucket), got the signature (a, b, c)
check_hook(is_coroutine)
    TypeError: check_hook: hook 'test_expected_hook_results.is_coroutine' must return a Future or a tensor, got a coroutine function (async def), which nothing would await
check_hook(AsyncCallable())
    TypeError: check_hook: hook 'test_expected_hook_results.AsyncCallable object' must return a Future or a tensor, got a coroutine function (async def), which nothing would await
check_hook(is_generator)
    TypeError: check_hook: hook 'test_expected_hook_results.is_generator' must return a Future or a tensor, got a generator function (it holds a yield)
check_hook(takes_int)
    ValueError: check_hook: hook 'test_expected_hook_results.takes_int' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'int'>
check_hook(functools.partial(takes_int))
    ValueError: check_hook: hook 'partial of test_expected_hook_results.takes_int' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'int'>
check_hook(takes_gradient)
    ValueError: check_hook: hook 'test_expected_hook_results.takes_gradient' must take a GradBucket as its second argument (of torch_commhook or torch.distributed), got the annotation <class 'torch.Tensor'>
check_hook(returns_none)
    ValueError: check_hook: hook 'test_expected_hook_results.returns_none' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the annotation <class 'NoneType'>
check_hook(returns_list)
    ValueError: check_hook: hook 'test_expected_hook_results.returns_list' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the annotation list[torch.Tensor]
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
    TypeError: hook 'test_expected_hook_results.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got None
run_hook(lambda state, bucket: 3, None, bucket)
    TypeError: hook 'test_expected_hook_results.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got int
run_hook(lambda state, bucket: [ones(6)], None, bucket)
    TypeError: hook 'test_expected_hook_results.<lambda>' on bucket 1 of 4: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got list
run_hook(lambda state, bucket: 3, None, None)
    TypeError: hook 'test_expected_hook_results.<lambda>' on None: must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got int
run_hook(lambda state, bucket: bucket.buffer(), None, None)
    AttributeError: 'NoneType' object has no attribute 'buffer'
""",
        )
