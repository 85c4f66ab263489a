"""The documents' examples in Python run, and do what the text around them says.

The blocks of a page run in order and share their names. ``BEFORE`` gives a block the objects that
the text assumes (a model, a data loader); ``AFTER`` checks what the text promises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from cpp_libraries import library
from repository import ROOT, SUPPORT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves

from torch_commhook import attach, codecs, hooks, load_cpp_hooks
from torch_commhook.testing import DeadlockError, run_ranks, simulate

Names = dict[str, Any]

#: Pages and blocks that run elsewhere: in these files, or in tests of this folder.
ELSEWHERE = {
    "README.md": "tests/project/test_readme.py",
    "docs/tutorial.md": "tests/project/test_tutorial.py",
    **{f"docs/elastic.md {n}": "tests/elastic/test_elastic_training.py" for n in (1, 2)},
    **{f"docs/integrations.md {n}": "tests/integrations" for n in range(1, 9)},
    "docs/process_groups.md 7": "tests/integrations/test_torchft.py",
}
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"))
    if str(path.relative_to(ROOT)) not in ELSEWHERE
)


def _blocks(page: str) -> list[str]:
    return re.findall(r"^```py(?:thon)?\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def _step(model: nn.Module) -> list[float]:
    """A backward; returns the gradient of the last layer's bias."""
    model.zero_grad()
    model(torch.arange(32.0).view(4, 8)).sum().backward()
    gradient = list(model.parameters())[-1].grad
    assert gradient is not None
    return gradient.tolist()


# ---- what the text assumes -----------------------------------------------------------------------


def _a_model(names: Names) -> None:
    names.update(model=_model(), attach=attach, hooks=hooks)


def _a_model_and_inputs(names: Names) -> None:
    names.update(model=_model(), inputs=torch.arange(32.0).view(4, 8))


def _another_hook_averages(names: Names) -> None:
    """The hook of the block before averages gradients."""
    assert _step(names["model"]) == [4.0, 4.0]
    assert names["handle"].stats().bytes_sent is not None


def _a_library(names: Names) -> None:
    path = Path(library("clipped_mean"))
    Path(path.name).symlink_to(path)  # what a user has who builds it in place
    names["model"] = _model()


def _a_library_of_autograd_hooks(names: Names) -> None:
    load_cpp_hooks(library("autograd_hooks"))
    names["tensor"] = torch.zeros(3, requires_grad=True)


def _a_state_to_save(names: Names) -> None:
    names.update(torch=torch, model=_model(), rank=0, hook=hooks.error_feedback(hooks.sign()))
    names["handle"] = attach(names["model"], names["hook"])
    _step(names["model"])


def _a_checkpoint(names: Names) -> None:
    names["saved"] = names["handle"].state_dict()
    state = {"hook": names["saved"]}
    torch.distributed.checkpoint.save(state, checkpoint_id="folder")
    names["handle"].remove()
    names.update(folder="folder", handle=attach(names["model"], names["hook"]))


def _a_loop(names: Names) -> None:
    model = names["model"] = _model()
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names["loader"] = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(10)]
    names["loss_of"] = nn.functional.mse_loss


def _a_model_of_blocks(names: Names) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model.blocks = list(model)
    names.update(model=model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _a_group_and_a_model(names: Names) -> None:
    names.update(group=dist.group.WORLD, model=nn.BatchNorm1d(3).double())


BEFORE: dict[str, Callable[[Names], None]] = {
    "docs/cpp_hooks.md 1": _a_library,
    "docs/cpp_hooks.md 2": _a_library_of_autograd_hooks,
    "docs/see_what_it_costs.md 1": _a_model_and_inputs,
    "docs/index.md 1": _a_model,
    "docs/write_a_hook.md 1": _a_model,
    "docs/write_a_hook.md 2": _another_hook_averages,
    "docs/modes.md 1": _a_model,
    "docs/hooks.md 1": _a_model,
    "docs/hooks.md 2": _a_model,
    "docs/hooks.md 4": _a_model,
    "docs/hooks.md 5": _a_model,
    "docs/hooks.md 6": _a_state_to_save,
    "docs/hooks.md 7": _a_checkpoint,
    "docs/hooks.md 10": _a_model,
    "docs/local_sgd.md 1": _a_loop,
    "docs/process_groups.md 4": lambda names: names.update(model=nn.Linear(100, 100)),
    "docs/process_groups.md 6": _a_group_and_a_model,
    "docs/sharded.md 1": _a_model_of_blocks,
}


# ---- what the text promises ----------------------------------------------------------------------


def _the_hook_clips(names: Names) -> None:
    _step(names["model"])
    gradients = [parameter.grad for parameter in names["model"].parameters()]
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1.0, rel=1e-3)


