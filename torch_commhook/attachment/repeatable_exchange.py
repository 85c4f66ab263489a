"""An exchange of local steps that the remaining ranks repeat when a rank is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from torch_commhook.attachment.parameter_exchange import ParameterExchange
from torch_commhook.collectives.plain import broadcast
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_end import begin_maximum
from torch_commhook.step.step_group import StepGroup


class ExchangeSurvivors(Protocol):
    """The ranks of a training. They may change between exchanges."""

    def give_state(self) -> None:
        """Send new ranks their state, if this rank is the sender."""

    def count_local_step(self) -> None:
        """Count a step that this rank has taken on its own."""

    def stop_clock(self) -> None:
        """Stop measuring this rank's time: it waits for others from now on."""

    def note(self) -> Tensor:
        """This rank's message to the others: uint8, flat. All ranks get the elementwise maximum."""

    def packed_buffers(self) -> Tensor | None:
        """The bytes of the model's buffers, or None. All ranks take the first rank's."""

    def unpack_buffers(self, sent: Tensor) -> None:
        """Write the buffers of the first rank."""

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        """Agree with the other ranks on who continues; as :meth:`Survivors.go_on`."""

    def exchange_ended(self, note: Tensor | None, *, lets_in: bool) -> bool:
        """Count an exchange; as :meth:`Survivors.step_ended`.

        Args:
            note: as there.
            lets_in: whether new ranks may join now.
        """

    def use_group(self) -> None:
        """Communicate among the remaining ranks."""


class RepeatableExchange:
    """An exchange that moves no parameter until all ranks have all means.

    Args:
        attached: the hook, a :class:`local_sgd`.
        survivors: the ranks.
        group: returns the present group of the ranks.
    """

    def __init__(
        self,
        attached: Attached,
        survivors: ExchangeSurvivors,
        group: Callable[[], StepGroup],
    ) -> None:
        self._attached = attached
        self._survivors = survivors
        self._group = group
        self._has_results = False
        self._wanted = False
        self._has_changed = False  # whether the ranks have changed since the means arrived
        self._note: Tensor | None = None
        self._buffers: Tensor | None = None

    def run(
        self,
        memories: Callable[[], Sequence[BucketMemory]],
        is_wanted: Callable[[], bool],
        *,
        unsent: bool = False,
        before_repeat: Callable[[], None] = lambda: None,
    ) -> ParameterExchange | None:
        """Average the distances among the remaining ranks.

        Args:
            memories: returns the hook's memory of the buckets, which depends on the ranks.
            is_wanted: returns whether there are distances to average. Called on all ranks.
            unsent: as for :meth:`ParameterExchange.send`.
            before_repeat: called before the ranks change and repeat the exchange.

        Returns:
            The exchange with its means; None if there was nothing to average.

        Raises:
            BaseException: this rank does not continue. Its parameters are unchanged.
        """
        self._survivors.give_state()
        while True:
            exchange = ParameterExchange(self._attached, self._group(), keeps_all=True)
            try:
                self._average(exchange, memories(), is_wanted, unsent=unsent)
                break
            except BaseException as error:
                # First: otherwise the ranks would wait for each other.
                raised = self._group().fail_with(error)
                if self._goes_on(exchange, raised, before_repeat):
                    self._note, self._has_changed = None, True
                    break
        return exchange if self._wanted else None

    def _average(
        self,
        exchange: ParameterExchange,
        memories: Sequence[BucketMemory],
        is_wanted: Callable[[], bool],
        *,
        unsent: bool,
    ) -> None:
        self._has_results = False
        note, group = self._survivors.note(), self._group()
        group.begin()
        self._wanted = is_wanted()
        if self._wanted:
            exchange.send(memories, unsent=unsent)
        # Before this rank reports that it has all means: others may need the rest.
        maximum = begin_maximum(group.group, note)
        buffers = self._survivors.packed_buffers()
        sent = None if buffers is None else broadcast(buffers, src=0, group=group.group)
        if self._wanted:
            exchange.receive()
        self._note = maximum()
        self._buffers = None if sent is None else sent.wait()
        self._has_results = True
        group.end()

    def _goes_on(
        self,
        exchange: ParameterExchange,
        error: BaseException,
        before_repeat: Callable[[], None],
    ) -> bool:
        """Agree on the remaining ranks. Returns whether the exchange counts.

        Raises:
            BaseException: this rank does not continue.
        """
        exchange.drain()
        try:
            counts = self._survivors.go_on(error, has_results=self._has_results)
        except BaseException:
            exchange.undo()
            raise
        if not counts:
            exchange.undo()
            before_repeat()
            self._survivors.use_group()
        return counts

    def end(self, *, lets_in: bool) -> None:
        """Count the exchange, once the parameters have moved.

        Args:
            lets_in: whether new ranks may join now.

        Raises:
            BaseException: this rank does not continue.
        """
        if self._buffers is not None:
            self._survivors.unpack_buffers(self._buffers)
        has_changed = self._survivors.exchange_ended(self._note, lets_in=lets_in)
        if has_changed or self._has_changed:
            self._survivors.use_group()
