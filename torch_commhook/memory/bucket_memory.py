"""The memory of hooks for a bucket, also a sharded one, and the memory that steps reuse."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.buckets.layout import BucketLayout, gradient_dtype
from torch_commhook.codecs.base import mix_seeds, write_saturated
from torch_commhook.collectives.compressed_call import MessageBuffers
from torch_commhook.collectives.gloo_groups import group_name
from torch_commhook.memory.states import FOLDED_INTO, ParameterStore, add_to_error
from torch_commhook.memory.watches import Replays
from torch_commhook.metrics import CallMeter
from torch_commhook.wording import keep_old_method

if TYPE_CHECKING:
    from typing_extensions import Self


# ---- float tensors that the buckets of a model share ---------------------------------------------


class Scratch:
    """Tensors for one call each; afterwards the next call of any bucket reuses them.

    There are as many as buckets that were processed at once. Any thread may take and give.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of at least ``numel`` elements with undefined contents."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = None
        if kept is not None and kept.numel() >= numel:
            if kept.dtype == dtype and kept.device == device:
                return kept
        with torch.inference_mode(False):  # otherwise no other call could write to it
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: Tensor) -> None:
        """Return a tensor of :meth:`take`, so that others can use it."""
        self._free.append(tensor)


# ---- a hook's memory of one bucket between steps -------------------------------------------------


