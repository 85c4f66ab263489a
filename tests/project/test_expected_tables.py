# ruff: noqa: E501
"""Tables, schemas of operators and compiled graphs, as texts. What is measured is given here.

``EXPECTTEST_ACCEPT=1`` writes the new text into this file.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import unittest.mock
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from group_doubles import Later
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd

import torch_commhook
from torch_commhook import attach, hooks
from torch_commhook.cli import plan, plan_advice
from torch_commhook.cli.main import main
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.metrics import HookStats
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks

HOOKS = ["allreduce()", "cast()", "error_feedback(blockwise(bits=4))", "local_sgd(4)"]


def planned(*arguments: str) -> str:
    """What ``commhook plan`` prints where each hook computes for 30 ms a step."""
    printed = io.StringIO()

    def in_30_ms(measured: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def measure(*positional: Any, **options: Any) -> list[Any]:
            found = measured(*positional, **options)
            return [replace(each, compute_seconds=0.03) for each in found]

        return measure

    with (
        unittest.mock.patch.object(plan, "measure", in_30_ms(plan.measure)),
        unittest.mock.patch.object(
            plan_advice, "measure_sharded", in_30_ms(plan_advice.measure_sharded)
        ),
        contextlib.redirect_stdout(printed),
    ):
        assert main(["plan", *arguments]) == 0
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


class TestPlan(expecttest.TestCase):
    def test_a_small_model_over_a_slow_link(self) -> None:
        text = planned(
            *("--model-size", "100k", "--link", "10mbit", "--compute-ms", "50"),
            *("--bucket-cap-mb", "0.05", "0.2", "--hooks", *HOOKS),
        )
        self.assertExpectedInline(
            text,
            """\
Take error_feedback(blockwise(bits=4)): a step of 96 ms instead of 0.36 s with a plain all-reduce,
since a rank sends 51.6 kB in a step instead of 400 kB: 43 ms on the link instead of 0.33 s. Without
communication a step takes 50 ms.

100 k parameters, 2 ranks, 10 Mbit/s each way, a step of 50.0 ms without communication, buckets of 0.05 and then 0.2 MiB, AdamW, 1 thread
hook                               sent per step      wire  computing      step  x plain  pays
allreduce()                               400 kB  334.6 ms    30.0 ms  359.6 ms     1.00
cast()                                    200 kB  167.3 ms    30.0 ms  203.5 ms     0.57   yes
error_feedback(blockwise(bits=4))        51.6 kB   43.2 ms    30.0 ms   95.7 ms     0.27   yes
local_sgd(4)                              100 kB   83.6 ms    30.0 ms  163.6 ms     0.46   yes
""",
        )

    def test_seven_billion_parameters_far_away(self) -> None:
        text = planned(
            *("--model-size", "7B", "--link", "100G", "--delay", "50", "--compute-ms", "4000"),
            *("--world", "64", "--nodes", "8", "--optimizer", "sgd"),
            *("--hooks", "none", "cast()", "topk(0.01)", "error_feedback(powersgd(rank=4))"),
            "local_sgd(100, delay=20, mix=0.5, hook=error_feedback(blockwise(bits=4)))",
        )
        self.assertExpectedInline(
            text,
            """\
Take error_feedback(powersgd(rank=4)): a step of 4.9 s instead of 6744 s with a plain all-reduce.
Most of the difference is delays or computing; a rank sends 36.9 MB in a step instead of 55.1 GB:
3.1 ms on the link instead of 4.6 s. Without communication a step takes 4.0 s. Compare the loss,
which may suffer a little.

