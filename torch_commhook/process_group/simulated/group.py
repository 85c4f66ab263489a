"""A process group whose ranks are threads of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from torch_commhook.process_group.base import ProcessGroup
from torch_commhook.process_group.operations import by_position
from torch_commhook.process_group.simulated import data
from torch_commhook.process_group.simulated.link import CoalescedWork, Link, SimulatedWork
from torch_commhook.process_group.work import named

Tensors = list[Tensor]


def _collective(operation: str, run: data.Collective) -> Any:
    """The method for a collective with a share of each rank on one side."""

    def method(self: SimulatedProcessGroup, *arguments: Any, **keywords: Any) -> SimulatedWork:
        arguments, keywords = by_position(operation, arguments, keywords)
        return self._share(run, operation, *arguments, **keywords)

    method.__doc__ = run.__doc__
    return named(method, "SimulatedProcessGroup", operation)


class SimulatedProcessGroup(ProcessGroup):
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
        super().__init__(rank, len(link.members))
        self._link = link
        self._rank = rank
        self._size = len(link.members)
        self._coalescing: list[SimulatedWork] | None = None
        self._is_shut_down = False
        self._splits = 0

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
        """As :meth:`shutdown`."""
        self.shutdown()

    # ---- issuing ---------------------------------------------------------------------------------

    def _issue(
        self,
        run: data.Collective,
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        reduction: data.Reduction | None = None,
        root: int = -1,
    ) -> SimulatedWork:
        """Issue a collective whose tensors all ranks have in the same sizes."""
        shared = outputs if operation == "scatter" else inputs  # all ranks give these

        def text() -> str:
            reduced = "" if reduction is None else f", {reduction}"
            if root < 0:
                return f"{data.text_of(shared)}{reduced}"
            way = "from" if operation in ("broadcast", "scatter") else "to"
            return f"{data.text_of(shared)}{reduced}{reduced[:1]} {way} {self._named(root)}"

        key = operation, data.signature(shared), str(reduction), root
        call = data.Call(
            operation, None, inputs, outputs, root, key=key, text=text, reduction=reduction
        )
        return self._join(call, run)

    def _share(
        self,
        run: data.Collective,
        operation: str,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> SimulatedWork:
        """Issue a collective with all ranks' shares on one side, of the root or of all ranks.

        A ``_single`` has the shares in one tensor; other collectives have a tensor for each.
        """
        if operation.endswith("_single"):
            outputs, inputs = [outputs], [inputs]
        is_single = "_single" in operation
        sides = {"inputs": inputs, "outputs": outputs}
        small, large = sides if "gather" in operation else reversed(sides)
        shares = data.tensors_of(operation, small, sides[small], count=None if is_single else 1)
        has_root = operation in ("gather", "gather_single", "scatter")
        root = data.root_of(operation, opts, self._size) if has_root else -1
        whole: Tensors = []
        if root in (-1, self._rank) and is_single:
            whole = data.tensors_of(operation, large, sides[large], count=len(shares))
            data.check_times(operation, large, whole, shares, self._size)
        elif root in (-1, self._rank):
            whole = data.tensors_of(
                operation, large, data.only_list(sides[large]), count=self._size
            )
            data.check_like(operation, large, whole, shares[0])
        sides = {small: shares, large: whole}
        reduces = operation.startswith("reduce")
        reduction = data.reduction_of(operation, opts, whole) if reduces else None
        return self._issue(run, operation, **sides, reduction=reduction, root=root)

    def _join(self, call: data.Call, run: data.Collective) -> SimulatedWork:
        if self._is_shut_down:
            raise RuntimeError(f"{call.operation}: {self._link} has been destroyed")
        return self._noted(self._link.join(self._rank, call, run))

    def _noted(self, work: SimulatedWork) -> SimulatedWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _named(self, rank: int) -> str:
        return f"rank {self._link.members[rank]}"

    # Methods that Python calls on a group's backend, which is this group itself.
    supports_splitting = False
    supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        return "simulated"

    # ---- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SimulatedWork:
        """Reduce one tensor, which may be sparse for a sum."""
        tensors = data.tensors_of("allreduce", "tensors", tensors, count=1, sparse=True)
        reduction = data.reduction_of("allreduce", opts, tensors)
        return self._issue(data.all_reduce, "allreduce", tensors, tensors, reduction=reduction)

    def allreduce_coalesced(
        self, tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Reduce several tensors."""
        operation = "allreduce_coalesced"
        tensors = data.tensors_of(operation, "tensors", tensors)
        reduction = data.reduction_of(operation, opts, tensors)
        return self._issue(data.all_reduce, operation, tensors, tensors, reduction=reduction)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Reduce one tensor for the root; the others' tensors stay unchanged."""
        tensors = data.tensors_of("reduce", "tensors", tensors, count=1)
        # In the short form, options are the root.
        reduction = data.reduction_of("reduce", op if isinstance(opts, int) else opts, tensors)
        root = data.root_of("reduce", opts, self._size)
        return self._issue(data.reduce, "reduce", tensors, tensors, reduction=reduction, root=root)

    reduce_scatter = _collective("reduce_scatter", data.reduce_scatter)
    reduce_scatter_single = _collective("reduce_scatter_single", data.reduce_scatter_single)
    reduce_scatter_single_coalesced = _collective(
        "reduce_scatter_single_coalesced", data.reduce_scatter_single
    )

    # ---- from all ranks to all -------------------------------------------------------------------

    allgather = _collective("allgather", data.all_gather)
    all_gather_single = _collective("all_gather_single", data.all_gather_single)
    all_gather_single_coalesced = _collective("all_gather_single_coalesced", data.all_gather_single)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Give each rank all tensors: ``outputs[rank][i]`` is that rank's ``inputs[i]``."""
        operation = "allgather_coalesced"
        inputs = data.tensors_of(operation, "inputs", inputs)
        lists = [
            data.tensors_of(operation, f"outputs[{i}]", tensors, count=len(inputs))
            for i, tensors in enumerate(outputs)
        ]
        if len(lists) != self._size:
            raise ValueError(
                f"{operation}: outputs must be {self._size} lists, one for each rank, "
                f"got {len(lists)}"
            )
        for tensors in lists:
            for i, tensor in enumerate(tensors):
                data.check_like(operation, "outputs", [tensor], inputs[i])
        flat = [tensor for tensors in lists for tensor in tensors]
        return self._issue(data.all_gather, operation, inputs, flat)

    def alltoall(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> SimulatedWork:
        """Send a tensor to each rank, and receive one from each."""
        outputs = data.tensors_of("alltoall", "outputs", outputs, count=self._size)
        inputs = data.tensors_of("alltoall", "inputs", inputs, count=self._size)
        gets, sends = ([tensor.numel() for tensor in each] for each in (outputs, inputs))
        return self._exchange(data.all_to_all, "alltoall", outputs, inputs, gets, sends)

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
        outputs = data.tensors_of(operation, "output", output, count=1)
        inputs = data.tensors_of(operation, "input", input, count=1)
        gets = data.split_sizes(operation, "output", outputs[0], output_splits, self._size)
        sends = data.split_sizes(operation, "input", inputs[0], input_splits, self._size)
        row, got = (math.prod(tensor.shape[1:]) for tensor in (inputs[0], outputs[0]))
        if row != got:
            raise ValueError(
                f"{operation}: output must have rows of {row} elements, as input has, got "
                f"{data.text_of(outputs)}"
            )
        return self._exchange(data.all_to_all_single, operation, outputs, inputs, gets, sends, row)

    def _exchange(
        self,
        run: data.Collective,
        operation: str,
        outputs: Tensors,
        inputs: Tensors,
        gets: list[int],
        sends: list[int],
        row: int = 1,
    ) -> SimulatedWork:
        """Issue an all-to-all of rows of ``row`` elements."""
        if sends[self._rank] != gets[self._rank]:
            raise ValueError(
                f"{operation}: input_splits must be {gets[self._rank]} for rank {self._rank} "
                f"itself, as output_splits, got {sends}"
            )
        dtypes = sorted({data.dtype_name(tensor.dtype) for tensor in (*inputs, *outputs)})
        if len(dtypes) > 1:
            raise ValueError(f"{operation}: tensors must be of one dtype, got {', '.join(dtypes)}")
        rows = f", rows of {row}" if row != 1 else ""
        call = data.Call(
            operation,
            None,
            inputs,
            outputs,
            splits=sends,
            gets=gets,
            key=(operation, *dtypes, row),
            text=lambda: f"{dtypes[0]}{rows}, sends {sends} and gets {gets}",
        )
        return self._join(call, run)

    # ---- from one rank, or to one ----------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SimulatedWork:
        """Give all ranks the root's tensor."""
        tensors = data.tensors_of("broadcast", "tensors", tensors, count=1)
        root = data.root_of("broadcast", opts, self._size)
        return self._issue(data.broadcast, "broadcast", tensors, tensors, root=root)

    gather = _collective("gather", data.gather)
    gather_single = _collective("gather_single", data.gather_single)
    scatter = _collective("scatter", data.scatter)

    # ---- messages --------------------------------------------------------------------------------

    def send(self, tensors: Any, destination: int, tag: int = 0) -> SimulatedWork:
        """Send a tensor; complete when it has been received."""
        peer = data.peer_of("send", "destination", destination, self._size)
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SimulatedWork:
        """Receive a tensor."""
        return self._message(
            "recv", tensors, data.peer_of("recv", "source", source, self._size), tag
        )

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        """Receive a tensor from any rank; the Work reports the rank."""
        return self._message("recv_anysource", tensors, -1, tag)

    def _message(self, operation: str, tensors: Any, peer: int, tag: int) -> SimulatedWork:
        """Issue a send or a receive; a peer of -1 is any rank."""
        tensors = data.tensors_of(operation, "tensors", tensors, count=1)
        inputs, outputs = (tensors, []) if operation == "send" else ([], tensors)
        word = "to" if operation == "send" else "from"
        who = "any rank" if peer < 0 else self._named(peer)
        call = data.Call(
            operation,
            None,
            inputs,
            outputs,
            peer,
            key=data.signature(tensors),
            text=lambda: f"{data.text_of(tensors)} {word} {who}, tag {tag}",
        )
        return self._noted(self._link.message(self._rank, call, tag))

    # ---- barriers, coalescing, and groups of some ranks ------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> SimulatedWork:  # type: ignore[override]
        """Complete when all ranks have reached the barrier."""
        return self._issue(data.all_gather, "barrier", [], [])  # of no tensors

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have reached the barrier. A DeadlockError names the others."""
        self._issue(data.all_gather, "monitored_barrier", [], []).wait()

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
        members = [data.peer_of("split_group", "ranks", rank, self._size) for rank in ranks]
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
