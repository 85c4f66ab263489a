# ruff: noqa: E501
"""What is refused as an option of a hook, as in test_expected_errors.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from refusals import RefusalCase

from torch_commhook import codecs, hooks
from torch_commhook.testing import simulate

NAMES = dict[str, Any](codecs=codecs, hooks=hooks, math=math, simulate=simulate, torch=torch)


class TestHooks(RefusalCase):
    def test_options_of_hooks(self) -> None:
        self.assert_refused(
            NAMES,
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
            NAMES,
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
            NAMES,
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
            NAMES,
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
            NAMES,
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