7 B parameters, 64 ranks on 8 nodes, 100 Gbit/s and 50 ms each way, a step of 4.00 s without communication, buckets of 1 and then 25 MiB, SGD, 1 thread
hook                                                                       sent per step  out of a node   messages  connections  round trips    wire  computing       step  x plain   pays
none                                                                             55.1 GB        55.1 GB  2.696e+05            0     6.74e+04  4.61 s    30.0 ms  6743.54 s     1.00
cast()                                                                           27.6 GB         112 GB  1.347e+05           63           35  2.31 s    30.0 ms     7.53 s     0.00    yes
topk(0.01)                                                                       35.3 GB        35.3 GB  6.742e+04           12         34.5  2.95 s    30.0 ms     7.48 s     0.00  hurts
error_feedback(powersgd(rank=4))                                                 36.9 MB         112 MB  1.285e+04           12            9  3.1 ms    30.0 ms     4.93 s     0.00    yes
local_sgd(100, delay=20, mix=0.5, hook=error_feedback(blockwise(bits=4)))        71.1 MB         288 MB       1347           63         0.35  5.9 ms    30.0 ms     4.03 s     0.00    yes
Warning: topk(0.01): most of each gradient is lost, and never sent later: use error_feedback.
""",
        )

    def test_a_model_in_shards(self) -> None:
        text = planned(
            *("--model-size", "100k", "--link", "10mbit", "--compute-ms", "50"),
            *("--parallel", "fsdp", "--world", "4", "--hooks", *HOOKS[:3]),
        )
        self.assertExpectedInline(
            text,
            """\
Take error_feedback(blockwise(bits=4)): a step of 0.61 s instead of 0.83 s with a plain all-reduce,
since a rank sends 639 kB in a step instead of 900 kB: 0.53 s on the link instead of 0.75 s. Without
communication a step takes 50 ms.

100 k parameters, 4 ranks, parameters sharded over 4 ranks and freed after the forward, 10 Mbit/s each way, a step of 50.0 ms without communication, AdamW, 1 thread
hook                               reduce-scatter  gathers, forward  backward      wire  computing      step  x plain  pays
allreduce()                                300 kB            300 kB    300 kB  752.8 ms    30.0 ms  832.8 ms     1.00
cast()                                     150 kB            300 kB    300 kB  627.3 ms    30.0 ms  707.3 ms     0.85   yes
error_feedback(blockwise(bits=4))         38.7 kB            300 kB    300 kB  534.3 ms    30.0 ms  614.3 ms     0.74   yes
error_feedback(blockwise(bits=4)) keeps 400 kB of error memory on each rank, for the gradients of all shards
""",
        )

    def test_replicas_in_shards(self) -> None:
        text = planned(
            *("--model-size", "100k", "--link", "10mbit", "--inner-link", "1gbit"),
            *("--parallel", "hsdp", "--world", "4", "--hooks", *HOOKS[1:3]),
            *("--shard-hook", "error_feedback(sign())", "--weights", "blockwise()"),
            *("--reshard-after-forward", "no", "--compute-ms", "0"),
        )
        self.assertExpectedInline(
            text,
            """\
Take allreduce(), the plain all-reduce: a step takes 0.20 s. Only hooks that hurt the loss, or have
an unknown effect on it, are faster: error_feedback(blockwise(bits=4)),
shard_hook=error_feedback(sign()), weights=blockwise() takes 52 ms.