def _the_gradient_is_clipped(names: Names) -> None:
    names["tensor"].backward(torch.tensor([-3.0, 0.5, 2.0]))
    assert names["tensor"].grad.tolist() == [-1.0, 0.5, 1.0]
    source = (SUPPORT / "cpp_hooks" / "autograd_hooks.cpp").read_text()
    shown = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs" / "cpp_hooks.md").read_text(), re.S)[-1]
    assert shown.removeprefix("#include <commhook/autograd_hook.h>\n\n") in source


def _gradients_are_compressed(names: Names) -> None:
    _step(names["model"])
    assert names["handle"].stats().steps == 1


def _the_scale_is_known(names: Names) -> None:
    _step(names["model"])
    assert names["handle"]._attached.memory.scaler is names["scaler"]


def _the_state_is_there(names: Names) -> None:
    state = names["handle"].state_dict()
    assert state["steps"] == 1 and _has_memory(state)


def _as_it_was_saved(names: Names) -> None:
    _the_state_is_there(names)
    torch.testing.assert_close(names["saved"]["rank0"], names["handle"].state_dict()["rank0"])


def _has_memory(state: Any) -> bool:
    return any(torch.is_tensor(each) and bool(each.any()) for each in tree_leaves(state["rank0"]))


def _the_error_is_remembered(names: Names, tolerance: float = 0.0) -> None:
    assert _step(names["model"]) == pytest.approx([4.0, 4.0], rel=tolerance)
    assert _has_memory(names["handle"].state_dict())


def _the_codec_has_a_hook(names: Names) -> None:
    _the_error_is_remembered(names, tolerance=0.1)
    values = torch.linspace(-1, 1, 1000)
    kept = [values.clone(), values.clone()]
    kept[1][500] = math.nan
    hook = hooks.compressed(names["bytes_of_steps"]())
    assert simulate(hook, [[values], [values]]).error < 0.005
    assert not simulate(hook, [[kept[0]], [kept[1]]]).result[0].isfinite().any()
    codecs.CODECS.pop("bytes_of_steps")  # other tests try all codecs


def _the_rounds_are_counted(names: Names) -> None:
    assert names["handle"].stats().steps == 2  # the eighth step, and the end


def _exchanges_after(*steps: int) -> Callable[[Names], None]:
    """Checks that the exchanges of the text's hook end with these steps."""

    def check(names: Names) -> None:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters())
        handle = attach(model, names["hook"])
        for number in range(1, steps[-1] + 1):
            _step(model)
            optimizer.step()
            assert handle.stats().steps == sum(each <= number for each in steps)
        handle.synchronize()
        assert handle.stats().steps > len(steps)
        handle.remove()

    return check


def _every_rank_for_itself(names: Names) -> None:
    """``Alone`` divides by the two ranks that it says it has, and adds nothing."""
    group = names["group"]
    assert _step(DDP(_model(), process_group=group)) == [2.0, 2.0]
    model = _model()
    attach(model, hooks.allreduce(), process_group=group)
    assert _step(model) == [2.0, 2.0]


def _known_to_torch_distributed(names: Names) -> None:
    group = names["group"]
    _every_rank_for_itself(names)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = _model()
    fully_shard(model, mesh=mesh)
    model(torch.arange(32.0).view(4, 8)).sum().backward()
    assert list(model.parameters())[-1].grad.to_local().tolist() == [4.0]
    made = dist.new_group(backend="alone")
    assert isinstance(made, names["Alone"])
    for each in (made, group):
        dist.destroy_process_group(each)


def _slow_passes_on(names: Names) -> None:
    x = torch.ones(2)
    dist.all_reduce(x, group=names["Slow"](dist.group.WORLD))
    assert x.tolist() == [1.0, 1.0]


