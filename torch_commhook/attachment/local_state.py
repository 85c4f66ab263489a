"""What local steps keep besides the hook's memory: anchors, rounds, what ranks share of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_commhook import collectives
from torch_commhook.hooks.local_sgd import local_sgd, precise
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.states import (
    LOCAL_STEPS,
    MEANS,
    PARAMETERS,
    check_tensor,
    checked_position,
    load_error,
    shown,
)
from torch_commhook.step.step_group import StepGroup

# ---- gives all ranks the same anchors after users have written to parameters ---------------------


#: The bytes of a digest.
_BYTES = 16


def agree_on_anchors(
    hook: local_sgd,
    memories: Sequence[BucketMemory],
    before: Mapping[int, Sequence[Tensor]],
    group: StepGroup,
    *,
    waits: bool,
) -> None:
    """Give all ranks the same anchor of each parameter. All ranks must call this.

    If a user has written the same values on all ranks, this is a load: the anchor has these values.
    If the values differ, the write is training: the anchor is that from before the write.

    Args:
        hook: the hook that keeps the ranks apart.
        memories: the hook's memory of each bucket.
        before: by the ids of the parameters that a user of this rank has written, what
            :meth:`local_sgd.anchor_and_error` had before. Empty for a parameter whose anchor other
            ranks may not have.
        group: the group of the ranks.
        waits: whether anchors may differ. Otherwise this rank only sends its flag: ranks that
            disagree on this still send the same messages.
    """
    parameters = [parameter for memory in memories for parameter in memory.parameters]
    device = parameters[0].device
    communicates = group.group_for(device)
    has_written = torch.tensor([float(bool(before))], dtype=torch.float32, device=device)
    any_has = collectives.all_reduce(has_written, group=communicates)
    if not waits or not any_has.wait().item():
        return
    rows = [
        [float(bool(before.get(id(each)))) for each in parameters],
        [float(id(each) in before) for each in parameters],
    ]
    sums = collectives.all_reduce(
        torch.tensor(rows, dtype=torch.float32, device=device), group=communicates
    ).wait()
    is_written, is_open = (sums != 0).tolist()
    numbers = [number for number, flag in enumerate(is_open) if flag]
    places: list[list[Any]] = []  # the value at the round's start, the anchor and its error
    for memory in memories:
        kept = hook.anchor_and_error(memory)
        for parameter, start in zip(memory.parameters, hook.starts(memory), strict=True):
            places.append([start, *kept[id(parameter)]])

    def differing(numbers: Sequence[int], value: Callable[[int], Tensor]) -> list[int]:
        if not numbers:
            return []
        own = b"".join(map(_digest, map(value, numbers)))
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).view(len(numbers), _BYTES)
        every = collectives.all_gather(sent.to(device), group=communicates).wait()
        is_other = (every != every[0]).any(dim=2).any(dim=0)
        return [number for number, other in zip(numbers, is_other.tolist(), strict=True) if other]

    written = [number for number in numbers if is_written[number]]
    trained = set(differing(written, lambda number: places[number][0]))
    for number in written:
        start, anchor, *errors = places[number]
        if number not in trained:
            anchor.copy_(start)
            for error in errors:
                error.zero_()
        elif old := before.get(id(parameters[number])):
            torch._foreach_copy_([anchor, *errors], list(old))
    for number in differing(numbers, lambda number: places[number][1]):
        # A rank that continues from a state, or a new rank, does not have the old anchor.
        anchor = places[number][1]
        first = anchor.clone(memory_format=torch.contiguous_format)
        sender = group.group_for(anchor.device)
        anchor.copy_(collectives.broadcast(first, group=sender).wait())


def _digest(tensor: Tensor) -> bytes:
    """A digest of a tensor's elements in order, whatever its strides and device."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=_BYTES).digest()


# ---- the schedule in which a model's fragments are exchanged -------------------------------------


@dataclass
class Round:
    """The position in a round of ``H`` steps, in which each fragment is exchanged once.

    A fragment's turn comes ``H / fragments`` steps after the previous one. The last turn ends the
    round. A failed turn is repeated after the next step. Later turns keep their steps, but wait
    while an exchange is running. The next round is late if the last turn is late.

    Attributes:
        H: the number of steps in a round.
        fragments: the number of fragments.
        turn: the fragment that is exchanged next.
        steps: the number of steps since the last fragment's exchange began.
    """

    H: int
    fragments: int
    turn: int = 0
    steps: int = 0

    @property
    def is_due(self) -> bool:
        return self.steps >= (self.turn + 1) * self.H // self.fragments

    def next_turn(self) -> None:
        """Note that an exchange has begun, or has run at once."""
        self.turn += 1
        if self.turn == self.fragments:
            self.turn = self.steps = 0

    def at(self, turn: int, steps: int) -> Round:
        """Another position in a round; also that of an exchange that has failed.

        Args:
            turn: the fragment.
            steps: the number of steps since the beginning of the fragment's round.
        """
        return Round(self.H, self.fragments, turn, steps)

    @property
    def fragment_before(self) -> int:
        """The fragment of the last turn."""
        return (self.turn - 1) % self.fragments

    def began_at(self, steps_ago: int) -> int:
        """The number of steps in its round after which the last turn began, if known."""
        return self.H if self.turn == 0 else self.steps - steps_ago

    def position(self, in_flight: int) -> dict[str, Any]:
        """The position in the form of a state; ``in_flight`` is -1 if no exchange is running."""
        return {
            "steps_of_round": self.steps,
            "fragments": self.fragments,
            "fragment": self.turn,
            "steps_in_flight": in_flight,
        }


