"""A hook's memory: what it keeps from step to step.

A hook requests its memory in ``Hook.prepare``, when buckets are formed. In ``average`` it finds the
memory by name. It is flat for each bucket, and each parameter has a view of it. Buckets are rebuilt
after a model's first step, and may differ when training resumes from a checkpoint: a bucket that is
formed anew copies its parameters' views. When a segment moves to another rank, its old owner adds
the segment's error, times the world size, to its own error memory. The library counts a step when
all ranks have agreed on it.

Errors are in units of the scale that a ``GradScaler`` had when they were written. If the scale
changes, the hook multiplies its errors before the first bucket of a step, in eager mode when a
backward begins. Compiled code takes errors as inputs, so they must be right before it runs. In each
backward, already compiled or not, compiled autograd asks the hooks of each parameter for their
arguments. Our hook multiplies the errors at that moment
(``csrc/runtime/reducer/parameter_hooks.cpp``).

The contents of a state depend only on the hook, the model and the rank: the memory of a part is
saved for all of a parameter's elements. On DDP, memory is made for the buckets that DDP may form,
so that it exists before the first backward. Ranks compare the states that they load, and load all
or none.

If no rank uses a parameter in a step, its gradient stays as it is, but messages may hold earlier
errors of it. All ranks then add the result to their memory of this parameter (``unsent.py``): each
rank has a share of a mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_commhook.collectives.futures import is_capturing
from torch_commhook.collectives.plain import all_reduce
from torch_commhook.memory.bucket_memory import BucketMemory, ModelMemory
from torch_commhook.memory.sharded_states import part_key
from torch_commhook.memory.states import (
    ERROR,
    FOLDED_INTO,
    VERSION,
    Remembered,
    checked_state,
    multiply_error,
)
from torch_commhook.memory.watches import ScaleJumpDetector, Scaler

# ---- a hook's memory between steps, by parameter, independent of buckets -------------------------


class HookMemory(ModelMemory):
    """A hook's memory of all buckets of a model.

    Attributes:
        part: this rank's position in tensor parallelism, and the number of positions.
        any_rank_loads: whether any rank, of any number of ranks, can load a state.
        is_empty: whether the hook remembers nothing that changes from step to step.
        group: the group for communication outside a bucket's collectives.
        on_step: called after each step.
        before_change: called before buckets' memory is replaced; no running collective may then
            write to it.
        has_begun: whether a bucket was requested, if nothing else counts steps.
        notes: what the hook knows of the model on this rank, by a name; not a part of states.
        scaler: the scaler of the gradients, or None.
        scale: the factor in the errors: the scaler's scale when they were written.
        loss_scale: the same as a tensor, if a scaler is followed.
        jump_detector: detects a scale, if it matters and no scaler is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._averaged = 1
        self.part = 0, 1
        self.any_rank_loads = False
        self.is_empty = True
        self.has_begun = False
        self.group: dist.ProcessGroup | None = None
        self.on_step: Callable[[HookMemory], None] | None = None
        self.before_change: Callable[[], None] | None = None
        self.notes: dict[str, Any] = {}
        # By first parameter.
        self._buckets: MutableMapping[Tensor, BucketMemory] = WeakIdKeyDictionary()
        self.scaler: Scaler | None = None
        self.scale = 1.0
        self.loss_scale: Tensor | None = None
        self.jump_detector: ScaleJumpDetector | None = None
        self._prepare: Callable[[BucketMemory], None] | None = None

    def set_parameters(
        self, named: Sequence[tuple[str, Tensor]], *, rank: int, world_size: int
    ) -> None:
        """Set the model's parameters with their names, this rank and the number of ranks."""
        self.store.add_names(named)
        self.rank, self.world_size = rank, world_size
        self._averaged = world_size

    def new_for_same_model(self) -> HookMemory:
        """Return an empty memory for another hook."""
        other = type(self)()
        named = self.store.named_parameters()
        other.set_parameters(named, rank=self.rank, world_size=self.world_size)
        other.scaler = self.scaler
        other.any_rank_loads, other.part = self.any_rank_loads, self.part
        return other

    def names_of(self, parameters: Sequence[Tensor]) -> list[str] | None:
        """The parameters' names, where all are known."""
        return self.store.names_of(parameters)

    def release_parameters(self) -> None:
        """Keep the memory, and release all parameters: see :class:`ParameterStore`."""
        placeholders = self.store.release_parameters()
        kept: MutableMapping[Tensor, BucketMemory] = WeakIdKeyDictionary()
        for first, memory in self._buckets.items():
            memory.replace_parameters(placeholders)
            kept[placeholders[id(first)]] = memory
        self._buckets = kept

    def replace_parameter(self, before: Tensor, now: Tensor) -> None:
        """Replace a parameter by another tensor of the same shape. Its buckets are rebuilt."""
        self._replace_buckets_of([before])
        self.store.replace_parameter(before, now)

    def change_ranks(self, rank: int, world_size: int, *, averaged: int) -> None:
        """Continue among other ranks. The mean of all ranks' unsent errors stays the same.

        The contents of segments are this rank's to send. Buckets must be requested again.

        Args:
            rank: this process's new rank.
            world_size: the new number of ranks.
            averaged: the number of ranks with gradients of their own. The mean is over these; the
                others' unsent errors count too.
        """
        self._return_memory(list(self._buckets.items()))
        # The mean is over other ranks: as in reshard_states.
        self.store.rescale_errors(averaged / self._averaged)
        self.rank, self.world_size, self._averaged = rank, world_size, averaged

    def unsent_errors(self) -> list[Tensor]:
        """This rank's errors of each parameter, with those in its segments, in the model's order.

        Buckets must be requested again.
        """
        self._return_memory(list(self._buckets.items()))
        pieces = (self.store.pieces.get(each, {}) for _, each in self.store.named_parameters())
        return [piece[ERROR] for piece in pieces if ERROR in piece]

    def changing_tensors(self) -> list[Tensor]:
        """All tensors of the present buckets that a step changes."""
        found: list[Tensor] = []
        for memory in self._memories_and_parts():
            found += memory.changing_tensors()
        return found

    def _replace_buckets_of(self, parameters: Sequence[Tensor]) -> None:
        """Return the memory of all buckets that have some of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        replaced = [
            (first, memory)
            for first, memory in self._buckets.items()
            if any(id(parameter) in wanted for parameter in memory.parameters)
        ]
        if replaced:
            self._return_memory(replaced)

    def _return_memory(self, replaced: Sequence[tuple[Tensor, BucketMemory]]) -> None:
        """Return the memory of buckets, by their first parameters, to all their parameters."""
        self.replays.memory_replaced([memory for _, memory in replaced])
        if self.before_change is not None:
            self.before_change()
        for first, memory in replaced:
            memory.return_segments()
            del self._buckets[first]

    # ---- buckets ---------------------------------------------------------------------------------

    def memory_of_bucket(
        self, parameters: Sequence[Tensor], index: int, prepare: Callable[[BucketMemory], None]
    ) -> BucketMemory:
        """The memory of a bucket; a new one if the bucket has other parameters than before.

        Calls ``prepare`` with a new memory.

        Raises:
            RuntimeError: there is none, and a CUDA graph captures the current stream.
        """
        memory = self._buckets.get(parameters[0])
        if memory is not None:
            known = memory.parameters
            if len(known) == len(parameters) and all(map(operator.is_, known, parameters)):
                return memory
        if is_capturing(parameters[0].device):
            raise RuntimeError(
                "torch_commhook: a CUDA graph cannot capture a hook's first step, or the first "
                "since its buckets have changed; run a few steps before the capture"
            )
        self._prepare = prepare
        with torch.inference_mode(False), torch.no_grad():
            self._replace_buckets_of(parameters)
            self.replays.prepare(parameters[0].device)
            memory = self._new_bucket_memory(parameters, index)
            prepare(memory)
            self.store.add_loaded_segments_to_errors(parameters, self.world_size)
        self._buckets[parameters[0]] = memory
        self.is_empty = self.is_empty and memory.is_empty and not self.past
        return memory

    def _new_bucket_memory(self, parameters: Sequence[Tensor], index: int) -> BucketMemory:
        return BucketMemory(self, parameters, index)

    def bucket_memories(self) -> list[BucketMemory]:
        """The memories of the present buckets, in order."""
        return sorted(self._buckets.values(), key=lambda memory: memory.index)

    def count_step(self) -> None:
        """Count a step done on all ranks; during capture, count each of its replays."""
        for memory in self._buckets.values():
            memory.count_step()
        if self.replays.is_capturing:
            self.replays.capture()
            return  # choices by numbers of steps cannot change in a graph
        self._seen_steps += 1
        self._update_past()
        if self.on_step is not None:
            self.on_step(self)

    def _update_past(self) -> None:
        if not all(self.past.values()):  # otherwise there is no need to wait for the device
            steps = self.steps
            for step in self.past:
                self.past[step] = steps >= step

    # ---- the gradients' scale --------------------------------------------------------------------

    def make_loss_scale(self, device: torch.device) -> None:
        """Create the tensor of the scale on the gradients' device, before a compiler needs it."""
        with torch.inference_mode(False):
            self.loss_scale = torch.full((), self.scale, dtype=torch.float32, device=device)

    def agree_on_scale(self, scale: float | None) -> float:
        """Return the scale of the ranks that have one. All ranks must call this."""
        own = [0.0, 0.0] if scale is None else [scale, 1.0]
        device = None if self.loss_scale is None else self.loss_scale.device
        summed = torch.tensor(own, dtype=torch.float64, device=device)
        sums: list[float] = all_reduce(summed, group=self.group).wait().tolist()
        total, count = sums
        return total / count

    @torch.no_grad()
    def change_scale(self, scale: float) -> None:
        """Convert errors to the units of gradients with this scale.

        Call it before the first bucket of a step, and outside compiled code.
        """
        if scale == self.scale:
            return
        factor = scale / self.scale
        self.store.rescale_errors(factor)
        for memory in self._memories_and_parts():
            for name in memory.segments:
                multiply_error(memory.tensors[name], factor)
        self._set_scale(scale)

    def _set_scale(self, scale: float) -> None:
        self.scale = scale
        if self.loss_scale is not None:
            self.loss_scale.fill_(scale)

    # ---- state -----------------------------------------------------------------------------------

    @property
    def error_bytes(self) -> int:
        """The number of bytes of errors in the present buckets."""
        found = [memory.tensors.get(ERROR) for memory in self._memories_and_parts()]
        return sum(error.nbytes for error in found if error is not None)

    @property
    def remembers_nothing(self) -> bool:
        """Whether a state would be empty."""
        return self.is_empty

    @property
    def state_rank(self) -> tuple[int, int]:
        """This process's number among those with states of one training, and their number."""
        return (0, 1) if self.any_rank_loads else (self.rank, self.world_size)

    @property
    def rank_key(self) -> str:
        """The key of this process's own tensors in a state of one part of a model."""
        return f"rank{self.state_rank[0]}"

    @property
    def own_key(self) -> str:
        """The key of this process's own tensors in a state."""
        return part_key(self.rank_key, self.part)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values, by parameter name."""
        own, shared = (
            {
                kind: {name: tensor.detach().clone() for name, tensor in tensors.items()}
                for kind, tensors in self.store.by_name(table).items()
            }
            for table in (self.store.pieces, self.store.shared)
        )
        name_of = {id(parameter): name for name, parameter in self.store.named_parameters()}
        for memory in self._memories_and_parts():
            memory.add_segments_to(own, name_of)
        for kind, tensors in own.items():
            if kind == ERROR or kind in FOLDED_INTO:
                for tensor in tensors.values():
                    multiply_error(tensor, 1.0 / self.scale)
        return {
            "version": VERSION,
            "steps": self.steps,
            "world_size": self.state_rank[1],
            "buckets": [memory.names for memory in self.bucket_memories()],
            "choices": self.store.by_name(self.store.choices),
            "shared": shared,
            self.rank_key: own,
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """Check a :meth:`state_dict` for :meth:`load_state`.

        Raises:
            ValueError: it is not a state, or belongs to another number of ranks, to other
                parameters or shapes, or to a hook with another memory.
        """
        by_name = dict(self.store.named_parameters())
        rank, ranks = self.state_rank
        remembered = self._with_choices_of(state)._remembered()
        return checked_state(state, by_name, remembered, rank=rank, world_size=ranks)

    def _remembered(self) -> Remembered:
        return Remembered(
            own=self.store.kinds_of_pieces(),
            segments={
                kind
                for memory in self._memories_and_parts()
                for kind, _ in memory.segments.values()
            },
            shared=self.store.by_name(self.store.shared),
            choices=self.store.allowed_choices,
        )

    def _with_choices_of(self, state: Any) -> HookMemory:
        """An empty memory of the hook with the choices of an unchecked state.

        This memory itself if no choice decides what the hook remembers.
        """
        deciding, choices = self.store.deciding_choices, None
        if deciding and isinstance(state, dict):
            choices = state.get("choices")
        if not isinstance(choices, dict) or self._prepare is None:
            return self
        other = self.new_for_same_model()
        by_name = dict(self.store.named_parameters())
        for kind in deciding:
            numbers = choices.get(kind)
            for name, number in numbers.items() if isinstance(numbers, dict) else ():
                is_known = type(name) is str and name in by_name and type(number) is int
                if is_known and number in self.store.allowed_choices[kind]:
                    other.store.choices.setdefault(by_name[name], {})[kind] = number
        for memory in self.bucket_memories():
            other.memory_of_bucket(memory.parameters, memory.index, self._prepare)
        return other

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`check_state`. Buckets must be requested again."""
        self.replays.memory_loaded(self.bucket_memories())
        self._buckets = WeakIdKeyDictionary()
        self._seen_steps = state["steps"] - self.replays.count()
        self._set_scale(1.0)  # a state belongs to unscaled gradients
        for step in self.past:
            self.past[step] = state["steps"] >= step
        self.store.load_state(state[self.rank_key], state["shared"], state["choices"])

    def _memories_and_parts(self) -> list[BucketMemory]:
        """The memories of all buckets, and of their parts."""
        return [each for memory in self._buckets.values() for each in memory.with_parts()]

    def __deepcopy__(self, memo: dict[int, Any]) -> HookMemory:
        return HookMemory()  # a copied hook has no memory: its parameters differ

    def __reduce__(self) -> tuple[type[HookMemory], tuple[()]]:
        return HookMemory, ()


# ---- copies of a hook's memory, for a step that ranks may have to repeat -------------------------


class KeptMemory:
    """Copies of a hook's memory. Its errors are in the units of gradients with this ``scale``."""

    def __init__(self, memory: HookMemory) -> None:
        self.scale = memory.scale
        with torch.inference_mode(False), torch.no_grad():
            self._copies: list[tuple[Tensor, Tensor]] = [
                (tensor, tensor.clone()) for tensor in memory.changing_tensors()
            ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the memory."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
