"""The hooks that ``plan`` and ``bench`` compare by default.

``plan --link FILE`` takes the hooks' computation from a file of ``bench`` only if the file has all
of these hooks, so both commands take the same list.
"""

from __future__ import annotations

#: Compresses AdamW's updates instead of gradients: error feedback hurts neither these nor gradients
#: of four bits.
OF_UPDATES = "local_sgd(1, outer=outer_sgd(1.0, 0.0), hook={hook}, error_reset=True)"
_STREAMED = "local_sgd(30, delay=20, mix=0.5, hook=error_feedback(blockwise(bits=4)))"

#: By optimizer. The plain all-reduce is first: the others are compared with it.
DEFAULT_HOOKS = {
    "adamw": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "error_feedback(blockwise(bits=4))",
        "powersgd(rank=2)",
        OF_UPDATES.format(hook="error_feedback(topk(0.01))"),
        _STREAMED,
    ),
    "sgd": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "error_feedback(blockwise(bits=4))",
        "error_feedback(powersgd(rank=2))",
        "error_feedback(topk(0.01))",
        "error_feedback(sign())",
        _STREAMED,
    ),
}
#: By optimizer: hooks that average across the replicas of a sharded model.
DEFAULT_REPLICA_HOOKS = {optimizer: found[:5] for optimizer, found in DEFAULT_HOOKS.items()}
#: By optimizer: hooks that take part in the reduce-scatters of a sharded model.
DEFAULT_SHARD_HOOKS = {
    "adamw": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "fp8()",
        "error_feedback(blockwise(bits=4))",
    ),
    "sgd": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "fp8()",
        "error_feedback(blockwise(bits=4))",
        "error_feedback(sign())",
    ),
}
