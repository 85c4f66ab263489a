"""Process groups and works in Python."""

from torch_commhook.process_group.base import ProcessGroup
from torch_commhook.process_group.group_hooks import (
    CompletionHookArgs,
    PostHookArgs,
    PreHookArgs,
    WorkInfo,
)
from torch_commhook.process_group.operations import HookOpName
from torch_commhook.process_group.registration import register
from torch_commhook.process_group.work import Work, WrapperWork
from torch_commhook.process_group.wrapper import WrapperProcessGroup

__all__ = [
    "CompletionHookArgs",
    "HookOpName",
    "PostHookArgs",
    "PreHookArgs",
    "ProcessGroup",
    "Work",
    "WorkInfo",
    "WrapperProcessGroup",
    "WrapperWork",
    "register",
]
