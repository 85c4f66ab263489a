"""What a rank says when it needs the store, and the store has ended."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from torch_commhook.elastic.membership import Lost
from torch_commhook.elastic.ranks import ElasticRanks


class _WithoutStore:
    def change(self, steps: int, lost: Lost, *, lets_in: bool) -> None:
        raise dist.DistNetworkError("Broken pipe")


def test_the_error_names_the_store_and_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(ElasticRanks)
    ranks.steps, ranks._reason = 3, ""
    ranks.membership = _WithoutStore()  # type: ignore[assignment]
    left = []
    monkeypatch.setattr(ranks, "leave", lambda: left.append(True))
    cause = RuntimeError("rank 2 has ended")
    with pytest.raises(RuntimeError, match=r"the store .* does not answer .*Broken pipe") as raised:
        ranks._change(Lost(), cause)
    assert raised.value.__cause__ is cause and left