class ModelMemory:
    """The part of the whole model's memory that a bucket's memory uses.

    Attributes:
        store: memory by parameter.
        rank, world_size: this process's rank and the number of ranks.
        replays: counts the steps that CUDA graphs have run.
        private_groups: by the name of a group that the user gave to a hook, the one in its place.
        past: see :class:`BucketMemory`.
        scratch: float tensors for calls of any bucket.
    """

    def __init__(self) -> None:
        self.store = ParameterStore()
        self.rank, self.world_size = 0, 1
        self._seen_steps = 0  # by the host
        self.replays = Replays()
        self.private_groups: dict[str, dist.ProcessGroup] = {}
        self.past: dict[int, bool] = {}
        self.scratch = Scratch()

    @property
    def steps(self) -> int:
        """The number of steps done on all ranks. Waits for the device if graphs run steps."""
        return self._seen_steps + self.replays.count()

    def private_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group to use instead of a group that the user gave a hook, or that group itself."""
        return self.private_groups.get(group_name(group), group) if self.private_groups else group


class BucketMemory:
    """A hook's memory of one bucket, or of some parameters of one.

    A hook requests tensors in :meth:`torch_commhook.hooks.Hook.prepare`, outside compilers, and
    later finds them in ``tensors`` and ``lists``.

    Attributes:
        tensors: flat tensors by name; of ``error_dtype``, except those that a hook has packed.
        lists: a tensor or None for each parameter, by name.
        plans: a hook's results from the layout, as text, by name.
        roundings: results of :meth:`rounding_seeds`, by arguments.
        with_error: whether hooks are to remember their errors.
        error_dtype: the errors' dtype, float32 or bfloat16.
        error_decay: the factor by which hooks multiply errors after they are written.
        parts: memories of some of the parameters each, by name.
        places: for such a part, the numbers of its parameters in the whole.
        buffers: memory for messages.
        meter: measures the cost of messages.
        scratch: memory that buckets share.
        past: whether each requested number of steps has been done.
        segments: by its name in ``tensors``, each segment's kind, first element, and end.
        factors: the factors of :meth:`segment`, by segment.
        folded: marks that :meth:`fold_segments` need not run again, by a caller's name.
        choices: numbers that were chosen for the bucket, by name; see :meth:`set_choice`.
    """

    def __init__(
        self,
        owner: ModelMemory,
        parameters: Sequence[Tensor],
        index: int,
        *,
        with_error: bool = False,
        is_sharded: bool = False,
    ) -> None:
        self._owner = owner
        self.is_sharded = is_sharded
        self._store = owner.store
        # One hook may serve several models, and references none of them.
        self._parameters = [TensorWeakRef(parameter) for parameter in parameters]
        self.layout = BucketLayout(parameters)
        self.index = index
        self.numel = self.layout.numel
        self.device = parameters[0].device
        self.dtype = reduce(torch.promote_types, [each.dtype for each in parameters])
        self.gradient_dtype = gradient_dtype(parameters[0])
        self.rank = owner.rank
        self.world_size = owner.world_size
        self.with_error = with_error
        self.error_dtype = torch.float32
        self.error_decay = 1.0
        self.tensors: dict[str, Tensor] = {}
        self.lists: dict[str, list[Tensor | None]] = {}
        self.plans: dict[str, str] = {}
        self.roundings: dict[str, Tensor] = {}
        self.parts: dict[str, BucketMemory] = {}
        self.buffers = MessageBuffers()
        self.meter = CallMeter()
        self.past = owner.past
        self.scratch = owner.scratch
        self.choices: dict[str, int] = {}
        self.places: list[int] = []
        self.segments: dict[str, tuple[str, tuple[int, int]]] = {}
        self.factors: dict[str, int] = {}
        self.folded: set[str] = set()

    @property
    def parameters(self) -> list[Tensor]:
        """The bucket's parameters, while they exist."""
        found = [reference() for reference in self._parameters]
        return [parameter for parameter in found if parameter is not None]

    @property
    def names(self) -> list[str] | None:
        """The parameters' names, if the model is known."""
        return self._store.names_of(self.parameters)

    @property
    def model_sizes(self) -> dict[str, int]:
        """The number of elements of each parameter of the whole model, by name."""
        return {name: parameter.numel() for name, parameter in self._store.named_parameters()}

    @property
    def steps(self) -> int:
        """The number of steps done."""
        return self._owner.steps

    def private_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group through which a hook communicates instead of the one that the user gave it."""
        return self._owner.private_group(group)

    def flat(self, name: str) -> Tensor:
        """Return a flat tensor of ``error_dtype``, one element per bucket element; at first zeros.

        When a ``GradScaler`` changes its scale, ``"error"`` is multiplied accordingly.
        """
        flat = self.tensors.get(name)
        if flat is None:
            flat = self.tensors[name] = torch.zeros(
                self.numel, dtype=self.error_dtype, device=self.device
            )
            for parameter, piece in zip(self.parameters, self.layout.views(flat), strict=True):
                self._store.move_piece(parameter, name, piece)
        return flat

    def segment(self, kind: str, begin: int, end: int, factor: int) -> str:
        """Create a tensor of ``error_dtype`` for the elements ``[begin, end)``; at first zeros.

        When another rank owns these elements, their values times ``factor`` are added to
        ``flat("error")``. The factor is the number of ranks of the mean that these errors belong
        to.

        Returns:
            Its name in ``tensors``: one for each place of a kind.
        """
        place = begin, end
        for name, (known, where) in self.segments.items():
            if known == kind and where == place:
                return name
        others = sum(known == kind for known, _ in self.segments.values())
        name = f"{kind} {others + 1}" if others else kind
        self.tensors[name] = torch.zeros(end - begin, dtype=self.error_dtype, device=self.device)
        self.segments[name] = kind, place
        self.factors[name] = factor
        self._restore_segment(name, kind)
        return name

    def fold_segments(self, names: Sequence[str]) -> None:
        """Add the contents of segments to ``flat("error")``, and set the segments to zeros."""
        for name in names:
            kind, (begin, end) = self.segments[name]
            segment = self.tensors[name]
            add_to_error(self.tensors[FOLDED_INTO[kind]][begin:end], segment, self.factors[name])
            segment.zero_()

    def fold_all_segments(self) -> None:
        """Run :meth:`fold_segments` for all segments, also of its parts."""
        self.fold_segments(list(self.segments))
        for part in self.parts.values():
            part.fold_all_segments()

    def locate_error(self, number: int) -> tuple[Tensor, int, float] | None:
        """Locate a parameter's error memory: a flat tensor, the offset in it, its decay.

        None if there is no error memory.
        """
        error = self.tensors.get("error")
        if error is not None:
            return error, self.layout.offsets[number], self.error_decay
        for part in self.parts.values():
            if number in part.places:
                return part.locate_error(part.places.index(number))
        return None

    def per_parameter(
        self, name: str, make: Callable[[int, Tensor], Tensor | None]
    ) -> list[Tensor | None]:
        """Return a tensor for each parameter: its earlier one, or ``make(number, parameter)``.

        The same on all ranks.
        """
        found = self.lists.get(name)
        if found is None:
            found = []
            for i, parameter in enumerate(self.parameters):
                tensors = self._store.shared.setdefault(parameter, {})
                if name not in tensors:
                    tensors[name] = make(i, parameter)
                found.append(tensors[name])
            self.lists[name] = found
        return found

    def packed(
        self,
        name: str,
        numbers: Sequence[int],
        make: Callable[[int, Tensor, Tensor | None], Tensor],
        *,
        key: str,
    ) -> Tensor:
        """Return the tensors of :meth:`per_parameter` as views of one flat tensor.

        Args:
            name: the name of this memory.
            numbers: the parameters' numbers, in the order of the tensor.
            make: called with number, parameter, and the earlier tensor or None; returns a dense
                tensor with the contents, shape and strides of the view. All have one dtype.
            key: the flat tensor's key in ``tensors``.
        """
        flat = self.tensors.get(key)
        if flat is None:
            everybody = self.parameters
            parameters = [everybody[i] for i in numbers]
            shared = [self._store.shared.setdefault(parameter, {}) for parameter in parameters]
            made = [
                make(i, parameter, tensors.get(name))
                for i, parameter, tensors in zip(numbers, parameters, shared, strict=True)
            ]
            layout = BucketLayout(made)
            flat = self.tensors[key] = layout.flatten(made)
            for tensors, view in zip(shared, layout.views(flat), strict=True):
                tensors[name] = view
        return flat

    def rounding_seeds(self, seed: int, *, alike: bool = False) -> Tensor:
        """Return seeds and steps, for codecs with random numbers.

        Args:
            seed: the hook's seed.
            alike: whether all ranks use the same numbers to encode their own values.

        Returns:
            int64 of shape (2, 2): rows of seed and step, for this rank's values and for the sum
            that it encodes.
        """
        seed = operator.index(seed)  # with dynamic shapes a compiler would make it a variable
        name = f"{seed}, alike" if alike else f"{seed}"
        rounding = self.roundings.get(name)
        if rounding is None:
            rank = 0 if alike else self.rank + 1
            step = self._owner.steps
            seeds = mix_seeds(seed, self.index, rank), mix_seeds(seed, self.index, -1 - self.rank)
            rows = [[seed, step] for seed in seeds]
            with torch.inference_mode(False):
                rounding = torch.tensor(rows, dtype=torch.int64, device=self.device)
            self.roundings[name] = rounding
        return rounding

    def part(self, name: str, numbers: Sequence[int]) -> BucketMemory:
        """Return a memory of some of the parameters, by their numbers."""
        part = self.parts.get(name)
        if part is None:
            parameters = self.parameters
            part = self.parts[name] = BucketMemory(
                self._owner,
                [parameters[i] for i in numbers],
                self.index * 1000 + len(self.parts) + 1,
                with_error=self.with_error,
            )
            part.places = list(numbers)
            part.error_dtype, part.error_decay = self.error_dtype, self.error_decay
        return part

    def track_step(self, step: int) -> None:
        """Let ``past[step]`` tell whether this number of steps has been done."""
        self.past[step] = self._owner.steps >= step

    def set_choice(self, name: str, value: int) -> None:
        """Choose a number for the bucket, the same on all ranks."""
        self.choices[name] = value
        for parameter in self.parameters:
            self._store.choices.setdefault(parameter, {})[name] = value

    def declare_choice(
        self, name: str, default: int, *, among: Sequence[int], decides_memory: bool = False
    ) -> int:
        """Declare a number to choose; returns the present choice of the first parameter.

        Args:
            name: the choice's name.
            default: the choice if there is none.
            among: all valid choices.
            decides_memory: whether the hook's memory depends on the number.
        """
        self._store.allowed_choices[name] = tuple(among)
        if decides_memory:
            self._store.deciding_choices.add(name)
        if name not in self.choices:
            known = self._store.choices.get(self.parameters[0], {})
            self.set_choice(name, known.get(name, default))
        return self.choices[name]

    def replace_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Replace the parameters by placeholders, by the parameters' ids."""
        self._parameters = [TensorWeakRef(placeholders[id(p)]) for p in self.parameters]
        for part in self.parts.values():
            part.replace_parameters(placeholders)

    @property
    def owner(self) -> ModelMemory:
        """The memory of the whole model, which this is a part of."""
        return self._owner

    # ---- for the owner ---------------------------------------------------------------------------

    def with_parts(self) -> Iterator[BucketMemory]:
        """This memory, and the memories of its parts."""
        yield self
        for part in self.parts.values():
            yield from part.with_parts()

    def changing_tensors(self, *, but: Collection[str] = ()) -> list[Tensor]:
        """The tensors that a step changes, without those of its parts, and without some lists."""
        found = list(self.tensors.values())
        for name, tensors in self.lists.items():
            if name not in but:
                found += [tensor for tensor in tensors if tensor is not None]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether the hook has requested nothing that changes from step to step."""
        return not any(
            each.tensors or each.lists or each.roundings or each.choices
            for each in self.with_parts()
        )

    def meters(self) -> list[CallMeter]:
        """Its own meter, and those of its parts."""
        return [each.meter for each in self.with_parts()]

    def count_step(self) -> None:
        """Count one more step."""
        for memory in self.with_parts():
            for rounding in memory.roundings.values():
                rounding[:, 1] += 1

    def segment_pieces(self, name: str) -> list[tuple[Tensor, int, int, int]]:
        """Each parameter of a segment, its first element there, the segment's, and their number."""
        _, (begin, end) = self.segments[name]
        found = []
        offsets, lengths = self.layout.offsets, self.layout.lengths
        for parameter, offset, length in zip(self.parameters, offsets, lengths, strict=True):
            first, last = max(begin, offset), min(end, offset + length)
            if first < last:
                found.append((parameter, first - offset, first - begin, last - first))
        return found

    def add_segments_to(
        self, own: dict[str, dict[str, Tensor]], name_of: Mapping[int, str]
    ) -> None:
        """Add its own segments, without those of its parts, to this rank's tensors of a state.

        Args:
            own: flat tensors by kind and parameter name. Missing ones are created as zeros, so that
                a state's contents do not depend on the buckets.
            name_of: the parameters' names, by id.
        """
        for name, (kind, _) in self.segments.items():
            whole = own.setdefault(kind, {})
            for parameter in self.parameters:
                if name_of[id(parameter)] not in whole:
                    whole[name_of[id(parameter)]] = torch.zeros(
                        parameter.numel(), dtype=self.error_dtype, device=parameter.device
                    )
            for parameter, first, start, count in self.segment_pieces(name):
                flat = whole[name_of[id(parameter)]]
                flat[first : first + count] += self.tensors[name][start : start + count]

    def return_segments(self) -> None:
        """Move the contents of all segments, also of its parts, to the parameters' memory."""
        for name, (kind, _) in self.segments.items():
            segment = self.tensors[name]
            for parameter, first, start, count in self.segment_pieces(name):
                lost = segment[start : start + count]
                self._store.add_lost(parameter, kind, lost, self.factors[name], begin=first)
        self.segments.clear()
        for part in self.parts.values():
            part.return_segments()

    def _restore_segment(self, name: str, kind: str) -> None:
        """Load a new segment from a loaded state, and the rest into the parameters' memory."""
        for parameter, first, start, count in self.segment_pieces(name):
            loaded = self._store.loaded_segments.get(parameter, {}).get(kind)
            if loaded is not None:
                part = loaded[first : first + count]
                write_saturated(self.tensors[name][start : start + count], part)
                part.zero_()
        for parameter in self.parameters:
            loaded = self._store.loaded_segments.get(parameter, {}).pop(kind, None)
            if loaded is not None:
                self._store.add_lost(parameter, kind, loaded, self.factors[name])


