"""A reducer's present buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torch_commhook.buckets.assignment import assign_buckets, split_by_kind
from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.step.attached_hook import Attached


class FormedBuckets:
    """A reducer's buckets, which are rebuilt once the order of the gradients is known.

    Args:
        parameters: the reducer's parameters.
        capacity_bytes: the capacity of a bucket.
        as_views: whether gradients stay in the buckets' memory, as views.

    Attributes:
        all: the buckets, in order.
        places: by parameter name: its bucket, and its place there.
    """

    def __init__(
        self, parameters: ReducerParameters, *, capacity_bytes: int, as_views: bool
    ) -> None:
        self._parameters = parameters
        self._capacity_bytes = capacity_bytes
        self._as_views = as_views
        self.all: list[BucketState] = []
        self.places: dict[str, tuple[BucketState, int]] = {}

    def fill_in_order(self, order: Sequence[int]) -> None:
        """Fill buckets with the parameters in an order of their numbers."""
        parameters, order = self._parameters, list(order)
        assigned = assign_buckets(
            [parameters.tensors[i] for i in order],
            [parameters.sparse[i] for i in order],
            self._capacity_bytes,
        )
        self._form([[order[place] for place in places] for places in assigned])

    def fill_as(self, buckets: Sequence[Sequence[str]], names: Sequence[str]) -> bool:
        """Copy the buckets of a model with the same parameters. Their dtypes may differ.

        Args:
            buckets: the names of the parameters in each bucket.
            names: the names there of the reducer's parameters.

        Returns:
            Whether the parameters are the same. If not, nothing changes.
        """
        numbers = {name: number for number, name in enumerate(names)}
        if sorted(numbers) != sorted(name for bucket in buckets for name in bucket):
            return False
        parameters, assigned = self._parameters, []
        for bucket in buckets:
            members = [numbers[name] for name in bucket]
            kinds = split_by_kind(
                [parameters.tensors[i] for i in members], [parameters.sparse[i] for i in members]
            )
            assigned += [[members[place] for place in places] for places in kinds]
        self._form(assigned)
        return True

    def _form(self, assigned: Sequence[Sequence[int]]) -> None:
        parameters = self._parameters
        self.all = [
            BucketState(
                index,
                members,
                [parameters.tensors[i] for i in members],
                sparse=parameters.sparse[members[0]],
                as_views=self._as_views,
            )
            for index, members in enumerate(assigned)
        ]
        self.places.clear()
        for bucket in self.all:
            for place, number in enumerate(bucket.members):
                self.places[parameters.names[number]] = bucket, place

    def clear(self) -> None:
        """Release all buckets."""
        self.places.clear()
        self.all.clear()

    def names(self) -> list[list[str]]:
        """The names of each bucket's parameters."""
        return [[self._parameters.names[i] for i in bucket.members] for bucket in self.all]

    def bucket_of_each(self) -> list[int]:
        """The bucket of each parameter, by number."""
        bucket_of = [0] * len(self._parameters)
        for bucket in self.all:
            for number in bucket.members:
                bucket_of[number] = bucket.index
        return bucket_of

    def set_arrived(self, missing: set[int]) -> None:
        """Tell the buckets which gradients are missing in an eager backward."""
        for bucket in self.all:
            if not missing:
                bucket.pending = 0
                continue
            here = [number not in missing for number in bucket.members]
            bucket.pending = here.count(False)
            bucket.arrived = [
                parameter if has else None
                for parameter, has in zip(bucket.parameters, here, strict=True)
            ]

    def prepare_memory(self, attached: Attached | None) -> None:
        """Let the hook ask for its memory of each bucket, outside of compilers."""
        for bucket in self.all:
            bucket.memory = (
                None if attached is None else attached.memory_of(bucket.parameters, bucket.index)
            )