100 k parameters, 4 ranks, 2 replicas, parameters sharded over 2 ranks each and kept after the forward, 10 Mbit/s each way (1 Gbit/s within), a step of 0.0 ms without communication, AdamW, 1 thread
hook                                                                                       reduce-scatter  gathers, forward  backward  between replicas      wire  computing      step  x plain   pays
allreduce()                                                                                        200 kB            200 kB       0 B            200 kB  170.6 ms    30.0 ms  200.6 ms     1.00
allreduce(), shard_hook=error_feedback(sign()), weights=blockwise()                               6.46 kB           50.8 kB       0 B            200 kB  167.8 ms    30.0 ms  197.8 ms     0.99  hurts
cast(), shard_hook=error_feedback(sign()), weights=blockwise()                                    6.46 kB           50.8 kB       0 B            100 kB   84.1 ms    30.0 ms  114.1 ms     0.57  hurts
error_feedback(blockwise(bits=4)), shard_hook=error_feedback(sign()), weights=blockwise()         6.46 kB           50.8 kB       0 B           25.9 kB   22.1 ms    30.0 ms   52.1 ms     0.26  hurts
error_feedback(blockwise(bits=4)) keeps 300 kB of error memory on each rank, for the gradients of the rank's own shard
shard_hook keeps 400 kB of error memory on each rank, for the gradients of all shards
Warning: allreduce(), shard_hook=error_feedback(sign()), weights=blockwise(); cast(),
shard_hook=error_feedback(sign()), weights=blockwise(); error_feedback(blockwise(bits=4)),
shard_hook=error_feedback(sign()), weights=blockwise(): below four bits error feedback on gradients
hurts under AdamW, which mistakes late errors for large gradients. train's transformer, after 61
steps: loss 3.33 with allreduce(), 4.01 with topk(0.01), 5.00 with error_feedback(topk(0.01)), 6.90
with error_feedback(sign()). local_sgd(1, outer=outer_sgd(1.0, 0.0), hook=HOOK, error_reset=True)
compresses the updates instead: 3.35.
""",
        )


def two_steps(rank: int, hook: str) -> HookStats:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    handle = attach(model, parse_hook(hook), bucket_cap_mb=0.02)
    for _ in range(2):
        model(torch.full((2, 64), rank + 1.0)).sum().backward()
    handle.remove()
    return handle.stats()


def without_times(stats: HookStats) -> str:
    """A line for what was sent in all and one for each bucket."""
    for bucket in stats.buckets:
        bucket.encode_seconds = bucket.wire_seconds = bucket.decode_seconds = 0.0
        if bucket.relative_error is not None:
            bucket.relative_error = round(bucket.relative_error, 3)
    return repr(stats).replace("BucketStats", "\n    BucketStats") + "\n"


class TestStats(expecttest.TestCase):
    def test_a_cast_of_two_ranks(self) -> None:
        self.assertExpectedInline(
            without_times(run_ranks(two_steps, 2, "cast()")[0]),
            """\
HookStats(steps=2, bytes_sent=33280, bytes_sent_last_step=16640, bytes_received=33280, bytes_received_last_step=16640, bytes_gathered=0, bytes_scattered=0, world_size=2, buckets=[
    BucketStats(index=0, numel=8320, dtype=torch.float32, bytes_sent=33280, bytes_sent_last_step=16640, bytes_received=33280, bytes_received_last_step=16640, relative_error=None, encode_seconds=0.0, wire_seconds=0.0, decode_seconds=0.0)])
""",
        )

    def test_error_feedback_of_two_ranks(self) -> None:
        stats = run_ranks(two_steps, 2, "error_feedback(blockwise())")[0]
        self.assertExpectedInline(
            without_times(stats),
            """\
HookStats(steps=2, bytes_sent=17216, bytes_sent_last_step=8608, bytes_received=16928, bytes_received_last_step=8464, bytes_gathered=0, bytes_scattered=0, world_size=2, buckets=[
    BucketStats(index=0, numel=8320, dtype=torch.float32, bytes_sent=17216, bytes_sent_last_step=8608, bytes_received=16928, bytes_received_last_step=8464, relative_error=0.006, encode_seconds=0.0, wire_seconds=0.0, decode_seconds=0.0)])
""",
        )

    def test_the_summary_of_a_recording_group(self) -> None:
        group = RecordingProcessGroup(Later())
        for _ in range(2):
            group.allreduce([torch.ones(500_000)])
        with pytest.raises(OSError, match="cable"):
            group.broadcast([torch.ones(1)])
        group.parent.futures[0].set_result([])
        for counters in group._counters.values():
            counters.seconds = 0.004 * counters.completed
            counters.blocked = 0.001 * counters.completed
        # Of each operation half a millisecond.
        overlaps = "torch_commhook.process_group.recording.overlaps"
        with unittest.mock.patch(overlaps, lambda intervals: [0.0005] * len(intervals)):
            self.assertExpectedInline(
                group.summary() + "\n",
                """\
