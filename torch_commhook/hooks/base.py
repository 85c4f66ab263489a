"""What all hooks of the library share."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as they are, and
# does not understand strings.

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives import resolve_group
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.collectives.streams import is_capturing
from torch_commhook.hooks.traits import HookTraits, Trait
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.bucket_with_memory import BucketWithMemory, memory_of, set_memory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.jump_watch import JumpWatch
from torch_commhook.memory.sharded_bucket import ShardedBucket
from torch_commhook.native.bucket_ops import BUCKET_DTYPES
from torch_commhook.native.runtime import hook_name, hook_on_bucket
from torch_commhook.spans import active, bucket_label, spans_of


class Hook(ABC):
    """A communication hook: average a bucket's gradients over the ranks, somehow.

    It prints as it is written, by which ranks compare what they attach: a subclass with settings
    brings a ``__repr__`` that shows them.

    A subclass says how in :meth:`average`. Called as ``hook(state, bucket)``, which is what DDP
    does, it gives a Future of the average in the bucket's own dtype. ``state`` is not used: what a
    hook remembers, it keeps itself, so that one object is all there is to pass around.

    Args:
        process_group: the ranks to average over. None for the bucket's own: that of the model
            which the hook is attached to, or the ``state`` that it was registered with. A bucket
            has none where the hook was registered as ``ddp.register_comm_hook(None, hook)``; the
            average is then over the default group.

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

    #: What is so of it; each also under its own name.
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

    #: In what a hook that keeps an error remembers it.
    error_dtype: torch.dtype = torch.float32

    #: What it multiplies that by in each step.
    error_decay: float = 1.0

    #: Whether :meth:`step_scale` takes ``loss_scale``.
    _takes_loss_scale: bool = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        parameters = inspect.signature(cls.step_scale).parameters
        cls._takes_loss_scale = "loss_scale" in parameters or any(
            one.kind is one.VAR_KEYWORD for one in parameters.values()
        )

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group

    def hooks_inside(self) -> "Sequence[Hook]":
        """The hooks that do this one's work, if others do."""
        return ()

    #: Whether :meth:`average` waits for no collective's result, so that second stages may wait
    #: for the next bucket. Each class says so for itself: a subclass may do otherwise.
    _lets_stages_wait: bool = False

    @property
    def lets_stages_wait(self) -> bool:
        """Whether neither it nor a hook inside waits for a result in :meth:`average`."""
        own: bool = vars(type(self)).get("_lets_stages_wait", False)
        return own and all(hook.lets_stages_wait for hook in self.hooks_inside())

    def has_stages_among(self, ranks: int) -> bool:
        """``has_stages``, where the average is over so many ranks."""
        return self.has_stages or any(hook.has_stages_among(ranks) for hook in self.hooks_inside())

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        """Refuse process groups of the hook's own that do not fit a model's.

        Called on all ranks at the same point, before the hook is used.

        Args:
            group: the model's.

        Raises:
            ValueError: one does not fit; on all ranks alike.
        """
        for hook in self.hooks_inside():
            hook.check_ranks(group)

    def check_parameters(self, named: "Sequence[tuple[str, Tensor]]") -> None:
        """Refuse a model whose parameters do not fit the hook.

        Called before the hook is used.

        Args:
            named: names and parameters.

        Raises:
            ValueError: they do not fit.
        """
        for hook in self.hooks_inside():
            hook.check_parameters(named)

    def prepare(self, memory: BucketMemory) -> None:  # noqa: B027 (most remember nothing)
        """Ask for what the hook remembers of a bucket, before the first :meth:`average` of it.

        Called outside of compilers, on all ranks at the same point, and again whenever buckets are
        formed anew.
        """

    def step_scale(
        self,
        results: Sequence[Tensor],
        past: "Mapping[int, bool]",
        loss_scale: Tensor | None = None,
    ) -> Tensor | None:
        """A factor for a step's results, before they are written.

        Args:
            results: flat tensors, one for each bucket, the same on all ranks.
            past: whether so many steps had been done before it (:class:`BucketMemory`).
            loss_scale: what the results are multiplied by, a float32 tensor of one number. Only
                given where :func:`torch_commhook.attach` was told of a ``GradScaler``.

        Returns:
            A tensor of one number, float32, or float64 where results are of that; None for 1.
        """
        return None

    def step_counted(self, memory: HookMemory) -> None:  # noqa: B027
        """Called when a step has been done on all ranks; all come here at the same point."""

    def check_capture(self, memory: BucketMemory) -> None:
        """Refuse a CUDA graph that captures a step, where replays would do something else.

        Args:
            memory: of a bucket of the step.

        Raises:
            RuntimeError: what the hook does changes with the number of the step.
        """
        for hook in self.hooks_inside():
            hook.check_capture(memory)

    def memory(self, bucket: GradBucket) -> BucketMemory:
        """What :meth:`prepare` has asked for.

        It belongs to what the hook is attached to; where that is nothing, to the hook itself.
        """
        memory = memory_of(bucket)
        if memory is None:
            memory = self._own_memory_of(bucket)
            set_memory(bucket, memory)
        return memory

    def _own_memory_of(self, bucket: GradBucket) -> BucketMemory:
        # Not made by the constructor, which a subclass may forget to call.
        own: HookMemory = self.__dict__.setdefault("_own_memory", HookMemory())
        group = self.group(bucket)
        own.rank, own.world_size, own.group = group_rank(group), group.size(), group
        own.on_step = self.step_counted
        self._find_groups(group)
        memory = own.memory_of_bucket(bucket.parameters(), bucket.index(), self.prepare)
        if bucket.index() == 0:  # the step before has come to an end
            if own.has_begun:
                own.count_step()
            own.has_begun = True
            if self.keeps_error:
                if own.jump_watch is None:
                    own.jump_watch = JumpWatch(hook_name(self), keeps_error=True)
                if not is_capturing(bucket.device()):
                    own.jump_watch.look(bucket)
        return memory

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__"):  # which DDP reads of every hook, for its log
            return type(self).__name__
        raise AttributeError(f"'{type(self).__qualname__}' object has no attribute '{name}'")

    @abstractmethod
    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket's gradients over the ranks.

        Returns:
            A Future of a flat tensor with as many elements as the bucket. It may have another
            dtype than the bucket, which :meth:`result_dtype` then tells, where casting it back is
            all that is left to do: whoever takes the result casts it on its way into the
            gradients. A tensor is taken for a Future that is complete.
        """

    # `bucket` has no annotation, since DDP takes only torch.distributed.GradBucket for one.
    def __call__(self, state: object, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def]
        """PyTorch's form of a hook: a Future of the average, in the bucket's dtype.

        Args:
            state: None, or a process group to average over, as PyTorch's own hooks take it.
            bucket: a :class:`torch_commhook.GradBucket` or a ``torch.distributed.GradBucket``.

        Raises:
            TypeError: another state, or :meth:`average` returned neither a Future nor a tensor.
                Names hook and bucket, as do errors about what the Future holds.
            RuntimeError: a hook that scales steps, which are to be seen as a whole.
            Exception: whatever :meth:`average` raised, with a note that names hook and bucket.
        """
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(
                f"hook '{hook_name(self)}': state must be a ProcessGroup or None, got "
                f"{_C.type_name(state)}; a hook of the library keeps its own"
            )
        if isinstance(bucket, dist.GradBucket):
            bucket = BucketWithMemory.from_torch(bucket, state)
        else:
            bucket = GradBucket.wrap(bucket, state)
        if self.scales_steps:
            raise RuntimeError(
                f"{self}: what steps are scaled by comes from all buckets, which only a hook that "
                "is attached sees; use torch_commhook.attach(model, hook)"
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
        """Refuse sharded gradients, where the hook cannot average them in a reduce-scatter.

        Raises:
            TypeError: it cannot; says why, and what can be done.
        """
        if type(self).average_shard is Hook.average_shard:
            raise TypeError(
                f"{self}: averages whole gradients, and of sharded parameters each rank needs its "
                "shard alone; shard over a mesh of two dimensions, across whose replicas it can "
                "average, or use allreduce(), cast(), blockwise(), fp8(), sign() or randomk()"
            )

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        """Start summing sharded gradients over the ranks, of which each gets its shard.

        For models with ``fully_shard``, over the ranks that have shards of the same parameters.

        Args:
            bucket: has the gradients in :meth:`GradBucket.buffer`, what the sum is multiplied by in
                ``scale``, and in ``shard`` the tensor that is to be written.

        Returns:
            A Future, complete once ``bucket.shard`` has been written.

        Raises:
            TypeError: as :meth:`check_shards`.
        """
        self.check_shards()
        raise NotImplementedError(f"{self}: has no average_shard()")

    def shards(self, memory: BucketMemory) -> "list[str]":
        """The names of what it remembers of parts of a bucket; see :meth:`BucketMemory.shard`."""
        return [name for hook in self.hooks_inside() for name in hook.shards(memory)]

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        """The dtype of what :meth:`average` gives for this bucket.

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
        own, memory = resolve_group(own), memory_of(bucket)
        return own if memory is None else memory.stand_in(own)

    def _find_groups(self, group: dist.ProcessGroup) -> None:
        """Make the process groups that the hook finds out itself, or a hook inside, if it has none.

        Args:
            group: that the average is over. All of its ranks call this at the same point.
        """
        for hook in self.hooks_inside():
            hook._find_groups(group)

    def own_groups(self) -> list[dist.ProcessGroup]:
        """Process groups that it was given, itself or a hook inside.

        The same on all ranks, but for what is no group, or none of this rank's: a step tells of it.
        """
        found = [group for group in self._given_groups() if isinstance(group, dist.ProcessGroup)]
        for hook in self.hooks_inside():
            found += hook.own_groups()
        return found

    def has_own_groups(self) -> bool:
        """Whether it, or a hook inside, was given process groups, or makes some when attached."""
        return bool(self._given_groups()) or any(
            hook.has_own_groups() for hook in self.hooks_inside()
        )

    def _given_groups(self) -> list[dist.ProcessGroup]:
        return [] if self.process_group is None else [self.process_group]

    def __repr__(self) -> str:
        # With no address, since ranks compare what they attach.
        inside = ", ".join(map(repr, self.hooks_inside()))
        return f"{type(self).__name__}({inside})"

    # Copies keep the group, and have buffers of their own. Process groups belong to one process,
    # so that pickles go without.

    def __copy__(self) -> "Hook":
        return self._with_state(
            {
                name: copy.copy(value)
                if isinstance(value, (Workspaces, HookMemory, Hook, _C.CppHook))
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
                f"{self}: a process group cannot be pickled, and is left out; the copy averages "
                "over the ranks of the model that it is attached to",
                stacklevel=2,
            )
        return {**self.__dict__, "process_group": None}


def _where(hook: Hook, bucket: GradBucket) -> str:
    return hook_on_bucket(hook_name(hook), bucket.index(), bucket.bucket_count())


def check_is_chosen(where: str, hook: Hook) -> None:
    """Refuse a hook inside of another one that is yet to choose which hook it is.

    Args:
        where: names the other hook and its argument.
        hook: one of the library.

    Raises:
        ValueError: it chooses in its first steps.
    """
    if hook.chooses:
        raise ValueError(
            f"{where} must be known before the first step, and {hook} chooses after some steps; "
            "attach auto() by itself, with such hooks among the hooks= that it chooses from"
        )


def step_scale_of(
    hook: Hook, results: Sequence[Tensor], past: "Mapping[int, bool]", loss_scale: Tensor | None
) -> Tensor | None:
    """``hook.step_scale(...)``; one that does not take ``loss_scale`` sees scaled results."""
    if loss_scale is None or not hook._takes_loss_scale:
        return hook.step_scale(results, past)
    return hook.step_scale(results, past, loss_scale=loss_scale)


def checked_result_dtype(hook: Hook, bucket: GradBucket) -> torch.dtype:
    """``hook.result_dtype(bucket)``.

    Raises:
        TypeError: that is no dtype which could be cast into the bucket. Names hook and bucket.
    """
    dtype = hook.result_dtype(bucket)
    own = bucket.dtype()
    if dtype != own and not (dtype in BUCKET_DTYPES and own in BUCKET_DTYPES):
        raise TypeError(
            f"{_where(hook, bucket)}: result_dtype must return a dtype that can be cast to {own}, "
            f"got {dtype}"
        )
    return dtype


def result_tensor(bucket: GradBucket, memory: BucketMemory) -> Tensor:
    """Memory for a bucket's result: the bucket's own, or one that stays from step to step."""
    result = bucket.result_buffer()
    if result is not None:
        return result
    shape, dtype, device = (bucket.numel(),), bucket.dtype(), bucket.device()
    if torch.compiler.is_compiling():  # which plans memory itself
        return torch.empty(shape, dtype=dtype, device=device)
    return memory.buffers.get("result", shape, dtype, device)


class Workspaces:
    """Persistent buffers of a hook, one for each bucket it has seen.

    A bucket is known by its first parameter: DDP forms its buckets anew after the first step, and
    one hook may serve several models, so that an index alone says little. Buffers go when their
    model goes, or when their parameters move to other buckets.
    """

    def __init__(self) -> None:
        self._buffers: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def get(
        self, bucket: GradBucket, dtype: torch.dtype, numel: int | None = None
    ) -> Tensor | None:
        """A flat buffer of so many elements (the bucket's), of ``dtype``, on its device.

        Its contents are those that the last step left, or undefined. None while a compiler traces,
        which plans memory itself.
        """
        if torch.compiler.is_compiling():
            return None
        numel = bucket.numel() if numel is None else numel
        device = bucket.device()
        key = bucket.first_parameter()
        buffer = self._buffers.get(key)
        if (
            buffer is None
            or buffer.numel() != numel
            or buffer.dtype != dtype
            or buffer.device != device
        ):
            for parameter in bucket.parameters():
                self._buffers.pop(parameter, None)
            with torch.inference_mode(False):  # or no other step could write to it
                buffer = torch.empty(numel, dtype=dtype, device=device)
            _C.prefer_huge_pages(buffer)
            self._buffers[key] = buffer
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)

    def __reduce__(self) -> tuple[type["Workspaces"], tuple[()]]:
        return Workspaces, ()  # buffers hold nothing between steps that a copy would need


def average_scale(group: dist.ProcessGroup) -> float:
    """The factor that turns a sum over the group's ranks into their mean."""
    return 1.0 / group.size()