# ---- the parts of a local-steps state that are not in the hook's memory --------------------------


class CheckedState(NamedTuple):
    """A checked state that is to be loaded.

    Attributes:
        parameters: this rank's parameters, and their new values.
        position: the position in a round.
        rest: the hook's memory.
        means: the mean distances of a running exchange, by parameter name; None if none is running.
    """

    parameters: list[tuple[Tensor, Tensor]]
    position: dict[str, Any]
    rest: dict[str, Any]
    means: dict[str, Tensor] | None = None


def split_state(
    state: Any, hook_name: str, own_key: str, by_name: Mapping[str, Tensor]
) -> CheckedState:
    """Split a state into this rank's parameters, the position in the round, and the rest.

    Does not check the rest.

    Args:
        state: the state to load.
        hook_name: the hook's name, for errors.
        own_key: the state's key for this rank's tensors.
        by_name: the parameters, as the hook's memory has them.

    Raises:
        ValueError: the state lacks a part, or its parameters have other names or shapes.
    """
    if not isinstance(state, dict) or LOCAL_STEPS not in state:
        raise load_error(
            f"the state must be one of a hook that keeps ranks apart, such as '{hook_name}', got "
            f"one without '{LOCAL_STEPS}'"
        )
    position = checked_position(state, "its ", load_error)
    rest = {key: value for key, value in state.items() if key != LOCAL_STEPS}
    pieces = state.get(own_key)
    if not isinstance(pieces, dict):  # the memory's check raises an error
        return CheckedState([], position, rest)
    kinds = [kind for kind in pieces if kind not in (PARAMETERS, MEANS)]
    rest[own_key] = {kind: pieces[kind] for kind in kinds}
    values = pieces.get(PARAMETERS, {})
    is_apart = position["done"] > 0 or position["is_open"]
    if not isinstance(values, dict) or (not values and is_apart):
        got = "none" if isinstance(values, dict) else shown(values)
        raise load_error(f"its '{PARAMETERS}' must have the rank's parameters, by name, got {got}")
    own = []
    for name, parameter in by_name.items() if values else ():
        # Infinite and NaN values pass: training may have diverged.
        own.append((parameter, _checked(values, PARAMETERS, name, parameter, parameter.dtype)))
    return CheckedState(own, position, rest)


def check_fragment(position: Mapping[str, Any], hook: local_sgd) -> None:
    """Refuse a position that a hook with other fragments cannot continue from.

    Raises:
        ValueError: an exchange was running, and its fragment has other parameters in this hook; or
            this hook has no fragment with the next number.
    """
    there = position.get("fragments", hook.fragments)
    if position.get("steps_in_flight", -1) >= 0 and there != hook.fragments:
        raise load_error(
            f"an exchange of one of {there} fragments was running, and the hook with fragments="
            f"{hook.fragments} cannot continue it; load it with fragments={there}, and call "
            "synchronize()"
        )
    if position.get("fragment", 0) >= hook.fragments:
        raise load_error(
            f"fragment {position['fragment']} of {there} is next (counted from 0), and the hook "
            f"has fragments={hook.fragments}; load it with fragments={there}, and call "
            "synchronize()"
        )


def checked_means(
    state: Mapping[str, Any], own_key: str, memories: Sequence[BucketMemory]
) -> dict[str, Tensor]:
    """The mean distances of a fragment whose exchange was running.

    Raises:
        ValueError: the state has other means.
    """
    parameters: dict[str, Tensor] = {}
    for memory in memories:
        parameters.update(zip(memory.names or (), memory.parameters, strict=True))
    own = state.get(own_key)
    values = own.get(MEANS) if isinstance(own, dict) else None
    if not isinstance(values, dict):
        raise load_error(
            f"its '{MEANS}' must have, by name, the mean distances of the fragment whose exchange "
            f"was running, got {shown(values)}"
        )
    return {
        name: _checked(values, MEANS, name, each, precise(each.dtype)).to(each.device, copy=True)
        for name, each in parameters.items()
    }


def _checked(
    values: Mapping[str, Any], kind: str, name: str, parameter: Tensor, dtype: torch.dtype
) -> Tensor:
    if name not in values:
        raise load_error(
            f"the state must have parameter '{name}' of shape {tuple(parameter.shape)}, got none"
        )
    return check_tensor(
        f"'{kind}' of parameter '{name}'",
        values[name],
        parameter.shape,
        dtype,
        load_error,
        is_finite=False,
    )
