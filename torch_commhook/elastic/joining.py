"""Sends a new rank the state of a training in pieces, while all ranks continue their steps.

The new rank takes part in each step with zeros, and its own optimizer applies the results like all
others. In each step one member, the donor, sends it some elements of the parameters as they are
before this step, with the optimizers' state of these elements. The new rank writes them before its
optimizer takes the step, so they stay equal to the others'. Once it has all elements, the donor
sends the small rest, and checksums. From then on the new rank is like any other.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.agreement import check_length, packed, unpacked

# ---- a model's parameters and their optimizer state, split into pieces for a new rank ------------


#: One value of an optimizer's state for some elements of a parameter, and whether the value has the
#: parameter's shape. If it has, the values of these elements, flat. Otherwise the whole value.
#: Tensors of more than one element then come with the parameter's first element, since the
#: optimizer needs one of each, and with its last. Plain tuples: a new rank unpickles no class.
Remembered = tuple[Any, bool]

#: Some elements of a parameter: its number, the flat index of the first element, the elements,
#: flat, and each optimizer's state of them by name; None for an optimizer without state.
Chunk = tuple[int, int, Tensor, list[dict[str, Remembered] | None]]


class StateChunks:
    """The elements of all parameters, one after the other.

    Args:
        parameters: the model's parameters, in the same order on all ranks. Parameters that only the
            optimizers have are added.
        optimizers: the optimizers of these parameters.

    Attributes:
        numel: the number of places of all parameters: one for each element, and one for an empty
            parameter.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = list(optimizers)
        of_optimizers = (
            each
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        )
        by_id = {id(each): each for each in (*parameters, *of_optimizers)}
        self._parameters = list(by_id.values())
        self._starts = list(accumulate(map(_length, self._parameters), initial=0))
        self.numel: int = self._starts.pop()

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def take(self, first: int, nbytes: int) -> tuple[list[Chunk], int]:
        """Copy elements from a place on.

        Args:
            first: the place.
            nbytes: the approximate number of bytes; at least one element is copied. A parameter
                that is not contiguous is copied completely.

        Returns:
            The copies, and the place after them.
        """
        parts: list[Chunk] = []
        at = first
        while at < self.numel and (nbytes > 0 or not parts):
            index = bisect_right(self._starts, at) - 1
            parameter, begin = self._parameters[index], at - self._starts[index]
            end, of_element = _length(parameter), self._bytes_of_element(parameter)
            if parameter.is_contiguous():
                end = min(end, begin + max(1, nbytes // of_element))
            parts.append(self._copied(index, begin, end))
            nbytes -= (end - begin) * of_element
            at = self._starts[index] + end
        return parts, at

    def whole(self, indices: Collection[int]) -> list[Chunk]:
        """Copy all elements of some parameters."""
        return [self._copied(index, 0, self._parameters[index].numel()) for index in indices]

    @torch.no_grad()
    def put(self, parts: Sequence[Chunk]) -> None:
        """Write elements that another rank has copied."""
        for number, first, elements, states in parts:
            parameter = self._parameters[number]
            _write(parameter, first, elements)
            for optimizer, values in zip(self._optimizers, states, strict=True):
                if values is None:
                    optimizer.state.pop(parameter, None)
                    continue
                state = optimizer.state[parameter]
                for name, (value, is_of_elements) in values.items():
                    if is_of_elements:
                        whole = _like(parameter, value, state.get(name))
                        _write(whole, first, value)
                        value = whole
                    elif isinstance(value, Tensor):
                        value = value.to(_device_of(name, parameter, state, optimizer))
                    state[name] = value
                if first == 0:  # all of these come with the first element
                    for name in state.keys() - values.keys():
                        del state[name]

    def others(self) -> list[dict[Any, Any]]:
        """Each optimizer's state that belongs to no parameter, by name."""
        return [
            {name: value for name, value in each.state.items() if not isinstance(name, Tensor)}
            for each in self._optimizers
        ]

    def put_others(self, others: Sequence[dict[Any, Any]]) -> None:
        """Write the state that another rank's :meth:`others` returned."""
        for optimizer, values in zip(self._optimizers, others, strict=True):
            own = optimizer.state
            for name in [name for name in own if not isinstance(name, Tensor)]:
                del own[name]
            own.update(values)

    def sums(self) -> list[int]:
        """A checksum for each parameter, of its bits and its optimizer state.

        Different bits give different numbers, except with a chance of 1 in billions.
        """
        return [_sum_of([each, *self._states_of(each)]) for each in self._parameters]

    def _states_of(self, parameter: Tensor) -> list[dict[str, Any]]:
        """Each optimizer's state of a parameter, by name; empty if it has none."""
        return [optimizer.state.get(parameter, {}) for optimizer in self._optimizers]

    def _bytes_of_element(self, parameter: Tensor) -> int:
        """The bytes of an element of a parameter, with its optimizer state."""
        values = [value for state in self._states_of(parameter) for value in state.values()]
        along = [value for value in values if _goes_along(value, parameter)]
        return sum(each.element_size() for each in (parameter, *along))

    def _copied(self, index: int, begin: int, end: int) -> Chunk:
        parameter = self._parameters[index]
        states: list[dict[str, Remembered] | None] = []
        for optimizer in self._optimizers:
            if parameter not in optimizer.state:
                states.append(None)
                continue
            values: dict[str, Remembered] = {}
            for name, value in optimizer.state[parameter].items():
                if _goes_along(value, parameter):
                    values[name] = _flat(value, begin, end), True
                elif not isinstance(value, Tensor):
                    values[name] = value, False
                elif value.numel() == 1 or begin == 0 or end >= parameter.numel():
                    values[name] = value.detach().clone(), False
            states.append(values)
        return index, begin, _flat(parameter, begin, end), states


def _length(parameter: Tensor) -> int:
    """The number of a parameter's places. Empty parameters may have optimizer state too."""
    return max(1, parameter.numel())


def _goes_along(value: object, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state has one element for each of the parameter's."""
    return (
        isinstance(value, Tensor)
        and value.numel() > 1
        and value.shape == parameter.shape
        and value.is_contiguous() == parameter.is_contiguous()
    )


def _device_of(
    name: str, parameter: Tensor, state: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> torch.device:
    """Where an optimizer has a value of a parameter that does not have its shape."""
    before = state.get(name)
    if isinstance(before, Tensor):
        return before.device
    if name == "step":  # PyTorch's count on the host, unless kernels count
        for group in optimizer.param_groups:
            if any(each is parameter for each in group["params"]):
                counts = group.get("capturable") or group.get("fused")
                return parameter.device if counts else torch.device("cpu")
    return parameter.device


def _flat(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor.detach().reshape(-1)[begin:end].clone()


def _write(tensor: Tensor, first: int, value: Tensor) -> None:
    if value.numel() == tensor.numel():
        tensor.copy_(value.view(tensor.shape))
    else:
        tensor.view(-1)[first : first + value.numel()].copy_(value)


def _like(parameter: Tensor, value: Tensor, before: object) -> Tensor:
    """A tensor with a value for each of a parameter's elements; ``before`` itself if it fits."""
    if _goes_along(before, parameter):
        assert isinstance(before, Tensor)
        if before.dtype == value.dtype:
            return before
    return torch.zeros_like(parameter, dtype=value.dtype)


def sum_of_bits(tensor: Tensor) -> int:
    """A checksum of a tensor's elements in order, whatever its strides: 32 bits."""
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(data)


def _sum_of(value: Any) -> int:
    """A checksum of a value of an optimizer's state."""
    if isinstance(value, Tensor):
        return sum_of_bits(value)
    if isinstance(value, Mapping):
        value = [each for key in sorted(value, key=str) for each in (str(key), value[key])]
    if isinstance(value, (list, tuple)):
        return sum(place * _sum_of(each) for place, each in enumerate(value, 1))
    return zlib.crc32(repr(value).encode())


# ---- messages of bytes and numbers, and the state of optimizers ----------------------------------


# Each message goes to a rank of a group, or comes from one. All functions return when it is sent or
# received, and raise RuntimeError if the connection was closed.


#: Bytes of a message.
_PIECE = 4 << 20
#: A tag that no other message of these groups has.
_TAG = (1 << 30) - 64


def send(data: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """Send bytes to a rank, in pieces."""
    send_number(data.numel(), group, rank)
    for piece in data.split(_PIECE):
        _send(piece, group, rank)


def receive(group: dist.ProcessGroup, rank: int, own: int) -> Tensor:
    """Receive the bytes that a rank sends by :func:`send`.

    Raises a ValueError if :func:`check_length` refuses the announced length, on a rank with ``own``
    bytes of parameters and buffers.
    """
    length = receive_number(group, rank)
    check_length(length, own)
    data = torch.empty(length, dtype=torch.uint8, device="cpu")
    for piece in data.split(_PIECE):
        _receive(piece, group, rank)
    return data


def send_number(number: int, group: dist.ProcessGroup, rank: int) -> None:
    """Send an int to a rank."""
    _send(torch.tensor([number], dtype=torch.int64, device="cpu"), group, rank)


def receive_number(group: dist.ProcessGroup, rank: int) -> int:
    """Receive the number that a rank sends by :func:`send_number`."""
    number = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(number, group, rank)
    return int(number)


def _send(message: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    group.send([message], rank, _TAG).wait()


def _receive(message: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    group.recv([message], rank, _TAG).wait()


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's parameter groups, without the parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def load_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Load the settings that :func:`groups_of` returned.

    Raises:
        ValueError: the optimizers have different numbers of groups.
    """
    if len(optimizer.param_groups) != len(groups):
        raise ValueError(
            f"Elastic: optimizers must be the same on all ranks: another rank's has {len(groups)} "
            f"groups of parameters, this one's {len(optimizer.param_groups)}"
        )
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own.update(given)


def load_states(objects: Sequence[Any], states: Sequence[Any]) -> None:
    """Load the states that another rank's objects have returned.

    Raises:
        ValueError: the ranks have different numbers of objects.
    """
    if len(objects) != len(states):
        raise ValueError(
            f"Elastic: state must be the same on all ranks: another rank has {len(states)} "
            f"objects, this one {len(objects)}"
        )
    for each, state in zip(objects, states, strict=True):
        each.load_state_dict(state)


# ---- the donor, and the new rank -----------------------------------------------------------------


_T = TypeVar("_T")

_log = logging.getLogger("torch_commhook.elastic")

#: Parameters of fewer bytes are sent at once, while the others wait.
AT_ONCE = 4 << 20
#: The part of a step's time that sending a piece should take.
_SHARE = 0.4
_FIRST_BYTES = 1 << 20
#: If a message takes that share at any size, as between distant hosts.
_LEAST_BYTES = 1 << 16
_MOST_BYTES = 1 << 28


class InBackground(Generic[_T]):
    """Calls a function on a thread of its own."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._future: Future[_T] = Future()

        def run() -> None:
            try:
                self._future.set_result(call())
            except BaseException as error:  # whoever waits must get it
                self._future.set_exception(error)

        # Not of a pool, whose threads Python waits for at its end.
        self._thread = threading.Thread(target=run, name="commhook-state", daemon=True)
        self._thread.start()

    def result(self) -> _T:
        """Wait until the function returns. Returns its result, or raises its exception."""
        self._thread.join()
        return self._future.result()


class Donor:
    """Sends a new rank the training's state, in pieces.

    Args:
        pieces: this rank's pieces.
        group: the group of the ranks.
        place: the new rank's place in the group.
        head: flat bytes that the new rank needs before its first step.
    """

    def __init__(
        self, pieces: StateChunks, group: dist.ProcessGroup, place: int, head: Tensor
    ) -> None:
        self._pieces = pieces
        self._group = group
        self._place = place
        self._head: Tensor | None = head
        self._at = 0
        self._bytes = _FIRST_BYTES
        self._began: float | None = None
        self._took = 0.0
        self._sends: InBackground[None] | None = None

    def begin_step(self) -> None:
        """Send the piece of the step that begins. The parameters are unchanged until it ends."""
        now = time.monotonic()
        if self._began is not None and self._took > 0:
            factor = _SHARE * (now - self._began) / self._took
            self._bytes = int(self._bytes * min(2.0, max(0.5, factor)))
            self._bytes = min(_MOST_BYTES, max(_LEAST_BYTES, self._bytes))
        self._began = now
        self._sends = InBackground(self._send)

    def _send(self) -> None:
        if self._head is not None:
            send(self._head, self._group, self._place)
            self._head = None
            at = receive_number(self._group, self._place)
            self._at = min(max(0, at), self._pieces.numel)
        parts, self._at = self._pieces.take(self._at, self._bytes)
        piece = packed((self._at, parts))
        # A wait for a late rank must not make its pieces smaller.
        receive_number(self._group, self._place)  # the new rank has started
        began = time.monotonic()
        send(piece, self._group, self._place)
        receive_number(self._group, self._place)  # the piece has arrived
        self._took = time.monotonic() - began if parts else 0.0

    def wait(self) -> None:
        """Wait until the new rank has received this step's piece; raises as :func:`send`."""
        if self._sends is not None:
            self._sends.result()

    def end(self, rest: Tensor) -> None:
        """Send checksums and the rest, once all elements have arrived and the next step begins."""

        def send_rest() -> None:
            sums = self._pieces.sums()
            send(packed(sums), self._group, self._place)
            send(rest, self._group, self._place)
            try:
                differs = receive(self._group, self._place, len(sums))  # a byte for each sum
                if differs.numel() != len(sums):
                    raise ValueError(f"torch_commhook: it compares {differs.numel()} parameters")
            except ValueError as error:  # its own fault: this rank continues
                _log.warning("a new rank does not get the last part of its state: %s", error)
                return
            if differs.any():
                parts = self._pieces.whole(differs.nonzero().flatten().tolist())
                send(packed(parts), self._group, self._place)

        self._sends = InBackground(send_rest)


class NewRank:
    """Receives the state of a training on a new rank, in pieces.

    Args:
        pieces: this rank's pieces.

    Attributes:
        at: the number of elements that have arrived.
    """

    def __init__(self, pieces: StateChunks) -> None:
        self._pieces = pieces
        self.at = 0
        self._receives: InBackground[tuple[int, list[Chunk]]] | None = None
        self._piece: tuple[int, list[Chunk]] | None = None

    @property
    def has_all(self) -> bool:
        """Whether all elements have arrived."""
        return self.at == self._pieces.numel

    def begin_step(self, group: dist.ProcessGroup, donor: int, *, is_first: bool) -> None:
        """Receive the piece of the step that begins.

        The donor, a place in the group, sends the head before its first piece.
        """
        at, self._piece, own = self.at, None, self._pieces.nbytes

        def receive_piece() -> tuple[int, list[Chunk]]:
            if is_first:
                receive(group, donor, own)  # this rank has a head already
                send_number(at, group, donor)
            send_number(1, group, donor)
            piece: tuple[int, list[Chunk]] = unpacked(receive(group, donor, own))
            send_number(1, group, donor)
            return piece

        self._receives = InBackground(receive_piece)

    def receive(self) -> None:
        """Wait for the piece of the step; raises as :func:`receive`."""
        if self._receives is not None:
            receives, self._receives = self._receives, None
            self._piece = receives.result()

    def write(self) -> None:
        """Write the piece of the step, once the step counts."""
        if self._piece is not None:
            (self.at, parts), self._piece = self._piece, None
            self._pieces.put(parts)

    def end(self, group: dist.ProcessGroup, donor: int, load: Callable[[Any], object]) -> int:
        """Receive the rest, and all parameters whose checksums differ.

        Args:
            group: the group of the ranks.
            donor: the donor's place in the group.
            load: called with the rest, unpacked.

        Returns:
            The number of parameters that differed and were sent again.

        Raises:
            RuntimeError: the connection was closed.
            ValueError: the donor's bytes can't be read, or contain more than plain values.
        """
        own = self._pieces.nbytes
        sums = unpacked(receive(group, donor, own))
        load(unpacked(receive(group, donor, own)))
        pairs = zip(sums, self._pieces.sums(), strict=True)
        wanted = [theirs != mine for theirs, mine in pairs]
        send(torch.tensor(wanted, dtype=torch.uint8, device="cpu"), group, donor)
        if any(wanted):
            self._pieces.put(unpacked(receive(group, donor, own)))
        return sum(wanted)