operation  calls  errors    MB  MB sent    ms  ms each  overlap  blocked
allreduce      2       0  4.00     6.00  4.00    4.000      25%      25%
broadcast      1       1  0.00     0.00  4.00    4.000      12%      25%
all            3       1  4.00     6.00  8.00    4.000      19%      25%
""",
            )


# ---- operators -----------------------------------------------------------------------------------

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
commhook::cpu_capability(str? limit=None) -> str
commhook::decay_error(Tensor(a0!) error, float decay, Tensor? rounding=None) -> ()
commhook::finish_step(Tensor(a!) token, Tensor(b!)[] gradients, str key) -> ()
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
commhook::low_rank_gather_left(Tensor[] gradients, Tensor(a!) matrices, Tensor right, Tensor(b!) left, *, bool adds=False) -> ()
commhook::low_rank_left(Tensor matrices, Tensor right, Tensor(a!) left) -> ()
commhook::low_rank_product(Tensor left, Tensor right, Tensor(a!) matrices) -> ()
commhook::low_rank_right(Tensor matrices, Tensor left, Tensor(a!) right) -> ()
commhook::low_rank_right_error(Tensor(a!) matrices, Tensor left, Tensor(b!) right) -> ()
commhook::note_backward(Tensor(a0!) token, str key) -> ()
commhook::randomk_decode(Tensor message, Tensor(a!)[] tensors, Tensor rounding) -> ()
commhook::randomk_encode(Tensor[] tensors, Tensor(a!) message, Tensor rounding, *, bool unbiased=False, float scale=1., Tensor(b!)? error=None) -> ()
commhook::sign_decode(Tensor message, Tensor(a!)[] tensors, *, int block_size, int shards=1, SymInt[]? sizes=None) -> ()
commhook::sign_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, int block_size, float scale=1.) -> ()
commhook::sign_encode(Tensor[] tensors, Tensor(a!) message, *, int block_size, int shards=1, SymInt[]? sizes=None, float scale=1., Tensor(b!)? error=None) -> ()
commhook::sign_reduce(Tensor messages, Tensor(a!) message, int numel, *, int block_size, float scale=1., Tensor(b!)? error=None) -> ()
commhook::sign_reduce_shards(Tensor[] messages, Tensor(a!) message, int numel, *, int block_size, float scale=1., Tensor(b!)? error=None, Tensor? failed=None) -> ()
commhook::start_all_gather(Tensor tensor, SymInt[]? sizes, str group_name, bool is_second, str form) -> Tensor
commhook::start_all_reduce(Tensor tensor, str group_name, bool is_second) -> Tensor
commhook::start_all_to_all(Tensor tensor, SymInt[] sends, SymInt[] gets, str group_name, str form) -> Tensor
commhook::start_bucket(Tensor(a!) token, Tensor[] gradients, int[] missing, int index, str key) -> ()
commhook::sum_rows(Tensor rows, Tensor(a!) out) -> ()
commhook::symmetric_barrier(Tensor(a!)[] controls, int rank, *, float timeout) -> ()
commhook::symmetric_gather(Tensor[] shards, Tensor(a!) message, *, Tensor? failed=None) -> ()
commhook::topk_decode(Tensor message, Tensor(a!)[] tensors) -> ()
commhook::topk_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, float scale=1.) -> ()
commhook::topk_encode(Tensor[] tensors, Tensor(a!) message, *, float scale=1., Tensor(b!)? error=None, Tensor? rounding=None) -> ()
commhook::unflatten(Tensor buffer, Tensor[] like, *, float scale=1.) -> Tensor[]
commhook::unflatten_into(Tensor buffer, Tensor(a!)[] tensors, *, float scale=1.) -> ()
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
    commhook.start_bucket
    commhook.finish_step
""",
        )

    def test_error_feedback_of_blockwise(self) -> None:
        self.assertExpectedInline(
            captured(hooks.error_feedback(hooks.blockwise())),
            """\
graph 0, 1
    commhook.start_bucket
    commhook.finish_step
""",
        )
