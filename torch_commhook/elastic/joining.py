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
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from torch_commhook.elastic import transfer
from torch_commhook.elastic.pieces import Part, Pieces

_T = TypeVar("_T")

_log = logging.getLogger("torch_commhook.elastic")

#: Parameters of fewer bytes are sent at once, while the others wait.
AT_ONCE = 4 << 20
#: The part of a step's time that sending a piece should take.
_SHARE = 0.4
_FIRST_BYTES = 1 << 20
#: If a message takes that time at any size, as between distant hosts.
_LEAST_BYTES = 1 << 16
_MOST_BYTES = 1 << 28


class InBackground(Generic[_T]):
    """Calls a function on a thread of its own.

    Args:
        call: the function.
    """

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._found: list[_T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="commhook-state", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except Exception as error:
            self._error = error

    def result(self) -> _T:
        """Wait until the function returns, and return its result.

        Raises:
            Exception: as the function has raised it.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        (found,) = self._found
        return found


class Donor:
    """Sends a new rank the training's state, in pieces.

    Args:
        pieces: this rank's pieces.
        group: the group of the ranks.
        place: the new rank's place in the group.
        head: flat bytes that the new rank needs before its first step.
    """

    def __init__(self, pieces: Pieces, group: dist.ProcessGroup, place: int, head: Tensor) -> None:
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
            transfer.send(self._head, self._group, self._place)
            self._head = None
            at = transfer.receive_number(self._group, self._place)
            self._at = min(max(0, at), self._pieces.numel)
        parts, self._at = self._pieces.take(self._at, self._bytes)
        piece = transfer.packed((self._at, parts))
        # A wait for a late rank must not make its pieces smaller.
        transfer.receive_number(self._group, self._place)  # the new rank has started
        began = time.monotonic()
        transfer.send(piece, self._group, self._place)
        transfer.receive_number(self._group, self._place)  # the piece has arrived
        self._took = time.monotonic() - began if parts else 0.0

    def wait(self) -> None:
        """Wait until the new rank has received this step's piece.

        Raises:
            RuntimeError: a connection was closed.
        """
        if self._sends is not None:
            self._sends.result()

    def end(self, rest: Tensor) -> None:
        """Send checksums and the rest, once all elements have arrived and the next step begins.

        Args:
            rest: flat bytes.
        """

        def send() -> None:
            sums = self._pieces.sums()
            transfer.send(transfer.packed(sums), self._group, self._place)
            transfer.send(rest, self._group, self._place)
            try:
                wanted = transfer.receive_numbers(self._group, self._place, len(sums))
                if not set(wanted) <= set(range(len(sums))):
                    raise ValueError(f"torch_commhook: it asks for parameters {wanted}")
            except ValueError as error:  # its own fault: this rank continues
                _log.warning("a new rank does not get the last part of its state: %s", error)
                return
            if wanted:
                parts = self._pieces.whole(wanted)
                transfer.send(transfer.packed(parts), self._group, self._place)

        self._sends = InBackground(send)


class NewRank:
    """Receives the state of a training on a new rank, in pieces.

    Args:
        pieces: this rank's pieces.

    Attributes:
        at: the number of elements that have arrived.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.at = 0
        self._receives: InBackground[tuple[int, list[Part]]] | None = None
        self._piece: tuple[int, list[Part]] | None = None

    @property
    def has_all(self) -> bool:
        """Whether all elements have arrived."""
        return self.at == self._pieces.numel

    def begin_step(self, group: dist.ProcessGroup, donor: int, *, is_first: bool) -> None:
        """Receive the piece of the step that begins.

        Args:
            group: the group of the ranks.
            donor: the donor's place in the group.
            is_first: whether this is the donor's first piece. The donor sends the head before it.
        """
        at, self._piece, own = self.at, None, self._pieces.nbytes

        def receive() -> tuple[int, list[Part]]:
            if is_first:
                transfer.receive(group, donor, own)  # this rank has a head already
                transfer.send_number(at, group, donor)
            transfer.send_number(1, group, donor)
            piece: tuple[int, list[Part]] = transfer.unpacked(transfer.receive(group, donor, own))
            transfer.send_number(1, group, donor)
            return piece

        self._receives = InBackground(receive)

    def receive(self) -> None:
        """Wait for the piece of the step.

        Raises:
            RuntimeError: the connection was closed.
        """
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
        sums = transfer.unpacked(transfer.receive(group, donor, own))
        load(transfer.unpacked(transfer.receive(group, donor, own)))
        pairs = enumerate(zip(sums, self._pieces.sums(), strict=True))
        wanted = [index for index, (theirs, mine) in pairs if theirs != mine]
        transfer.send_numbers(wanted, group, donor)
        if wanted:
            self._pieces.put(transfer.unpacked(transfer.receive(group, donor, own)))
        return len(wanted)
