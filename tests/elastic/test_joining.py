"""What a donor and a new rank send each other: pieces and their sizes, and what fails."""

from __future__ import annotations

import copy
import json
import queue
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook import Elastic, __version__, attach
from torch_commhook.collectives.agreement import packed, unpacked
from torch_commhook.elastic import joining
from torch_commhook.elastic.joining import (
    Donor,
    InBackground,
    NewRank,
    StateChunks,
    groups_of,
    load_groups,
    sum_of_bits,
)
from torch_commhook.step.connected_group import hashed

DONOR, NEW = 0, 1


class _Done:
    def wait(self) -> None:
        """It is."""


class _Connection:
    """Two ranks of a process: a message is sent once it is received, as large ones are."""

    def __init__(self) -> None:
        # Not a defaultdict: two threads that ask at once would get two queues.
        self.messages: dict[int, queue.Queue[Tensor]] = {DONOR: queue.Queue(), NEW: queue.Queue()}

    def at(self, own: int) -> Any:
        connection = self

        class Group:
            def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
                connection.messages[rank].put(tensors[0].clone())
                connection.messages[rank].join()
                return _Done()

            def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
                tensors[0].copy_(connection.messages[own].get(timeout=20))
                connection.messages[own].task_done()
                return _Done()

        return Group()


def _pieces() -> StateChunks:
    model = nn.Linear(100, 100)
    return StateChunks(list(model.parameters()), [torch.optim.SGD(model.parameters())])


