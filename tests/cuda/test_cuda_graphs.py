"""A whole step of each hook in a CUDA graph: the bits and the states of eager steps.

With one rank, whose collectives copy: NCCL takes no two ranks of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from captured_training import CAPTURED, Training
from kernel_device import no_waiting_on_gpu

from torch_commhook import hooks

pytestmark = pytest.mark.cuda

#: DDP measures its first steps with events, which no graph can hold.
WARM = {"module": 3, "ddp": 12}
REPLAYED = 3


@pytest.fixture(autouse=True)
def one_rank_on_gpu(tmp_path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _captured(name: str, road: str, warm: int) -> tuple[Training, torch.cuda.CUDAGraph]:
    """A graph of a step, after eager steps on a stream beside the current one.

    DDP is made there, too: what adds up its gradients keeps the stream on which it was made, and
    no graph takes in the default stream.
    """
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        own = Training(road, CAPTURED[name](), "cuda")
        own.run(0, warm, own.step)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.step()
    return own, graph


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("name", CAPTURED)
def test_replays_do_what_eager_steps_do(name: str, road: str) -> None:
    warm = WARM[road]
    eager = Training(road, CAPTURED[name](), "cuda")
    eager.run(0, warm + REPLAYED + 1, eager.step)

    own, graph = _captured(name, road, warm)
    assert own.handle.state_dict().get("steps", warm) == warm
    own.run(warm, REPLAYED, graph.replay)
    own.run(warm + REPLAYED, 1, own.step)  # and eager goes on
    torch.cuda.synchronize()

    own.assert_ends_as(eager)


@pytest.mark.parametrize("name", CAPTURED)
def test_no_step_waits_for_the_device(name: str) -> None:
    own = Training("module", CAPTURED[name](), "cuda")
    own.run(0, WARM["module"], own.step)
    with no_waiting_on_gpu():
        own.step()
    own.handle.remove()


def test_what_changes_on_the_host_is_refused() -> None:
    own = Training("module", hooks.after(9, hooks.blockwise(8)), "cuda")
    own.run(0, WARM["module"], own.step)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="is still to come"), torch.cuda.graph(graph):
        own.step()
    own.handle.remove()


def test_memory_is_free_once_the_step_has_waited() -> None:
    """References hold gradients: the allocator is told of none, and waits for none."""
    own = Training("module", hooks.blockwise(8), "cuda")
    own.run(0, WARM["module"], own.step)

    def active() -> int:
        own.optimizer.zero_grad(set_to_none=True)
        found: int = torch.cuda.memory_stats()["active_bytes.all.current"]
        return found

    before = active()
    for _ in range(3):
        torch.cuda._sleep(10_000_000)
        own.model(own.x).square().mean().backward()
        assert active() == before
    own.handle.remove()
