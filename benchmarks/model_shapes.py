"""Shapes of tensors for measurements: those of real models, and difficult lists."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import torch
from machine import FOLDER

MANY_SMALL = "1000x64"
#: As many tensors as ResNet-50 has, in one bucket of 25 MiB, DDP's default.
ONE_BUCKET = "161x40704"
#: A bucket of 14 MB, which a processor's last cache may hold together with its tensors. Every
#: second tensor begins in the middle of a cache line of the bucket.
CACHED = "158x22152"
SHAPES = ("resnet50", "gpt2", "bert_large", "llama3_8b_4layers", ONE_BUCKET, CACHED, MANY_SMALL)


def read_shapes(name: str) -> list[tuple[int, ...]]:
    """The shapes of a model's parameters, in its order."""
    if match := re.fullmatch(r"(\d+)x(\d+)", name):
        count, numel = map(int, match.groups())
        return [(numel,)] * count
    document = json.loads((FOLDER / "shapes" / f"{name}.json").read_text())
    return [tuple(parameter["shape"]) for parameter in document["parameters"]]


def leading(shapes: Sequence[tuple[int, ...]], elements: int) -> list[tuple[int, ...]]:
    """The first shapes, as many as have at most so many elements together."""
    chosen: list[tuple[int, ...]] = []
    for shape in shapes:
        elements -= torch.Size(shape).numel()
        if elements < 0:
            break
        chosen.append(shape)
    return chosen