@pytest.mark.parametrize(
    ("first", "least", "late", "receiving", "sizes"),
    [
        # So long the new rank loads data, and its pieces grow all the same.
        (200, 1, 0.1, 1e-4, [50, 100, 200, 400, 800, 1600, 3200]),
        # Each message takes long, and the pieces shrink to the least size.
        (800, 400, 0.0, 0.02, [200, 240, 192, 154, 123, 100, 100]),
    ],
    ids=["a late rank", "slow messages"],
)
def test_sizes_of_pieces(
    first: int,
    least: int,
    late: float,
    receiving: float,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def receive_number(group: Any, rank: int) -> int:
        nonlocal now
        came = number(group, rank)
        if rank == NEW:  # on the donor's thread, while no other changes the time
            now += receiving
        return came

    number = joining.receive_number
    monkeypatch.setattr(joining, "_FIRST_BYTES", first)
    monkeypatch.setattr(joining, "_LEAST_BYTES", least)
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(joining, "receive_number", receive_number)
    connection = _Connection()
    donor = Donor(_pieces(), connection.at(DONOR), NEW, joining.packed({}))
    new = NewRank(_pieces())
    came = []
    for step in range(len(sizes)):
        donor.begin_step()
        now += late
        new.begin_step(connection.at(NEW), DONOR, is_first=step == 0)
        new.receive()
        donor.wait()
        before = new.at
        new.write()
        came.append(new.at - before)
    assert came == sizes


@pytest.mark.parametrize("compared", [0, 1, 5])
def test_a_donor_does_not_serve_senseless_requests(
    compared: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = _Connection()
    donor = Donor(_pieces(), connection.at(DONOR), NEW, joining.packed({}))
    donor.end(joining.packed({}))
    for _ in range(2):
        joining.receive(connection.at(NEW), DONOR, own=0)
    # The donor has two parameters.
    joining.send(torch.ones(compared, dtype=torch.uint8), connection.at(NEW), DONOR)
    donor.wait()
    assert "a new rank does not get the last part of its state" in caplog.text


def test_a_new_rank_allocates_no_impossible_length() -> None:
    connection = _Connection()
    sends = InBackground(lambda: joining.send_number(1 << 50, connection.at(DONOR), NEW))
    with pytest.raises(ValueError, match=f"announces a message of {1 << 50} bytes"):
        joining.receive(connection.at(NEW), DONOR, own=1 << 20)
    sends.result()


def test_any_error_of_a_call_in_the_background_is_raised() -> None:
    background: InBackground[None] = InBackground(lambda: {}["no such name"])
    with pytest.raises(KeyError, match="no such name"):
        background.result()


# ---- new ranks whose models do not fit -----------------------------------------------------------


def _model(frozen: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("frozen", nn.Parameter(torch.zeros(frozen), requires_grad=False))
    return model


def _settings() -> Elastic:
    return Elastic(min_ranks=1, name="run", ranks=1, grace=0.4, store=dist.HashStore())


def test_frozen_parameters_must_be_the_same() -> None:
    settings, model = _settings(), _model(3)  # the training ends with the model
    text = "parameters that are not trained must be the same .* training 'run' .* Elastic.name=."
    with (
        attach(model, "allreduce", elastic=settings),
        pytest.raises(RuntimeError, match=text),
    ):
        attach(_model(4), "allreduce", elastic=settings)


def test_another_version_of_the_library_is_refused() -> None:
    settings, model = _settings(), _model(3)
    with mock.patch("torch_commhook.attachment.road.__version__", "0.0.9"):
        handle = attach(model, "allreduce", elastic=settings)
    text = f"version of torch_commhook must be .* this one has '{__version__}', .* has '0.0.9'"
    with handle, pytest.raises(RuntimeError, match=text):
        attach(_model(3), "allreduce", elastic=settings)


def test_the_settings_of_a_training_end_with_it() -> None:
    settings = _settings()
    attach(_model(3), "allreduce", elastic=settings).remove()
    with attach(_model(4), "allreduce", elastic=settings) as handle:
        assert handle.steps == 0


def test_a_rank_with_the_settings_of_a_training_that_has_ended_owns_them() -> None:
    """So that a rank with others finds this one before it has requested to join."""
    settings, first = _settings(), []
    assert isinstance(settings.store, dist.Store)
    store = dist.PrefixStore(f"commhook-elastic/{hashed('run')}", settings.store)
    for _ in range(2):
        attach(_model(3), "allreduce", elastic=settings).remove()
        first.append(json.loads(store.get("settings"))["the first rank"])
    assert first == ["1", "2"]


@pytest.mark.parametrize(
    "text", [b"[]", b"[" * 100_000, b'{"the first rank": 1e999}', b"\xff"], ids=range(4)
)
def test_settings_that_another_program_has_written(text: bytes) -> None:
    settings = _settings()
    assert isinstance(settings.store, dist.Store)
    dist.PrefixStore(f"commhook-elastic/{hashed('run')}", settings.store).set("settings", text)
    with pytest.raises(RuntimeError, match="from this version of the library, got '"):
        attach(_model(3), "allreduce", elastic=settings)


# ---- pieces --------------------------------------------------------------------------------------

_Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, _Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def _deep_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Conv2d(3, 4, 3), nn.Linear(1, 1), nn.Linear(5, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("short", nn.Parameter(torch.randn(6).bfloat16()))
    model.register_parameter("frozen", nn.Parameter(torch.randn(9), requires_grad=False))
    return model


def _step(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shared = [
        torch.randn(each.shape, generator=generator).to(each.dtype) if each.requires_grad else None
        for each in models[0].parameters()
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter, gradient in zip(model.parameters(), shared, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def _both(make: _Make, done: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """A rank that has done some steps, and a new one."""
    models = [_deep_model(0), _deep_model(1)]
    optimizers = [make(model.parameters()) for model in models]
    for seed in range(done):
        _step(models[:1], optimizers[:1], seed)
    load_groups(optimizers[1], groups_of(optimizers[0]))
    return models, optimizers


def _both_pieces(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> list[StateChunks]:
    """The pieces of the donor and of the new rank."""
    return [
        StateChunks(list(model.parameters()), [optimizer])
        for model, optimizer in zip(models, optimizers, strict=True)
    ]


def _send_in_pieces(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], nbytes: int
) -> list[StateChunks]:
    """Send one piece after another, with a step of both ranks after each."""
    donor, new = _both_pieces(models, optimizers)
    at, seed = 0, 100
    while at < donor.numel:
        before = at
        parts, at = donor.take(at, nbytes)
        assert before < at
        new.put(unpacked(packed(parts)))
        _step(models, optimizers, seed)
        seed += 1
    return [donor, new]


def _remember_the_same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        keys = state.keys()
        return keys == other.keys() and all(_remember_the_same(state[k], other[k]) for k in keys)
    same: bool = torch.equal(state, other) if isinstance(state, Tensor) else state == other
    return same


def _are_equal(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> bool:
    own, new = (dict(model.named_parameters()) for model in models)
    parameters = all(torch.equal(own[name], new[name]) for name in own)
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    groups = states[0]["param_groups"] == states[1]["param_groups"]
    return parameters and groups and _remember_the_same(*(each["state"] for each in states))


@pytest.mark.parametrize("nbytes", [1, 60, 400, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_has_come_stays_as_the_others_have_it(name: str, nbytes: int) -> None:
    models, optimizers = _both(OPTIMIZERS[name], 3)
    donor, new = _send_in_pieces(models, optimizers, nbytes)
    assert new.sums() == donor.sums()
    assert _are_equal(models, optimizers)


@pytest.mark.parametrize("nbytes", [8, 40])
def test_an_optimizer_that_looks_at_whole_parameters_is_found_out(nbytes: int) -> None:
    models, optimizers = _both(
        lambda all_: torch.optim.Adafactor([p for p in all_ if p.numel()], lr=0.1), 3
    )
    donor, new = _send_in_pieces(models, optimizers, nbytes)
    pairs = enumerate(zip(donor.sums(), new.sums(), strict=True))
    different = [index for index, (theirs, own) in pairs if theirs != own]
    assert different and not _are_equal(models, optimizers)
    new.put(unpacked(packed(donor.whole(different))))
    assert new.sums() == donor.sums() and _are_equal(models, optimizers)


def test_an_optimizer_finds_all_it_needs_with_the_first_elements() -> None:
    models: list[nn.Module] = [nn.Linear(7, 5), nn.Linear(7, 5)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adafactor(model.parameters()) for model in models
    ]
    _step(models[:1], optimizers[:1], 0)
    donor, new = _both_pieces(models, optimizers)
    new.put(unpacked(packed(donor.take(0, 8)[0])))
    _step(models, optimizers, 1)  # else it raises
    first, second = (
        optimizer.state[next(model.parameters())].keys()
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    assert first == second


def test_a_parameter_of_which_nothing_is_remembered() -> None:
    models, optimizers = _both(OPTIMIZERS["AdamW"], 0)
    _step(models[1:], optimizers[1:], 5)  # the new rank's alone
    donor, new = _both_pieces(models, optimizers)
    parts, _ = donor.take(0, 1 << 20)
    new.put(parts)
    assert donor.sums() == new.sums() and not optimizers[1].state


def test_what_the_donor_does_not_remember_is_forgotten() -> None:
    models, optimizers = _both(OPTIMIZERS["momentum"], 1)
    donor, new = _both_pieces(models, optimizers)
    first = next(models[1].parameters())
    optimizers[1].state[first]["old"] = torch.ones(3)
    parts, _ = donor.take(0, 1 << 20)
    new.put(parts)
    assert donor.sums() == new.sums() and "old" not in optimizers[1].state[first]


def test_what_an_optimizer_remembers_of_no_parameter() -> None:
    models, optimizers = _both(OPTIMIZERS["AdamW"], 1)
    donor, new = _both_pieces(models, optimizers)
    optimizers[0].state["count"] = {"steps": 7}
    optimizers[1].state["other"] = 3
    new.put_others(unpacked(packed(donor.others())))
    assert dict(optimizers[1].state) == {"count": {"steps": 7}}


def test_parameters_that_an_optimizer_alone_has() -> None:
    extra = [nn.Parameter(torch.full((4,), float(number))) for number in range(2)]
    models = [nn.Linear(2, 2) for _ in extra]
    optimizers = [
        torch.optim.SGD([*model.parameters(), each], lr=0.1, momentum=0.9)
        for model, each in zip(models, extra, strict=True)
    ]
    donor, new = _both_pieces(models, optimizers)
    assert donor.numel == 10
    new.put(donor.take(0, 1 << 20)[0])
    assert torch.equal(*extra)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
def test_other_bits_have_another_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(11, 3) * 9).to(dtype)
    other = tensor.t().clone().t()
    assert sum_of_bits(other) == sum_of_bits(tensor)
    other[3, 1] = not other[3, 1] if dtype == torch.bool else other[3, 1] * 2 + 1
    assert sum_of_bits(other) != sum_of_bits(tensor)
    assert sum_of_bits(copy.deepcopy(tensor)) == sum_of_bits(tensor)
    assert sum_of_bits(tensor[:, ::2]) == sum_of_bits(tensor[:, ::2].contiguous())
    # The same elements at other places, as after steps that move one element each.
    assert sum_of_bits(other.flip(0)) != sum_of_bits(other)
