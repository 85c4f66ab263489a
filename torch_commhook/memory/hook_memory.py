"""What a hook remembers between steps: by parameter, whatever bucket each of them is in.

Hooks work on buckets, which are formed anew after a model's first step, and may be others when
training goes on from a checkpoint. So memory lies in tensors for each bucket, of which each
parameter's piece is known; a new bucket begins with the pieces of its parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.collectives.gloo_groups import group_name
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.plain import all_reduce
from torch_commhook.memory.jump_watch import JumpWatch
from torch_commhook.memory.states import ERROR, FOLDED_INTO, VERSION, Known, checked_state
from torch_commhook.metrics import CallMeter


class BucketMemory:
    """What a hook remembers of one bucket, or of some parameters of one.

    A hook asks for what it needs in :meth:`torch_commhook.hooks.Hook.prepare`, outside of
    compilers, and finds it in ``tensors`` and ``lists`` then.

    Attributes:
        tensors: flat, by name; float32, but for what a hook has packed.
        lists: a tensor or None for each parameter, by name.
        plans: what a hook has worked out from the layout, as text, by name.
        roundings: what :meth:`random` has made, by what it was asked for.
        with_error: whether hooks are to remember what they lose.
        parts: memories of some of the parameters each, by name.
        places: for such a part, the numbers of its parameters in the whole.
        buffers: for messages.
        meter: of what messages cost.
        past: whether so many steps have been done, for each number that was asked for.
        factors: of what :meth:`shard` has made.
        folded: what :meth:`fold` need not be called for again, by a name of the caller's.
        choices: numbers that were settled for the bucket, by name; see :meth:`choose`.
    """

    def __init__(
        self,
        owner: HookMemory,
        parameters: Sequence[Tensor],
        index: int,
        *,
        with_error: bool = False,
    ) -> None:
        self._owner = owner
        # One hook may serve several models, and keeps none of them.
        self._parameters = [TensorWeakRef(parameter) for parameter in parameters]
        self.layout = BucketLayout(parameters)
        self.index = index
        self.numel = self.layout.numel
        self.device = parameters[0].device
        self.dtype = parameters[0].dtype
        self.rank = owner.rank
        self.world_size = owner.world_size
        self.with_error = with_error
        self.tensors: dict[str, Tensor] = {}
        self.lists: dict[str, list[Tensor | None]] = {}
        self.plans: dict[str, str] = {}
        self.roundings: dict[str, Tensor] = {}
        self.parts: dict[str, BucketMemory] = {}
        self.buffers = MessageBuffers()
        self.meter = CallMeter()
        self.past = owner.past
        self.choices: dict[str, int] = {}
        self.places: list[int] = []
        self._shards: dict[str, tuple[str, tuple[int, int]]] = {}  # kind, first and last element
        self.factors: dict[str, int] = {}
        self.folded: set[str] = set()

    @property
    def parameters(self) -> list[Tensor]:
        """The bucket's parameters, as long as they live."""
        found = [reference() for reference in self._parameters]
        return [parameter for parameter in found if parameter is not None]

    @property
    def names(self) -> list[str] | None:
        """The parameters' names, where the model is known."""
        return self._owner.names_of(self.parameters)

    @property
    def steps(self) -> int:
        """Steps done."""
        return self._owner.steps

    def stand_in(self, group: Any) -> Any:
        """What a hook that was given a group communicates through instead."""
        return self._owner.stand_in(group)

    def flat(self, name: str) -> Tensor:
        """A number in float32 for each of the bucket's elements; zeros at first.

        Where a ``GradScaler`` changes its scale, ``"error"`` is multiplied accordingly.
        """
        flat = self.tensors.get(name)
        if flat is None:
            flat = self.tensors[name] = torch.zeros(
                self.numel, dtype=torch.float32, device=self.device
            )
            for parameter, piece in zip(self.parameters, self.layout.views(flat), strict=True):
                self._owner.adopt(parameter, name, piece)
        return flat

    def shard(self, kind: str, begin: int, end: int, factor: int) -> str:
        """A number in float32 for each of the elements ``[begin, end)``; zeros at first.

        When another rank has these, they go into ``flat("error")``, ``factor`` times: as many ranks
        as the mean is over of which this is an error.

        Returns:
            The name that it has in ``tensors``: one for each place of a kind.
        """
        place = begin, end
        for name, (known, where) in self._shards.items():
            if known == kind and where == place:
                return name
        others = sum(known == kind for known, _ in self._shards.values())
        name = f"{kind} {others + 1}" if others else kind
        self.tensors[name] = torch.zeros(end - begin, dtype=torch.float32, device=self.device)
        self._shards[name] = kind, place
        self.factors[name] = factor
        self._owner.adopt_shard(self, name, kind)
        return name

    def fold(self, names: Sequence[str]) -> None:
        """Put what shards remember into ``flat("error")``, and zeros in their place."""
        for name in names:
            kind, (begin, end) = self._shards[name]
            shard = self.tensors[name]
            _add_finite(self.tensors[FOLDED_INTO[kind]][begin:end], shard, self.factors[name])
            shard.zero_()

    def fold_all(self) -> None:
        """:meth:`fold` for all shards, of its parts too."""
        self.fold(list(self._shards))
        for part in self.parts.values():
            part.fold_all()

    def place_of_error(self, number: int) -> tuple[Tensor, int] | None:
        """What is remembered as lost of a parameter: a flat tensor, and where it begins there.

        None where nothing is.
        """
        error = self.tensors.get("error")
        if error is not None:
            return error, self.layout.offsets[number]
        for part in self.parts.values():
            if number in part.places:
                return part.place_of_error(part.places.index(number))
        return None

    def per_parameter(
        self, name: str, make: Callable[[int, Tensor], Tensor | None]
    ) -> list[Tensor | None]:
        """A tensor for each parameter: what it had before, or ``make(number, parameter)``.

        The same on all ranks.
        """
        found = self.lists.get(name)
        if found is None:
            found = self.lists[name] = [
                self._owner.adopt_shared(parameter, name, partial(make, i, parameter))
                for i, parameter in enumerate(self.parameters)
            ]
        return found

    def packed(
        self,
        name: str,
        numbers: Sequence[int],
        make: Callable[[int, Tensor, Tensor | None], Tensor],
        *,
        key: str,
    ) -> Tensor:
        """:meth:`per_parameter` in one flat tensor, of which each parameter's is a view.

        Args:
            name: of what is remembered.
            numbers: of the parameters, in the order that they have in the tensor.
            make: called with number, parameter, and what it had before, if anything; gives a dense
                tensor, whose contents, shape and strides are then those of the view. All of one
                dtype.
            key: of the flat tensor in ``tensors``.
        """
        flat = self.tensors.get(key)
        if flat is None:
            everybody = self.parameters
            parameters = [everybody[i] for i in numbers]
            made = [
                make(i, parameter, self._owner.shared(parameter, name))
                for i, parameter in zip(numbers, parameters, strict=True)
            ]
            layout = BucketLayout(made)
            flat = self.tensors[key] = layout.flatten(made)
            for parameter, view in zip(parameters, layout.views(flat), strict=True):
                self._owner.replace_shared(parameter, name, view)
        return flat

    def random(self, seed: int, *, alike: bool = False) -> Tensor:
        """Seeds and steps, for codecs that draw random numbers.

        Args:
            seed: of the hook.
            alike: the same for what each rank encodes.

        Returns:
            int64, of shape (2, 2): rows of seed and step, for what this rank encodes and for what
            it encodes of the ranks' sum.
        """
        seed = operator.index(seed)  # of which a compiler of dynamic shapes would make a variable
        name = f"{seed}, alike" if alike else f"{seed}"
        rounding = self.roundings.get(name)
        if rounding is None:
            rank = 0 if alike else self.rank + 1
            step = self._owner.steps
            seeds = _mixed(seed, self.index, rank), _mixed(seed, self.index, -1 - self.rank)
            rows = [[seed, step] for seed in seeds]
            with torch.inference_mode(False):
                rounding = torch.tensor(rows, dtype=torch.int64, device=self.device)
            self.roundings[name] = rounding
        return rounding

    def part(self, name: str, numbers: Sequence[int]) -> BucketMemory:
        """A memory of some of the parameters, by their numbers."""
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
        return part

    def watch(self, step: int) -> None:
        """Have ``past[step]`` tell whether so many steps have been done."""
        self.past[step] = self._owner.steps >= step

    def choose(self, name: str, value: int) -> None:
        """Settle a number for the bucket, on all ranks alike."""
        self.choices[name] = value
        for parameter in self.parameters:
            self._owner.adopt_choice(parameter, name, value)

    def choice(self, name: str, default: int, *, among: Sequence[int]) -> int:
        """What was settled for the first of the parameters, before or elsewhere.

        Args:
            name: of what is settled.
            default: where nothing was.
            among: all that may be settled.
        """
        self._owner.choices[name] = tuple(among)
        if name not in self.choices:
            self.choose(name, self._owner.choice_of(self.parameters[0], name, default))
        return self.choices[name]

    def let_go(self, stand_ins: Mapping[int, Tensor]) -> None:
        """:meth:`HookMemory.let_go`, with what stands for each parameter, by its id."""
        self._parameters = [TensorWeakRef(stand_ins[id(p)]) for p in self.parameters]
        for part in self.parts.values():
            part.let_go(stand_ins)

    def belongs_to(self, owner: HookMemory) -> bool:
        """Whether this is part of a hook's memory."""
        return self._owner is owner

    # ---- for the owner ---------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing was asked for that changes from step to step."""
        return not (
            self.tensors
            or self.lists
            or self.roundings
            or self.choices
            or any(not part.is_empty for part in self.parts.values())
        )

    def meters(self) -> list[CallMeter]:
        """Its own, and those of its parts."""
        return [self.meter, *(meter for part in self.parts.values() for meter in part.meters())]

    def advance(self) -> None:
        """A step more."""
        for rounding in self.roundings.values():
            rounding[:, 1] += 1
        for part in self.parts.values():
            part.advance()

    def shard_pieces(self, name: str) -> list[tuple[Tensor, int, int, int]]:
        """Of each parameter that a shard has part in: itself, and what part.

        Returns:
            Parameter, first element of it, first element of the shard, and how many.
        """
        _, (begin, end) = self._shards[name]
        found = []
        offsets, lengths = self.layout.offsets, self.layout.lengths
        for parameter, offset, length in zip(self.parameters, offsets, lengths, strict=True):
            first, last = max(begin, offset), min(end, offset + length)
            if first < last:
                found.append((parameter, first - offset, first - begin, last - first))
        return found

    def dissolve(self) -> None:
        """Leave what is remembered to the parameters."""
        for name, (kind, _) in self._shards.items():
            shard = self.tensors[name]
            for parameter, first, start, count in self.shard_pieces(name):
                piece = self._owner.piece(parameter, FOLDED_INTO[kind])
                if piece is not None:
                    flat = _in_memory_order(piece, parameter)
                    lost = shard[start : start + count]
                    _add_finite(flat[first : first + count], lost, self.factors[name])
        self._shards.clear()
        for part in self.parts.values():
            part.dissolve()