keep_old_method(BucketMemory, "shard", "segment")


# ---- a bucket that carries its hook's memory -----------------------------------------------------


class BucketWithMemory(GradBucket):
    """A bucket with its hook's memory, as hooks of the library get it. A copy has no memory.

    Args:
        parameters: the parameters of its gradients.
        memory: the hook's memory of the bucket; None for hooks that are not the library's.
        settings: the other arguments of :class:`torch_commhook.GradBucket`.
    """

    __slots__ = ()

    memory: BucketMemory | None

    def __init__(
        self, parameters: Sequence[Tensor], *, memory: BucketMemory | None = None, **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self.memory = memory

    @classmethod
    def over(cls, bucket: GradBucket, memory: BucketMemory) -> Self:
        """Make a bucket over another one, with its own memory: the same buffer, nothing copied."""
        settings = bucket._settings()
        return cls(bucket.parameters(), buffer=bucket.buffer(), memory=memory, **settings)

    def _class_of_copies(self) -> type[GradBucket]:
        return GradBucket


# ---- a bucket of whose sum each rank gets a shard ------------------------------------------------


class ShardedBucket(BucketWithMemory):
    """Gradients of sharded parameters, which a reduce-scatter is to sum over the ranks.

    Its buffer has equally many elements for each rank, in rank order: that rank's shard of each
    parameter, one after another, with padding if a parameter's rows do not divide evenly.

    Args:
        parameters: for each rank and parameter a placeholder with the shard's shape. Its values are
            meaningless.
        memory: the hook's memory of the bucket.
        shard: memory for this rank's share of the sum, ``numel() // ranks`` elements. Written.
        scale: the factor of the sum.
        op: the same as an operation of the process group.
        settings: the other arguments of :class:`torch_commhook.GradBucket`.
    """

    __slots__ = ("op", "scale", "shard")

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        memory: BucketMemory | None,
        shard: Tensor,
        scale: float,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        **settings: Any,
    ) -> None:
        super().__init__(parameters, memory=memory, **settings)
        self.shard = shard
        self.scale = scale
        self.op = op