def _shards_are_compressed(names: Names) -> None:
    names["model"](torch.ones(4, 100)).sum().backward()
    # The parameters in forward and their gradients.
    assert names["group"].compressed >= 2
    dist.destroy_process_group(names["group"])


def _the_hook_takes_part_in_reduce_scatters(names: Names) -> None:
    names["model"](torch.ones(4, 8)).sum().backward()
    assert names["handle"].stats().bytes_sent > 0


def _faults_are_injected(names: Names) -> None:
    for _ in range(11):
        x = torch.ones(2)
        dist.all_reduce(x, group=names["group"])
    assert [each.fault for each in names["group"].injected][-1] is names["faults"][1]
    assert bool(x.isnan().any())


AFTER: dict[str, Callable[[Names], None]] = {
    "docs/cpp_hooks.md 1": _the_hook_clips,
    "docs/cpp_hooks.md 2": _the_gradient_is_clipped,
    "docs/hooks.md 1": _gradients_are_compressed,
    "docs/hooks.md 4": _gradients_are_compressed,
    "docs/hooks.md 5": _the_scale_is_known,
    "docs/hooks.md 6": _the_state_is_there,
    "docs/hooks.md 7": _as_it_was_saved,
    "docs/index.md 1": _gradients_are_compressed,
    "docs/write_a_hook.md 2": _the_error_is_remembered,
    "docs/write_a_hook.md 3": _the_codec_has_a_hook,
    "docs/local_sgd.md 1": _the_rounds_are_counted,
    "docs/local_sgd.md 2": _exchanges_after(15),
    "docs/local_sgd.md 3": _exchanges_after(1, 2),
    "docs/process_groups.md 1": _every_rank_for_itself,
    "docs/process_groups.md 2": _known_to_torch_distributed,
    "docs/process_groups.md 3": _slow_passes_on,
    "docs/process_groups.md 4": _shards_are_compressed,
    "docs/process_groups.md 5": _faults_are_injected,
    "docs/sharded.md 1": _the_hook_takes_part_in_reduce_scatters,
}

#: Blocks that want more ranks than one.
RANKS = {
    "docs/modes.md 1": 2,
    "docs/process_groups.md 4": 2,
    "docs/process_groups.md 5": 2,
    "docs/sharded.md 1": 2,
}

#: Blocks that raise, and where their page has the message: the block of any language after it.
RAISES: dict[str, type[Exception]] = {"docs/testing.md 3": DeadlockError}


def _run(page: str, number: int, block: str, names: Names) -> None:
    block_name = f"{page} {number}"
    BEFORE.get(block_name, lambda names: None)(names)
    # "..." on a line of its own: what follows is another process's.
    for part in re.split(r"^\.\.\.\n", block, flags=re.M):
        if names.get("handle") is not None and "attach(model" in part:
            names.pop("handle").remove()
        exec(compile(part, block_name, "exec"), names)
    AFTER.get(block_name, lambda names: None)(names)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)])
def test_examples(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    names: Names = {}
    for number, block in enumerate(_blocks(page), 1):
        name = f"{page} {number}"
        if name in ELSEWHERE:
            continue
        expected = RAISES.get(name)
        if name in RANKS:
            run_ranks(lambda rank, of=(page, number, block): _run(*of, dict(names)), RANKS[name])
            continue
        if expected is None:
            _run(page, number, block, names)
            continue
        with pytest.raises(expected) as caught:
            _run(page, number, block, names)
        after = (ROOT / page).read_text().split(block + "```\n", 1)[1]
        message = re.search(r"^```\n(.*?)^```$", after, re.M | re.S)
        assert message is not None
        assert f"{expected.__name__}: {caught.value}\n" == message[1]


def test_the_tables_name_blocks_that_are_there() -> None:
    there = {f"{page} {number}" for page in PAGES for number in range(1, len(_blocks(page)) + 1)}
    pages = {name for name in ELSEWHERE if name.endswith(".md")}
    assert {*BEFORE, *AFTER, *RANKS, *RAISES, *ELSEWHERE} - pages <= there
    assert all((ROOT / name).exists() for name in (*pages, *ELSEWHERE.values()))
