"""States of hooks with one error in them: each value in turn is wrong, or missing."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: The path to an entry of a state: its keys, from the outermost on.
Path = tuple[Any, ...]


class Subclass(torch.Tensor):
    """A tensor of a subclass."""


class Text(str):
    """A subclass of str."""


class Number(int):
    """A subclass of int."""


def without_memory(*shape: int) -> Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def of_tensor(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A change for tensors; other values become a changed tensor of two numbers."""
    return lambda value: change(value if isinstance(value, Tensor) else torch.ones(2))


def as_dtype(name: str) -> Callable[[Any], Any]:
    return of_tensor(lambda tensor: tensor.detach().to(getattr(torch, name)))


#: Dtypes that a state's tensors may be changed to.
DTYPES = (
    *("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e8m0fnu", "int64", "uint8", "bool", "complex64", "complex128"),
)

#: Changes of a value, by name.
CHANGES: dict[str, Callable[[Any], Any]] = {
    **{name: as_dtype(name) for name in DTYPES},
    "quantized": of_tensor(
        lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)
    ),
    "sparse": of_tensor(lambda tensor: tensor.float().to_sparse()),
    "meta": of_tensor(lambda tensor: tensor.to("meta")),
    "requires grad": of_tensor(lambda tensor: tensor.float().requires_grad_()),
    "parameter": of_tensor(lambda tensor: nn.Parameter(tensor.float())),
    "subclass": of_tensor(lambda tensor: tensor.as_subclass(Subclass)),
    "conjugate": of_tensor(lambda tensor: tensor.to(torch.complex64).conj()),
    "expanded": of_tensor(lambda tensor: torch.zeros(()).expand(tensor.shape)),
    "transposed": of_tensor(lambda tensor: tensor.mT if tensor.dim() > 1 else tensor[None]),
    "without memory": of_tensor(lambda tensor: without_memory(*tensor.shape)),
    "four-bit": of_tensor(
        lambda tensor: torch.zeros(tensor.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ),
    "not finite": of_tensor(lambda tensor: torch.full(tensor.shape, torch.nan)),
    "scalar": lambda value: torch.tensor(3),
    "numbers": lambda value: torch.tensor([4, 8]),
    "str": lambda value: "three",
    "str of its own": lambda value: Text("0.weight"),
    "int of its own": lambda value: Number(4),
    "long str": lambda value: "x" * 100_000,
    "bytes": lambda value: b"three",
    "None": lambda value: None,
    "NaN": lambda value: float("nan"),
    "float": lambda value: 8.0,
    "true": lambda value: True,
    "false": lambda value: False,
    "zero": lambda value: 0,
    "negative": lambda value: -1,
    "huge": lambda value: 1 << 70,
    "endless": lambda value: 1 << 20_000,
    "object": lambda value: object(),
    "list": lambda value: [torch.ones(1)],
    "empty list": lambda value: [],
    "tuple": lambda value: (1, 2),
    "list in a list": lambda value: [[torch.ones(1)]],
    "odd names": lambda value: [["0.weight", 3, None]],
    "dict": lambda value: {},
    "dict of tensors": lambda value: {3: torch.ones(2), None: {}},
    "dict in a dict": lambda value: {"error": {"0.weight": {"more": torch.ones(2)}}},
    "ordered": lambda value: OrderedDict(value) if isinstance(value, dict) else OrderedDict(),
    "keys that are no names": lambda value: (
        {(key, 1): one for key, one in value.items()} if isinstance(value, dict) else {0: value}
    ),
    "more": lambda value: {**value, "more": 3} if isinstance(value, dict) else [value, 3],
    "more tensors": lambda value: (
        {**value, 7: torch.ones(2)} if isinstance(value, dict) else [value, torch.ones(2)]
    ),
}

#: The entry is removed.
GONE = "gone"


def paths_of(value: Any, here: Path = ()) -> list[Path]:
    """The paths to all entries of a state, including the state itself."""
    found = [here]
    keys: Any = ()
    if isinstance(value, dict):
        keys = sorted(value, key=str)  # ranks may have them in different orders
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        found += paths_of(value[key], (*here, key))
    return found


def changed(value: Any, path: Path, change: str) -> Any:
    """A copy of a state with one changed entry."""
    if not path:
        return CHANGES[change](value)
    key, *rest = path
    copied = list(value) if isinstance(value, list) else dict(value)
    if rest or change != GONE:
        copied[key] = changed(value[key], tuple(rest), change)
    else:
        del copied[key]
    return copied


def some_changes(state: dict[str, Any], seed: int, count: int) -> list[tuple[Path, str]]:
    """Random pairs of an entry and a change, with equally many for each of the state's keys."""
    generator = random.Random(seed)
    by_key: dict[Any, list[Path]] = {}
    for path in paths_of(state):
        by_key.setdefault(path[0] if path else None, []).append(path)
    keys = list(by_key)
    changes = [*CHANGES, *[GONE] * 4]
    found = []
    for number in range(count):
        path = generator.choice(by_key[keys[number % len(keys)]])
        change = generator.choice(changes)
        found.append((path, change if path or change != GONE else "dict"))
    return found


def is_named(path: Path, message: str) -> bool:
    """Whether an error names its entry: by its keys, or by keys inside it."""
    if not path:
        return "state" in message
    if len(path) > 2 and path[0] not in ("buckets", "local_steps"):
        return str(path[1]) in message and str(path[2]) in message
    inside = "it has ", "lacks", "of rank"
    return any(said in message for said in (*map(str, path), *inside)) or (
        path[0] == "world_size" and "ranks" in message
    )
