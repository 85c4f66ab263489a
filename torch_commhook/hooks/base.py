"""The base class of all hooks, and what it says of them to wrappers, reducers and compilers."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects, and
# does not accept strings.

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket, hook_on_bucket
from torch_commhook.collectives.futures import is_capturing
from torch_commhook.collectives.gloo_groups import group_rank, resolve_group
from torch_commhook.memory.bucket_memory import BucketMemory, ShardedBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import ScaleJumpDetector
from torch_commhook.native.bucket_ops import BUCKET_DTYPES
from torch_commhook.native.runtime import hook_name
from torch_commhook.spans import active, bucket_label, spans_of
from torch_commhook.wording import keep_old_method, warn_user

# ---- properties of a hook that its wrappers and the reducers depend on ---------------------------


@dataclass(frozen=True)
class HookTraits:
    """The traits of a hook.

    Attributes:
        is_lossy: whether a message holds less than the gradients, so that results depend on the
            parameters that share a bucket.
        takes_error: whether the next message can carry the errors of earlier ones.
        keeps_error: whether the hook remembers a message's error, and sends it with the next.
        splits_buckets: whether the hook averages parts of a bucket one by one.
        settles_buckets: whether the hook decides about all buckets of a step together.
        has_stages: whether a collective follows another one, at any number of ranks.
        keeps_ranks_apart: whether each rank takes several steps on its own gradients, so that
            parameters and optimizer state differ among ranks.
        scales_steps: whether ``Hook.step_scale`` is called; all results then wait for the last.
        chooses: whether the hook measures in the first steps which of several hooks to use.
    """

    is_lossy: bool = False
    takes_error: bool = False
    keeps_error: bool = False
    splits_buckets: bool = False
    settles_buckets: bool = False
    has_stages: bool = False
    keeps_ranks_apart: bool = False
    scales_steps: bool = False
    chooses: bool = False

    @classmethod
    def of_any(cls, hooks: Iterable[Any]) -> "HookTraits":
        """The traits that at least one of these hooks has."""
        hooks = list(hooks)
        # By the hooks' attributes: a user's class may define them directly.
        return cls(
            **{one.name: any(getattr(hook, one.name) for hook in hooks) for one in fields(cls)}
        )


class Trait:
    """An attribute of a hook that reads the trait of the same name.

    A class or an object may replace it by a bool or a property.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, hook: Any, owner: Any = None) -> bool:
        value: bool = getattr((owner if hook is None else hook).traits, self._name)
        return value


def traceable(hook: Any) -> Any:
    """Do nothing. Deprecated: compiled code runs all hooks alike, marked or not.

    Args:
        hook: a function, a class or an object.

    Returns:
        The hook itself.

    Example:
        >>> traceable(hooks.allreduce())
        allreduce()
    """
    warn_user(
        "traceable is deprecated and does nothing: compiled code runs every hook",
        DeprecationWarning,
    )
    return hook


# ---- the base class of all hooks of the library --------------------------------------------------


