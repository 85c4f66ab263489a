"""Process groups and works in Python."""

from torch_commhook.collectives.wire import register_backend
from torch_commhook.process_group.base import (
    CompletionHookArgs,
    PostHookArgs,
    PreHookArgs,
    ProcessGroup,
    WorkInfo,
    register,
)
from torch_commhook.process_group.broadcast import broadcast_coalesced
from torch_commhook.process_group.compressed import CompressedProcessGroup
from torch_commhook.process_group.faulty import (
    Corrupt,
    Delay,
    Drop,
    DroppedRankError,
    Fail,
    Fault,
    FaultyProcessGroup,
    Hang,
    Injected,
    InjectedError,
)
from torch_commhook.process_group.operations import HookOpName
from torch_commhook.process_group.recording import (
    Counters,
    Record,
    RecordingProcessGroup,
    merge_traces,
)
from torch_commhook.process_group.simulated import SimulatedProcessGroup
from torch_commhook.process_group.throttled import ThrottledProcessGroup
from torch_commhook.process_group.work import FollowedWork, Work, WrapperWork
from torch_commhook.process_group.wrapper import WrapperProcessGroup

__all__ = [
    "CompletionHookArgs",
    "CompressedProcessGroup",
    "Corrupt",
    "Counters",
    "Delay",
    "Drop",
    "DroppedRankError",
    "Fail",
    "Fault",
    "FaultyProcessGroup",
    "FollowedWork",
    "Hang",
    "HookOpName",
    "Injected",
    "InjectedError",
    "PostHookArgs",
    "PreHookArgs",
    "ProcessGroup",
    "Record",
    "RecordingProcessGroup",
    "SimulatedProcessGroup",
    "ThrottledProcessGroup",
    "Work",
    "WorkInfo",
    "WrapperProcessGroup",
    "WrapperWork",
    "broadcast_coalesced",
    "merge_traces",
    "register",
    "register_backend",
]
