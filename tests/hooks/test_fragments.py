"""How a model's parameters are cut into fragments."""

from __future__ import annotations

import random

import pytest
from local_training import attached, net
from torch import nn

from torch_commhook import attach
from torch_commhook.hooks import local_sgd
from torch_commhook.hooks.fragments import fragments_of


def _transformer(layers: int) -> dict[str, int]:
    sizes = {"embed.weight": 100, "head.weight": 60, "norm.weight": 4, "norm.bias": 4}
    for layer in range(layers):
        sizes |= {f"layers.{layer}.attn.0.weight": 30, f"layers.{layer}.mlp.2.bias": 5}
    return sizes


def test_layers_are_dealt_out_in_turn() -> None:
    found = fragments_of(_transformer(12), 3)
    for layer in range(12):
        assert found[f"layers.{layer}.attn.0.weight"] == layer % 3
        assert found[f"layers.{layer}.mlp.2.bias"] == layer % 3


def test_modules_outside_of_layers_go_where_there_is_least() -> None:
    found = fragments_of(_transformer(7), 3)  # 105, 70 and 70 elements in layers
    assert found["embed.weight"] == 1
    assert found["head.weight"] == 2
    assert found["norm.weight"] == found["norm.bias"] == 0


def test_layers_of_several_lists_are_numbered_on() -> None:
    sizes = {f"{part}.{layer}.weight": 1 for part in ("up", "down.blocks") for layer in range(5)}
    found = fragments_of(sizes, 4)
    assert [found[f"down.blocks.{layer}.weight"] for layer in range(5)] == [0, 1, 2, 3, 0]
    assert [found[f"up.{layer}.weight"] for layer in range(5)] == [1, 2, 3, 0, 1]


def test_the_order_does_not_matter() -> None:
    sizes = list(_transformer(11).items())
    wanted = fragments_of(dict(sizes), 4)
    for seed in range(5):
        random.Random(seed).shuffle(sizes)
        assert fragments_of(dict(sizes), 4) == wanted


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"a.weight": 8, "a.bias": 1, "b.weight": 4}, 2),
        ({"a.weight": 8, "a.bias": 1, "b.weight": 4}, 3),
        ({"layers.0.weight": 8, "layers.1.weight": 8, "head.weight": 2}, 3),
        ({"weight": 0, "bias": 0, "other": 0}, 3),
        (_transformer(3), 10),
    ],
)
def test_no_fragment_is_empty(sizes: dict[str, int], count: int) -> None:
    found = fragments_of(sizes, count)
    assert found.keys() == sizes.keys()
    assert set(found.values()) == set(range(count))


@pytest.mark.usefixtures("one_rank")
def test_more_fragments_than_parameters() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match="fragments must be at most 2, the number of the model's parameters"
    ):
        attach(model, local_sgd(8, fragments=3))
    attach(model, local_sgd(8, fragments=2)).remove()
    _, handle = attached(local_sgd(20), model=net())
    with pytest.raises(ValueError, match="fragments must be at most 12"):
        handle.replace(local_sgd(20, fragments=13))
    assert handle.is_attached
    handle.remove()
