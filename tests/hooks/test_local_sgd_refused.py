"""How ``hooks.local_sgd`` prints, and where it refuses to run."""

from __future__ import annotations

from contextlib import suppress

import pytest
from local_training import (
    MEAN,
    ROADS,
    attached,
    backward,
    net,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import hooks
from torch_commhook.hooks import local_sgd, outer_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


def test_it_prints_as_it_is_written() -> None:
    assert str(local_sgd(8)) == "local_sgd(8)"
    assert str(local_sgd(8, outer=outer_sgd(0.7, 0.9))) == "local_sgd(8)"
    assert (
        str(local_sgd(8, outer=MEAN, hook=hooks.cast()))
        == "local_sgd(8, outer=outer_sgd(lr=1.0, momentum=0.0, nesterov=True), hook=cast(bfloat16))"
    )
    text = "local_sgd(8, fragments=3, delay=2, mix=0.25)"
    assert str(local_sgd(8, fragments=3, delay=2, mix=0.25)) == text


@pytest.mark.usefixtures("one_rank")
class TestRefused:
    def test_without_attach(self) -> None:
        model = DDP(net())
        model.register_comm_hook(None, local_sgd(2))
        with pytest.raises(RuntimeError, match=r"use torch_commhook\.attach"):
            backward(model, 0, 0)

    @pytest.mark.parametrize("road", ROADS)
    def test_uneven_inputs(self, road: str) -> None:
        model, handle = attached(local_sgd(2), road)
        with pytest.raises(RuntimeError, match="equally many steps"):
            handle.join()
        if road == "ddp":
            with pytest.raises(RuntimeError, match="equally many steps"), model.join():
                backward(model, 0, 0)
        with suppress(RuntimeError):
            handle.remove()