class Hook(ABC):
    """The base class of communication hooks: averages a bucket's gradients over the ranks.

    A subclass implements :meth:`average`. DDP calls ``hook(state, bucket)``, which returns a Future
    of the average in the bucket's own dtype. ``state`` is not used: the hook object keeps its own
    memory.

    Ranks compare the text of the hooks that they attach. A subclass with settings needs a
    ``__repr__`` that shows them.

    Args:
        process_group: the ranks to average over. None means the bucket's group: the attached
            model's, or the ``state`` that DDP's registration gave. A hook registered as
            ``ddp.register_comm_hook(None, hook)`` then uses the default group.

    Example:
        >>> class half(hooks.Hook):
        ...     def average(self, bucket):
        ...         group = self.group(bucket)
        ...         message = bucket.flatten(scale=1 / group.size(), dtype=torch.float16)
        ...         return collectives.all_reduce(message, group=group)
        ...     def result_dtype(self, bucket):
        ...         return torch.float16
        ...     def __repr__(self):
        ...         return "half()"
        >>> gradients = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([3.0, 2.0, 1.0])]]
        >>> simulate(half(), gradients).result
        [tensor([2., 2., 2.])]
    """

    process_group: dist.ProcessGroup | None = None

    #: The hook's traits; each is also an attribute of the same name.
    traits: HookTraits = HookTraits()

    is_lossy = Trait()
    takes_error = Trait()
    keeps_error = Trait()
    splits_buckets = Trait()
    settles_buckets = Trait()
    has_stages = Trait()
    keeps_ranks_apart = Trait()
    scales_steps = Trait()
    chooses = Trait()

    #: The dtype in which a hook remembers errors, if it keeps any.
    error_dtype: torch.dtype = torch.float32

    #: The factor by which it multiplies its errors in each step.
    error_decay: float = 1.0

    #: Whether :meth:`step_scale` takes ``loss_scale``.
    _takes_loss_scale: bool = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if keep_old_method(cls, "shards", "segments"):
            warn_user(f"{cls.__qualname__}.shards is deprecated: use segments", DeprecationWarning)
        parameters = inspect.signature(cls.step_scale).parameters
        cls._takes_loss_scale = "loss_scale" in parameters or any(
            one.kind is one.VAR_KEYWORD for one in parameters.values()
        )

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group

    def hooks_inside(self) -> "Sequence[Hook]":
        """The hooks that do this hook's work, if any."""
        return ()

    #: Whether :meth:`average` waits for no collective's result, so that second stages may wait for
    #: the next bucket. Each class declares this for itself, since a subclass may differ.
    _lets_stages_wait: bool = False

    @property
    def lets_stages_wait(self) -> bool:
        """Whether neither this hook nor one inside it waits for a result in :meth:`average`."""
        own: bool = vars(type(self)).get("_lets_stages_wait", False)
        return own and all(hook.lets_stages_wait for hook in self.hooks_inside())

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        """Refuse the hook's own process groups if they do not fit the model's group.

        All ranks call this at the same point, before the hook is used.

        Args:
            group: the model's process group.

        Raises:
            ValueError: a group does not fit. All ranks raise it.
        """
        for hook in self.hooks_inside():
            hook.check_ranks(group)

    def check_parameters(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Refuse a model whose parameters do not fit the hook.

        Called before the hook is used.

        Args:
            named: the names and parameters.

        Raises:
            ValueError: the parameters do not fit.
        """
        for hook in self.hooks_inside():
            hook.check_parameters(named)

    def prepare(self, memory: BucketMemory) -> None:  # noqa: B027 (most remember nothing)
        """Ask for the hook's memory of a bucket, before the bucket's first :meth:`average`.

        Called outside compilers, on all ranks at the same point, and again whenever buckets are
        rebuilt.

        Args:
            memory: the memory of the bucket.
        """

    def step_scale(
        self,
        results: Sequence[Tensor],
        past: Mapping[int, bool],
        loss_scale: Tensor | None = None,
    ) -> Tensor | None:
        """Return a factor for a step's results, before they are written.

        Args:
            results: a flat tensor for each bucket, the same on all ranks.
            past: whether the given number of steps had been done before this step
                (:class:`BucketMemory`).
            loss_scale: the factor in the results, a float32 tensor of one number. Only given if
                :func:`torch_commhook.attach` got a ``GradScaler``.

        Returns:
            A tensor of one number: float32, or float64 if results are float64. None means 1.
        """
        return None

    def step_counted(self, memory: HookMemory) -> None:  # noqa: B027
        """Called when all ranks have done a step, at the same point on all ranks."""

    def check_capture(self, memory: BucketMemory) -> None:
        """Refuse a CUDA graph's capture of a step if replays would not do the same as the step.

        Args:
            memory: the memory of a bucket of the step.

        Raises:
            RuntimeError: the hook's work changes with the number of the step.
        """
        for hook in self.hooks_inside():
            hook.check_capture(memory)

    def memory(self, bucket: GradBucket) -> BucketMemory:
        """Return the memory that :meth:`prepare` has asked for.

        The memory belongs to the model that the hook is attached to; without a model, to the hook.
        """
        memory: BucketMemory | None = bucket.memory
        if memory is None:
            memory = bucket.memory = self._own_memory_of(bucket)
        return memory

    def _own_memory_of(self, bucket: GradBucket) -> BucketMemory:
        # Not made in the constructor: a subclass may forget to call it.
        own: HookMemory = self.__dict__.setdefault("_own_memory", HookMemory())
        group = self.group(bucket)
        own.rank, own.world_size, own.group = group_rank(group), group.size(), group
        own.on_step = self.step_counted
        self._find_groups(group)
        memory = own.memory_of_bucket(bucket.parameters(), bucket.index(), self.prepare)
        if bucket.index() == 0:  # the previous step has ended
            if own.has_begun:
                own.count_step()
            own.has_begun = True
            if self.keeps_error:
                if own.jump_detector is None:
                    own.jump_detector = ScaleJumpDetector(hook_name(self), keeps_error=True)
                if not is_capturing(bucket.device()):
                    own.jump_detector.look(bucket)
        return memory

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__"):  # DDP reads these of every hook, for its log
            return type(self).__name__
        raise AttributeError(f"'{type(self).__qualname__}' object has no attribute '{name}'")

    @abstractmethod
    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average a bucket's gradients over the ranks.

        Args:
            bucket: the bucket.

        Returns:
            A Future of a flat tensor with the bucket's number of elements, or the tensor itself. It
            may have the dtype that :meth:`result_dtype` returns, if a cast to the bucket's dtype is
            the only work left; the caller then casts it while writing the gradients.
        """

    # `bucket` has no annotation, since DDP accepts only torch.distributed.GradBucket there.
    def __call__(self, state: object, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def]
        """Average a bucket as PyTorch calls hooks: returns a Future in the bucket's dtype.

        Args:
            state: None, or the process group to average over, as for PyTorch's own hooks.
            bucket: a :class:`torch_commhook.GradBucket` or a ``torch.distributed.GradBucket``.

        Raises:
            TypeError: ``state`` is something else, or :meth:`average` returned neither a Future nor
                a tensor. This error, and errors about the Future's value, name the hook and the
                bucket.
            RuntimeError: the hook scales steps, and so needs all buckets of a step.
            Exception: :meth:`average` raised it; a note names the hook and the bucket.
        """
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(
                f"hook '{hook_name(self)}': state must be a ProcessGroup or None, got "
                f"{_C.type_name(state)}; a hook of the library keeps its own"
            )
        bucket = GradBucket.wrap(bucket, state)
        if self.scales_steps:
            raise RuntimeError(
                f"{self}: scales a step by a factor of all its buckets, which only an attached "
                "hook sees; use torch_commhook.attach(model, hook)"
            )
        memory = self.memory(bucket)
        if is_capturing(bucket.device()):
            self.check_capture(memory)
        dtype = checked_result_dtype(self, bucket)
        where = _where(self, bucket)
        with active(spans_of(lambda: bucket_label(bucket.index(), hook_name(self)))):
            result = _C.run_average(self, bucket)
        return _C.cast_into(result, bucket.buffer(), dtype, where)

    def check_shards(self) -> None:
        """Refuse sharded gradients if the hook cannot average them in a reduce-scatter.

        Raises:
            TypeError: it cannot. The text gives the reason and a remedy.
        """
        if type(self).average_shard is Hook.average_shard:
            raise TypeError(
                f"{self}: averages whole gradients, but a rank has only its shards of sharded "
                "parameters; shard over a mesh of two dimensions, so that it averages across "
                "replicas, or use allreduce(), cast(), blockwise(), fp8(), sign() or randomk()"
            )

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        """Start to sum sharded gradients over the ranks; each rank gets its shard of the sum.

        For models with ``fully_shard``, over the ranks that have shards of the same parameters.

        Args:
            bucket: has the gradients in :meth:`GradBucket.buffer`, the factor of the sum in
                ``scale``, and the tensor to write in ``shard``.

        Returns:
            A Future that completes when ``bucket.shard`` has been written.

        Raises:
            TypeError: as :meth:`check_shards`.
        """
        self.check_shards()
        raise NotImplementedError(f"{self}: has no average_shard()")

    def segments(self, memory: BucketMemory) -> list[str]:
        """The names of its memory of a bucket's parts; see :meth:`BucketMemory.segment`."""
        return [name for hook in self.hooks_inside() for name in hook.segments(memory)]

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        """The dtype of this bucket's result from :meth:`average`.

        The bucket's own, or another floating-point dtype that buckets can have.
        """
        return bucket.dtype()

    def group(self, bucket: GradBucket) -> dist.ProcessGroup:
        """The process group to average this bucket over.

        Raises:
            RuntimeError: there is none, and torch.distributed is not initialized.
        """
        own = self.process_group
        if own is None:
            return resolve_group(bucket.process_group())
        own, memory = resolve_group(own), bucket.memory
        return own if memory is None else memory.private_group(own)

    def _find_groups(self, group: dist.ProcessGroup) -> None:
        """Make the process groups that this hook, or one inside, determines itself, if it has none.

        Args:
            group: the group of the average. All of its ranks call this at the same point.
        """
        for hook in self.hooks_inside():
            hook._find_groups(group)

    def own_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that the user gave this hook or one inside.

        The list is the same on all ranks, except for entries that are no group or exclude this
        rank. A step reports those.
        """
        found = [group for group in self._given_groups() if isinstance(group, dist.ProcessGroup)]
        for hook in self.hooks_inside():
            found += hook.own_groups()
        return found

    def has_own_groups(self) -> bool:
        """Whether this hook, or one inside, has process groups of its own now or when attached."""
        return bool(self._given_groups()) or any(
            hook.has_own_groups() for hook in self.hooks_inside()
        )

    def _given_groups(self) -> list[dist.ProcessGroup]:
        return [] if self.process_group is None else [self.process_group]

    def __repr__(self) -> str:
        # Without an address, since ranks compare the hooks that they attach.
        inside = ", ".join(map(repr, self.hooks_inside()))
        return f"{type(self).__name__}({inside})"

    # Copies share the group, and have buffers of their own. Process groups belong to one process,
    # so pickles leave them out.

    def __copy__(self) -> "Hook":
        return self._with_state(
            {
                name: copy.copy(value)
                if isinstance(value, (HookMemory, Hook, _C.CppHook))
                else value
                for name, value in self.__dict__.items()
            }
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        for group in self._given_groups():
            memo[id(group)] = group
        return self._with_state(copy.deepcopy(self.__dict__, memo))

    def _with_state(self, state: dict[str, Any]) -> "Hook":
        hook = type(self).__new__(type(self))
        hook.__dict__.update(state)
        return hook

    def __getstate__(self) -> dict[str, Any]:
        if self._given_groups():
            warnings.warn(
                f"{self}: a process group cannot be pickled and is left out; the copy averages "
                "over the ranks of the model that it is attached to",
                stacklevel=2,
            )
        return {**self.__dict__, "process_group": None}


keep_old_method(Hook, "shards", "segments")


class FunctionHook(Hook):
    """A user's callable as a hook, called with ``state`` and a bucket. It has no memory."""

    def __init__(self, function: Callable[..., Any], state: object) -> None:
        super().__init__()
        self.function = function
        self.state = state

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        result: torch.futures.Future[Tensor] = self.function(self.state, bucket)
        return result

    def __repr__(self) -> str:
        return hook_name(self.function)


def _where(hook: Hook, bucket: GradBucket) -> str:
    return hook_on_bucket(hook_name(hook), bucket.index(), bucket.bucket_count())


def step_scale_of(
    hook: Hook, results: Sequence[Tensor], past: Mapping[int, bool], loss_scale: Tensor | None
) -> Tensor | None:
    """``hook.step_scale(...)``. A hook without the argument ``loss_scale`` sees scaled results."""
    if loss_scale is None or not hook._takes_loss_scale:
        return hook.step_scale(results, past)
    return hook.step_scale(results, past, loss_scale=loss_scale)


def check_dense(hook: Hook, bucket: GradBucket) -> None:
    """Refuse sparse and complex gradients with a TypeError."""
    if not (bucket.is_sparse() or bucket.dtype().is_complex):
        return  # without the text: with dynamic shapes a compiler would make the seed a variable
    where = f"{hook} on bucket {bucket.index()} of {bucket.bucket_count()}: gradients must be "
    if bucket.is_sparse():
        raise TypeError(
            f"{where}dense, got layout {bucket.buffer().layout}; allreduce() takes sparse ones"
        )
    raise TypeError(f"{where}real, got {bucket.dtype()}; allreduce() takes complex ones")


def checked_result_dtype(hook: Hook, bucket: GradBucket) -> torch.dtype:
    """``hook.result_dtype(bucket)``, checked.

    Raises:
        TypeError: it is no dtype that can be cast to the bucket's. Names hook and bucket.
    """
    dtype = hook.result_dtype(bucket)
    own = bucket.dtype()
    if dtype != own and own.is_complex:
        raise TypeError(
            f"{_where(hook, bucket)}: gradients must be real, since the hook's results have "
            f"{dtype}, got {own}; allreduce() takes complex ones"
        )
    if dtype != own and not (dtype in BUCKET_DTYPES and own in BUCKET_DTYPES):
        raise TypeError(
            f"{_where(hook, bucket)}: result_dtype must return a dtype that can be cast to {own}, "
            f"got {dtype}"
        )
    return dtype


def result_tensor(bucket: GradBucket, memory: BucketMemory) -> Tensor:
    """Memory for a bucket's result: the bucket's own, or a buffer that stays from step to step."""
    result = bucket.result_buffer()
    if result is not None:
        return result
    shape, dtype, device = (bucket.numel(),), bucket.dtype(), bucket.device()
    return memory.buffers.get("result", shape, dtype, device)


def average_scale(group: dist.ProcessGroup) -> float:
    """The factor that turns a sum over the group's ranks into their mean."""
    return 1.0 / group.size()
