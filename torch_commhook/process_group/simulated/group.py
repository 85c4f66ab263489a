"""A process group whose ranks are threads of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from torch_commhook.process_group import operations
from torch_commhook.process_group.base import ProcessGroup
from torch_commhook.process_group.simulated import data
from torch_commhook.process_group.simulated.data import (
    Call,
    Reduction,
    check_like,
    check_one_dtype,
    check_times,
    dtype_name,
    only_list,
    peer_of,
    reduction_of,
    root_of,
    signature,
    split_sizes,
    tensors_of,
    text_of,
)
from torch_commhook.process_group.simulated.link import CoalescedWork, Link, SimulatedWork

# ---- the base of a rank's side of a simulated group: it issues collectives -----------------------


Tensors = Sequence[Tensor]


class IssuingProcessGroup(ProcessGroup):
    """One rank's side of a group, without its collectives, which a subclass defines.

    Args:
        link: the state that the group's ranks share.
        rank: this side's rank in the group.
    """

    def __init__(self, link: Link, rank: int) -> None:
        super().__init__(rank, len(link.members))
        self._link = link
        self._rank = rank
        self._size = len(link.members)
        self._coalescing: list[SimulatedWork] | None = None
        self._is_shut_down = False

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent on the group.

        Each collective counts the bytes of an algorithm that sends the fewest: an all-reduce
        ``2 (W - 1) / W`` of its tensor, with W ranks. Bytes that only some ranks must send are
        divided among all ranks, as in :mod:`torch_commhook.collectives`.
        """
        return self._link.bytes_sent[self._rank]

    # ---- around collectives ----------------------------------------------------------------------

    def _get_sequence_number_for_group(self) -> int:
        return self._link.sequence[self._rank]

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from 1."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: there is no timeout."""

    def shutdown(self) -> None:
        """Accept no more collectives."""
        self._is_shut_down = True

    def abort(self) -> None:
        """Same as :meth:`shutdown`."""
        self.shutdown()

    # ---- issuing ---------------------------------------------------------------------------------

    def _issue(
        self,
        run: Callable[..., data.Results],
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        key: tuple[Any, ...],
        text: Callable[[], str],
        reduction: Reduction | None = None,
        root: int = 0,
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> SimulatedWork:
        if self._is_shut_down:
            raise RuntimeError(f"{operation}: {self._link} has been destroyed")
        call = Call(
            operation,
            (operation, *key),
            text,
            inputs,
            outputs,
            outputs,
            reduction,
            root,
            splits[1],
            splits[0],
            self._bytes_sent(operation, inputs, root, splits[1]),
        )
        return self._noted(self._link.join(self._rank, call, run))

    def _noted(self, work: SimulatedWork) -> SimulatedWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _at_root(
        self, operation: str, name: str, value: Any, root: int, count: int
    ) -> list[Tensor]:
        """Tensors that only the root gives."""
        if self._rank == root:
            return tensors_of(operation, name, value, count=count)
        return []

    def _bytes_sent(
        self, operation: str, inputs: Tensors, root: int = -1, splits: Sequence[int] = ()
    ) -> int:
        call = operations.Call(operation, None, list(inputs), [], root, splits=splits)
        return call.bytes_sent(self._rank, self._size)

    def _named(self, rank: int) -> str:
        return f"rank {self._link.members[rank]}"


# ---- a process group whose ranks are threads of one process --------------------------------------


class SimulatedProcessGroup(IssuingProcessGroup):
    """One rank's side of a process group among the threads of ``run_ranks``.

    :func:`torch_commhook.testing.run_ranks` makes these groups; inside it,
    ``torch.distributed.new_group`` and device meshes do too. The group has all collectives. On two
    ranks results have Gloo's bits; sums over more ranks are taken in rank order. A collective
    completes when all ranks have issued it, a send when it is received. There is no timeout: an
    operation that can never complete raises an error at once.

    Beyond Gloo's operations it supports ``PREMUL_SUM``, and ``AVG`` of integers, rounded towards
    zero. All methods accept PyTorch's short forms, such as ``allreduce(tensor, op)``.

    Args:
        link: the state that the group's ranks share.
        rank: this side's rank in the group.

    Raises:
        TypeError: an argument has another type than the collective accepts.
        ValueError: sizes, dtypes or ranks do not fit the collective. The message names it.
        MismatchedCollectiveError: another rank's n-th collective on the group differs.
        DeadlockError: from a wait, if no rank can continue.

    Example:
        >>> run_ranks(lambda rank: type(dist.group.WORLD).__name__, 1)
        ['SimulatedProcessGroup']
    """

    #: ``attach`` lets ranks use different parameters, as over Gloo.
    _commhook_shares_used = True

    def __init__(self, link: Link, rank: int) -> None:
        super().__init__(link, rank)
        self._splits = 0

    # Methods that Python calls on a group's backend, which is this group itself.
    supports_splitting = False
    supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        return "simulated"

    # ---- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SimulatedWork:
        """Reduce one tensor, which may be sparse for a sum."""
        tensors = tensors_of("allreduce", "tensors", tensors, count=1, sparse=True)
        return self._reduce_all("allreduce", tensors, opts)

    def allreduce_coalesced(
        self, tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Reduce several tensors."""
        tensors = tensors_of("allreduce_coalesced", "tensors", tensors)
        return self._reduce_all("allreduce_coalesced", tensors, opts)

    def _reduce_all(self, operation: str, tensors: Tensors, opts: Any) -> SimulatedWork:
        reduction = reduction_of(operation, opts, tensors)
        return self._issue(
            data.all_reduce,
            operation,
            tensors,
            tensors,
            key=(signature(tensors), reduction.key()),
            text=lambda: f"{text_of(tensors)}, {reduction}",
            reduction=reduction,
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Reduce one tensor for the root; the others' tensors stay unchanged."""
        tensors = tensors_of("reduce", "tensors", tensors, count=1)
        reduction = reduction_of("reduce", _op_of(opts, op), tensors)
        root = root_of("reduce", opts, self._size)
        return self._issue(
            data.reduce,
            "reduce",
            tensors,
            tensors,
            key=(signature(tensors), reduction.key(), root),
            text=lambda: f"{text_of(tensors)}, {reduction}, to {self._named(root)}",
            reduction=reduction,
            root=root,
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Reduce one tensor for each rank."""
        operation = "reduce_scatter"
        outputs = tensors_of(operation, "outputs", outputs, count=1)
        inputs = tensors_of(operation, "inputs", only_list(inputs), count=self._size)
        check_like(operation, "inputs", inputs, outputs[0])
        return self._reduce_shares(data.reduce_scatter, operation, outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Reduce a tensor and give each rank its share."""
        return self._reduce_shares_of("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """The same for several tensors."""
        return self._reduce_shares_of("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_shares_of(
        self, operation: str, outputs: Any, inputs: Any, opts: Any
    ) -> SimulatedWork:
        outputs = tensors_of(operation, "outputs", outputs)
        inputs = tensors_of(operation, "inputs", inputs, count=len(outputs))
        check_times(operation, "inputs", inputs, outputs, self._size)
        return self._reduce_shares(data.reduce_scatter_single, operation, outputs, inputs, opts)

    def _reduce_shares(
        self, run: Any, operation: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> SimulatedWork:
        reduction = reduction_of(operation, opts, inputs)
        return self._issue(
            run,
            operation,
            inputs,
            outputs,
            key=(signature(inputs), reduction.key()),
            text=lambda: f"{text_of(inputs)}, {reduction}",
            reduction=reduction,
        )

    # ---- from all ranks to all -------------------------------------------------------------------

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give each rank the tensors of all ranks."""
        inputs = tensors_of("allgather", "inputs", inputs, count=1)
        outputs = tensors_of("allgather", "outputs", only_list(outputs), count=self._size)
        check_like("allgather", "outputs", outputs, inputs[0])
        return self._gather_all(data.all_gather, "allgather", outputs, inputs)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give each rank all tensors: ``outputs[rank][i]`` is that rank's ``inputs[i]``."""
        operation = "allgather_coalesced"
        inputs = tensors_of(operation, "inputs", inputs)
        lists = [
            tensors_of(operation, f"outputs[{i}]", tensors, count=len(inputs))
            for i, tensors in enumerate(outputs)
        ]
        if len(lists) != self._size:
            raise ValueError(
                f"{operation}: outputs must be {self._size} lists, one for each rank, "
                f"got {len(lists)}"
            )
        for tensors in lists:
            for i, tensor in enumerate(tensors):
                check_like(operation, "outputs", [tensor], inputs[i])
        flat = [tensor for tensors in lists for tensor in tensors]
        return self._gather_all(data.all_gather, operation, flat, inputs)

    def all_gather_single(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give each rank the tensors of all ranks in one tensor."""
        return self._gather_all_of("all_gather_single", [output], [input])

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """The same for several tensors."""
        return self._gather_all_of("all_gather_single_coalesced", outputs, inputs)

    def _gather_all_of(self, operation: str, outputs: Any, inputs: Any) -> SimulatedWork:
        inputs = tensors_of(operation, "inputs", inputs)
        outputs = tensors_of(operation, "outputs", outputs, count=len(inputs))
        check_times(operation, "outputs", outputs, inputs, self._size)
        return self._gather_all(data.all_gather_single, operation, outputs, inputs)

    def _gather_all(
        self, run: Any, operation: str, outputs: Tensors, inputs: Tensors
    ) -> SimulatedWork:
        return self._issue(
            run,
            operation,
            inputs,
            outputs,
            key=(signature(inputs),),
            text=lambda: text_of(inputs),
        )

    def alltoall(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Send a tensor to each rank, and receive one from each."""
        outputs = tensors_of("alltoall", "outputs", outputs, count=self._size)
        inputs = tensors_of("alltoall", "inputs", inputs, count=self._size)
        return self._exchange(
            data.all_to_all,
            "alltoall",
            outputs,
            inputs,
            ([tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]),
            row=1,
        )

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> SimulatedWork:
        """Send rows of a tensor to each rank, and receive rows from each."""
        operation = "all_to_all_single"
        outputs = tensors_of(operation, "output", output, count=1)
        inputs = tensors_of(operation, "input", input, count=1)
        gets = split_sizes(operation, "output", outputs[0], output_splits, self._size)
        sends = split_sizes(operation, "input", inputs[0], input_splits, self._size)
        row, got = (math.prod(tensor.shape[1:]) for tensor in (inputs[0], outputs[0]))
        if row != got:
            raise ValueError(
                f"{operation}: output must have rows of {row} elements, as input has, got "
                f"{text_of(outputs)}"
            )
        return self._exchange(
            data.all_to_all_single, operation, outputs, inputs, (gets, sends), row
        )

    def _exchange(
        self,
        run: Any,
        operation: str,
        outputs: Tensors,
        inputs: Tensors,
        splits: tuple[list[int], list[int]],
        row: int,
    ) -> SimulatedWork:
        gets, sends = splits
        if sends[self._rank] != gets[self._rank]:
            raise ValueError(
                f"{operation}: input_splits must be {gets[self._rank]} for rank {self._rank} "
                f"itself, as output_splits, got {sends}"
            )
        dtype = inputs[0].dtype
        rows = f", rows of {row}" if row != 1 else ""
        check_one_dtype(operation, [*inputs, *outputs])
        return self._issue(
            run,
            operation,
            inputs,
            outputs,
            key=(dtype, row),
            text=lambda: f"{dtype_name(dtype)}{rows}, sends {sends} and gets {gets}",
            splits=splits,
        )

    # ---- from one rank, or to one ----------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SimulatedWork:
        """Give all ranks the root's tensor."""
        tensors = tensors_of("broadcast", "tensors", tensors, count=1)
        root = root_of("broadcast", opts, self._size)
        return self._issue(
            data.broadcast,
            "broadcast",
            tensors,
            tensors,
            key=(signature(tensors), root),
            text=lambda: f"{text_of(tensors)} from {self._named(root)}",
            root=root,
        )

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give the root the tensors of all ranks."""
        inputs = tensors_of("gather", "inputs", inputs, count=1)
        root = root_of("gather", opts, self._size)
        outputs = self._at_root("gather", "outputs", only_list(outputs), root, self._size)
        check_like("gather", "outputs", outputs, inputs[0])
        return self._gather_at(data.gather, "gather", outputs, inputs, root)

    def gather_single(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give the root the tensors of all ranks in one tensor."""
        operation = "gather_single"
        inputs = tensors_of(operation, "input", input, count=1)
        root = root_of(operation, opts, self._size)
        outputs = self._at_root(operation, "output", [output], root, 1)
        if outputs:
            check_times(operation, "output", outputs, inputs, self._size)
        return self._gather_at(data.gather_single, operation, outputs, inputs, root)

    def _gather_at(
        self, run: Any, operation: str, outputs: Tensors, inputs: Tensors, root: int
    ) -> SimulatedWork:
        return self._issue(
            run,
            operation,
            inputs,
            outputs,
            key=(signature(inputs), root),
            text=lambda: f"{text_of(inputs)} to {self._named(root)}",
            root=root,
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give each rank its tensor of the root's."""
        outputs = tensors_of("scatter", "outputs", outputs, count=1)
        root = root_of("scatter", opts, self._size)
        inputs = self._at_root("scatter", "inputs", only_list(inputs), root, self._size)
        check_like("scatter", "inputs", inputs, outputs[0])
        return self._issue(
            data.scatter,
            "scatter",
            inputs,
            outputs,
            key=(signature(outputs), root),
            text=lambda: f"{text_of(outputs)} from {self._named(root)}",
            root=root,
        )

    # ---- messages --------------------------------------------------------------------------------

    def send(self, tensors: Any, destination: int, tag: int = 0) -> SimulatedWork:
        """Send a tensor; complete when it has been received."""
        tensors = tensors_of("send", "tensors", tensors, count=1)
        destination = peer_of("send", "destination", destination, self._size)
        call = Call(
            "send",
            signature(tensors),
            lambda: f"{text_of(tensors)} to {self._named(destination)}, tag {tag}",
            inputs=tensors,
            returned=tensors,
            bytes_sent=self._bytes_sent("send", tensors) if destination != self._rank else 0,
        )
        return self._noted(self._link.send(self._rank, call, destination, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SimulatedWork:
        """Receive a tensor."""
        return self._receive("recv", tensors, peer_of("recv", "source", source, self._size), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        """Receive a tensor from any rank; the Work reports the rank."""
        return self._receive("recv_anysource", tensors, None, tag)

    def _receive(self, operation: str, tensors: Any, source: int | None, tag: int) -> SimulatedWork:
        tensors = tensors_of(operation, "tensors", tensors, count=1)
        who = "any rank" if source is None else self._named(source)
        call = Call(
            operation,
            signature(tensors),
            lambda: f"{text_of(tensors)} from {who}, tag {tag}",
            outputs=tensors,
            returned=tensors,
        )
        return self._noted(self._link.receive(self._rank, call, source, tag))

    # ---- barriers, coalescing, and groups of some ranks ------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> SimulatedWork:  # type: ignore[override]
        """Complete when all ranks have reached the barrier."""
        return self._issue(data.barrier, "barrier", (), (), key=(), text=lambda: "")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have reached the barrier. A DeadlockError names the others."""
        operation = "monitored_barrier"
        self._issue(data.barrier, operation, (), (), key=(), text=lambda: "").wait()

    def start_coalescing(self, device: Any = None) -> None:
        """Combine all following operations into one Work."""
        self._coalescing = []

    def end_coalescing(self, device: Any = None) -> CoalescedWork:
        """Return the Work of all operations issued since."""
        works, self._coalescing = self._coalescing, None
        if works is None:
            raise RuntimeError("end_coalescing: start_coalescing() must be called first")
        return CoalescedWork(works)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SimulatedProcessGroup | None:
        """Return a group of some ranks; all of these must call it. None for other ranks."""
        members = [peer_of("split_group", "ranks", rank, self._size) for rank in ranks]
        self._splits += 1
        if self._rank not in members:
            return None
        name = group_name or f"{self._link.name}:split:{self._splits}"
        own = self._link.members
        link = self._link.links.get(name, [own[rank] for rank in members], own[self._rank])
        group = SimulatedProcessGroup(link, members.index(self._rank))
        known: Any = name  # PyTorch's checkers have a type of their own for it
        group._set_group_name(known)
        group._set_group_desc(group_desc or "undefined")
        return group


def _op_of(opts: Any, op: Any) -> Any:
    """The operation. In the short form of reduce, options are the root."""
    return op if isinstance(opts, int) else opts
