"""One gradient communication hook for every PyTorch execution mode, at the speed of memory."""

__version__ = "0.1.0"

from torch_commhook.cli import interrupt as _interrupt  # isort: split

if _interrupt.runs_the_command():  # before torch is imported, which takes seconds
    _interrupt.end_on_interrupt()
    _interrupt.end_after_version()
    from torch_commhook.cli import doctor as _doctor

    _doctor.end_where_nothing_loads()

# First: it loads the libraries, and its errors say how to build them.
from torch_commhook.native import bucket_ops as _bucket_ops  # noqa: F401

# isort: split
from torch_commhook import autograd, codecs, collectives, hooks, process_group, testing
from torch_commhook.attachment.attaching import attach
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.attachment.replicas import (
    ReplicasDifferError,
    ReplicaWatch,
    watch_replicas,
)
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.elastic.membership import LeftOutError, TooFewRanksError
from torch_commhook.elastic.ranks import Elastic
from torch_commhook.hooks.base import traceable
from torch_commhook.hooks.expressions import HookExpressionError, parse_hook
from torch_commhook.memory.resharding import reshard_states
from torch_commhook.metrics import BucketStats, HookStats, MembershipEvent
from torch_commhook.native.libraries import NativeLibraryError
from torch_commhook.native.runtime import (
    check_hook,
    include_paths,
    load_cpp_hooks,
    parse_hook_result,
    run_hook,
)
from torch_commhook.process_group import ProcessGroup, Work, broadcast_coalesced
from torch_commhook.step.connected_group import PeerError
from torch_commhook.step.link import MeasuredLink, measure_link

__all__ = [
    "BucketLayout",
    "BucketStats",
    "Elastic",
    "GradBucket",
    "HookExpressionError",
    "HookHandle",
    "HookStats",
    "LeftOutError",
    "MeasuredLink",
    "MembershipEvent",
    "NativeLibraryError",
    "PeerError",
    "ProcessGroup",
    "ReplicaWatch",
    "ReplicasDifferError",
    "TooFewRanksError",
    "Work",
    "attach",
    "autograd",
    "broadcast_coalesced",
    "check_hook",
    "codecs",
    "collectives",
    "hooks",
    "include_paths",
    "load_cpp_hooks",
    "measure_link",
    "parse_hook",
    "parse_hook_result",
    "process_group",
    "reshard_states",
    "run_hook",
    "testing",
    "traceable",
    "watch_replicas",
]