class HookMemory:
    """What a hook remembers of all buckets of a model.

    Attributes:
        rank, world_size: of this process.
        steps: that have been done on all ranks.
        is_empty: whether the hook remembers nothing that changes from step to step.
        group: to communicate through, outside of a bucket's collectives.
        stand_ins: groups that are used instead of such as hooks were given, by the name of these.
        on_step: called after each step.
        is_begun: whether a bucket has been asked for, where nobody else tells of steps.
        past: see :class:`BucketMemory`.
        choices: by name, what may be settled for a bucket.
        scaler: scales the gradients, where one does.
        scale: what errors are multiplied by: the scaler's scale when they were written.
        loss_scale: the same as a tensor, where a scaler is followed.
        jump_watch: looks for a scale, where it matters and no scaler is known.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.steps = 0
        self.is_empty = True
        self.is_begun = False
        self.group: Any = None
        self.stand_ins: dict[str, Any] = {}
        self.on_step: Callable[[HookMemory], None] | None = None
        self.past: dict[int, bool] = {}
        self._names = WeakIdKeyDictionary()
        self._buckets = WeakIdKeyDictionary()  # by first parameter
        self._pieces = WeakIdKeyDictionary()  # by parameter: name to piece
        self._shared = WeakIdKeyDictionary()
        self._loaded_shards = WeakIdKeyDictionary()
        self._choices = WeakIdKeyDictionary()
        self.choices: dict[str, tuple[int, ...]] = {}
        self.scaler: Any = None
        self.scale = 1.0
        self.loss_scale: Tensor | None = None
        self.jump_watch: JumpWatch | None = None
        self._stand_ins: list[Tensor] = []  # for parameters that were let go

    def stand_in(self, group: Any) -> Any:
        """What is to be used instead of a group that a hook was given, or the group itself."""
        return self.stand_ins.get(group_name(group), group) if self.stand_ins else group

    def know(self, names: Sequence[tuple[str, Tensor]], *, rank: int, world_size: int) -> None:
        """Be told the parameters' names, and which of how many ranks this is."""
        for name, parameter in names:
            self._names[parameter] = name
        self.rank, self.world_size = rank, world_size

    def of_same_model(self) -> HookMemory:
        """An empty one, for another hook."""
        other = HookMemory()
        names = [(name, parameter) for parameter, name in self._names.items()]
        other.know(names, rank=self.rank, world_size=self.world_size)
        other.scaler = self.scaler
        return other

    def has_any(self, parameters: Sequence[Tensor]) -> bool:
        """Whether some of the parameters are the model's."""
        return any(parameter in self._names for parameter in parameters)

    def let_go(self) -> None:
        """Keep what is remembered, and no parameter: a weak reference is in swap_tensors' way.

        A tensor of one element, expanded, stands for each of them from here on.
        """
        stand_ins = {
            id(p): torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape)
            for p in self._names
        }
        for memory in self._buckets.values():
            memory.let_go(stand_ins)
        for table in ("_names", "_buckets", "_pieces", "_shared", "_loaded_shards", "_choices"):
            kept = WeakIdKeyDictionary()
            for parameter, value in getattr(self, table).items():
                kept[stand_ins[id(parameter)]] = value
            setattr(self, table, kept)
        self._stand_ins = list(stand_ins.values())

    # ---- buckets ---------------------------------------------------------------------------------

    def of(self, parameters: Sequence[Tensor], index: int, prepare: Any) -> BucketMemory:
        """The memory of a bucket; a new one where it has other parameters than before.

        Args:
            parameters: the bucket's.
            index: its number.
            prepare: called with a new one.
        """
        memory = self._buckets.get(parameters[0])
        if memory is not None:
            known = memory.parameters
            if len(known) == len(parameters) and all(map(operator.is_, known, parameters)):
                return memory
        with torch.inference_mode(False), torch.no_grad():
            wanted = {id(parameter) for parameter in parameters}
            for first, old in list(self._buckets.items()):
                if any(id(parameter) in wanted for parameter in old.parameters):
                    old.dissolve()
                    del self._buckets[first]
            memory = BucketMemory(self, parameters, index)
            prepare(memory)
            self._fold_what_is_left(parameters)
        self._buckets[parameters[0]] = memory
        self.is_empty = self.is_empty and memory.is_empty and not self.past
        return memory

    def buckets(self) -> list[BucketMemory]:
        """Those that there are, in order."""
        return sorted(self._buckets.values(), key=lambda memory: memory.index)

    def advance(self) -> None:
        """A step has been done on all ranks."""
        self.steps += 1
        for step in self.past:
            self.past[step] = self.steps >= step
        for memory in self._buckets.values():
            memory.advance()
        if self.on_step is not None:
            self.on_step(self)

    # ---- the gradients' scale --------------------------------------------------------------------

    def keep_scale_on(self, device: torch.device) -> None:
        """Have a tensor for the scale, before a compiler asks for it.

        Args:
            device: of the gradients.
        """
        with torch.inference_mode(False):
            self.loss_scale = torch.full((), self.scale, dtype=torch.float32, device=device)

    def common_scale(self, scale: float | None) -> float:
        """The scale of the ranks that have one. All ranks must call this."""
        own = [0.0, 0.0] if scale is None else [scale, 1.0]
        device = None if self.loss_scale is None else self.loss_scale.device
        summed = torch.tensor(own, dtype=torch.float64, device=device)
        total, count = all_reduce(summed, group=self.group).wait().tolist()
        return total / count

    @torch.no_grad()
    def take_scale(self, scale: float) -> None:
        """Bring what is remembered as lost into the units of gradients of this scale.

        Before the first bucket of a step, and outside of compiled code.
        """
        if scale == self.scale:
            return
        factor = scale / self.scale
        errors = [pieces[ERROR] for pieces in self._pieces.values() if ERROR in pieces]
        for memory in self._leaves():
            errors += [memory.tensors[name] for name in memory._shards]
        for loaded in self._loaded_shards.values():
            errors += loaded.values()
        for error in errors:
            _multiply(error, factor)
        self._note_scale(scale)

    def _note_scale(self, scale: float) -> None:
        self.scale = scale
        if self.loss_scale is not None:
            self.loss_scale.fill_(scale)

    # ---- pieces ----------------------------------------------------------------------------------

    def names_of(self, parameters: Sequence[Tensor]) -> list[str] | None:
        """Their names, where all are known."""
        names = [self._names.get(parameter) for parameter in parameters]
        return None if any(name is None for name in names) else names

    def piece(self, parameter: Tensor, name: str) -> Tensor | None:
        """A parameter's piece of what has a name."""
        return self._pieces.get(parameter, {}).get(name)

    def adopt(self, parameter: Tensor, name: str, piece: Tensor) -> None:
        """Let ``piece`` be the parameter's from here on, with what it had before."""
        pieces = self._pieces.setdefault(parameter, {})
        before = pieces.get(name)
        if before is not None:
            piece.copy_(before)
        pieces[name] = piece

    def adopt_shared(
        self, parameter: Tensor, name: str, make: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """The parameter's own tensor of a name; made where there is none."""
        tensors = self._shared.setdefault(parameter, {})
        if name not in tensors:
            tensors[name] = make()
        return tensors[name]

    def shared(self, parameter: Tensor, name: str) -> Tensor | None:
        """The parameter's own tensor of a name, if there is one."""
        return self._shared.get(parameter, {}).get(name)

    def replace_shared(self, parameter: Tensor, name: str, tensor: Tensor) -> None:
        """Let ``tensor`` be the parameter's own of a name from here on."""
        self._shared.setdefault(parameter, {})[name] = tensor

    def adopt_choice(self, parameter: Tensor, name: str, value: int) -> None:
        """Keep a number that was settled."""
        self._choices.setdefault(parameter, {})[name] = value

    def choice_of(self, parameter: Tensor, name: str, default: int) -> int:
        """A number that was settled for a parameter's bucket."""
        return self._choices.get(parameter, {}).get(name, default)

    def adopt_shard(self, memory: BucketMemory, name: str, kind: str) -> None:
        """Put what was loaded into a shard that has been made, and the rest where it belongs."""
        for parameter, first, start, count in memory.shard_pieces(name):
            loaded = self._loaded_shards.get(parameter, {}).get(kind)
            if loaded is not None:
                part = loaded[first : first + count]
                memory.tensors[name][start : start + count] = part
                part.zero_()
        for parameter in memory.parameters:
            loaded = self._loaded_shards.get(parameter, {}).pop(kind, None)
            piece = self.piece(parameter, FOLDED_INTO[kind])
            if loaded is not None and piece is not None:
                flat = _in_memory_order(piece, parameter)
                _add_finite(flat, loaded, memory.factors[name])

    def _fold_what_is_left(self, parameters: Sequence[Tensor]) -> None:
        """Put what was loaded of shards where it belongs, where the hook has no such shards."""
        for parameter in parameters:
            for kind, loaded in self._loaded_shards.pop(parameter, {}).items():
                piece = self.piece(parameter, FOLDED_INTO[kind])
                if piece is not None:
                    factor = 1 if kind == "node_error" else self.world_size
                    _add_finite(_in_memory_order(piece, parameter), loaded, factor)

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything as tensors and plain values, by the parameters' names."""
        own: dict[str, dict[str, Tensor]] = {}
        shared: dict[str, dict[str, Tensor]] = {}
        for parameter, pieces in self._pieces.items():
            for name, piece in pieces.items():
                own.setdefault(name, {})[self._names[parameter]] = piece.detach().clone()
        for parameter, tensors in self._shared.items():
            for name, tensor in tensors.items():
                if tensor is not None:
                    shared.setdefault(name, {})[self._names[parameter]] = tensor.detach().clone()
        for memory in self._leaves():
            for name, (kind, _) in memory._shards.items():
                # Of all parameters, so that what a state has does not depend on the buckets.
                whole = own.setdefault(kind, {})
                for parameter in memory.parameters:
                    if self._names[parameter] not in whole:
                        flat = torch.zeros(
                            parameter.numel(), dtype=torch.float32, device=parameter.device
                        )
                        whole[self._names[parameter]] = flat
                for parameter, first, start, count in memory.shard_pieces(name):
                    flat = whole[self._names[parameter]]
                    flat[first : first + count] += memory.tensors[name][start : start + count]
        for kind, tensors in own.items():
            if kind == ERROR or kind in FOLDED_INTO:
                for tensor in tensors.values():
                    _multiply(tensor, 1.0 / self.scale)
        choices: dict[str, dict[str, int]] = {}
        for parameter, numbers in self._choices.items():
            for name, number in numbers.items():
                choices.setdefault(name, {})[self._names[parameter]] = number
        return {
            "version": VERSION,
            "steps": self.steps,
            "world_size": self.world_size,
            "buckets": [memory.names for memory in self.buckets()],
            "choices": choices,
            "shared": shared,
            f"rank{self.rank}": own,
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """A :meth:`state_dict` that is to be loaded, as :meth:`take_state` takes it.

        Raises:
            ValueError: it is none, of another number of ranks, of parameters that are not here or
                have other shapes, or of a hook that remembers other things.
        """
        by_name = {name: parameter for parameter, name in self._names.items()}
        own = {kind for pieces in self._pieces.values() for kind in pieces}
        shards = {kind for memory in self._leaves() for kind, _ in memory._shards.values()}
        shared: dict[str, dict[str, Tensor]] = {}
        for parameter, tensors in self._shared.items():
            for kind, tensor in tensors.items():
                if tensor is not None:
                    shared.setdefault(kind, {})[self._names[parameter]] = tensor
        known = Known(own, shards, shared, self.choices)
        return checked_state(state, by_name, known, rank=self.rank, world_size=self.world_size)

    def take_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`check_state` has given. Buckets are to be asked for anew."""
        own = state[f"rank{self.rank}"]
        by_name = {name: parameter for parameter, name in self._names.items()}
        self._buckets = WeakIdKeyDictionary()
        self._pieces = WeakIdKeyDictionary()
        self._shared = WeakIdKeyDictionary()
        self._loaded_shards = WeakIdKeyDictionary()
        self._choices = WeakIdKeyDictionary()
        for kind, numbers in state["choices"].items():
            for name, number in numbers.items():
                self.adopt_choice(by_name[name], kind, number)
        self.steps = state["steps"]
        self._note_scale(1.0)  # a state is of gradients that are not scaled
        for step in self.past:
            self.past[step] = self.steps >= step
        for kind, tensors in own.items():
            table = self._loaded_shards if kind in FOLDED_INTO else self._pieces
            for name, tensor in tensors.items():
                parameter = by_name[name]
                copied = tensor.detach().to(parameter.device, torch.float32, copy=True)
                table.setdefault(parameter, {})[kind] = copied
        for kind, tensors in state["shared"].items():
            for name, tensor in tensors.items():
                parameter = by_name[name]
                copied = tensor.detach().to(parameter.device, copy=True)
                self._shared.setdefault(parameter, {})[kind] = copied

    def _leaves(self) -> list[BucketMemory]:
        found: list[BucketMemory] = []
        waiting = list(self._buckets.values())
        while waiting:
            memory = waiting.pop()
            found.append(memory)
            waiting.extend(memory.parts.values())
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> HookMemory:
        return HookMemory()  # a copy of a hook remembers nothing: its parameters are others

    def __reduce__(self) -> tuple[type[HookMemory], tuple[()]]:
        return HookMemory, ()


def _multiply(error: Tensor, factor: float) -> None:
    """Multiply what is remembered as lost, which stays finite."""
    if factor != 1.0:
        most = torch.finfo(error.dtype).max
        error.mul_(min(factor, most)).clamp_(-most, most)


def _in_memory_order(piece: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's piece as a flat view, in the order of a bucket."""
    return BucketLayout([parameter])._permute([piece])[0].view(-1)


def _add_finite(errors: Tensor, lost: Tensor, factor: int) -> None:
    """Add ``factor * lost`` to errors in place; an overflow becomes the largest number."""
    limits = torch.finfo(errors.dtype)
    errors.add_(lost, alpha=factor).clamp_(limits.min, limits.max)


def _mixed(*numbers: int) -> int:
    """Numbers that are alike into one, of 63 bits, that is not (splitmix64)."""
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + (number & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
