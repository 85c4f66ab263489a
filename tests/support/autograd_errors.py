"""Wrong results of hooks, with the mode and the library that report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from autograd_apis import APIS, MODES, Ours

NODE_ERRORS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "list": (lambda *v: [v[0][0]], TypeError, "expected tuple, but hook returned 'list'"),
    "tensor": (lambda *v: v[0][0], TypeError, "expected tuple, but hook returned 'Tensor'"),
    "too many": (
        lambda *v: (*v[0], None), RuntimeError,
        r"has returned an incorrect number of values \(got 2, but expected 1\)",
    ),
    "a number": (lambda *v: (3,), TypeError, "expected Variable, but hook returned 'int'"),
    "dtype": (lambda *v: (v[0][0].double(),), RuntimeError, "has changed the type of value"),
    "size": (lambda *v: (v[0][0][:1],), RuntimeError, "has changed the size of value"),
    "broadcast": (lambda *v: (v[0][0][None],), RuntimeError, "has changed the size of value"),
    "layout": (lambda *v: (v[0][0].to_sparse(),), RuntimeError, "has changed the type of value"),
    "device": (lambda *v: (v[0][0].to("meta"),), RuntimeError, "has changed the type of value"),
}  # fmt: skip
TENSOR_ERRORS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a tuple": (lambda g: (g,), TypeError, "expected Variable, but hook returned 'tuple'"),
    "a number": (lambda g: 3, TypeError, "expected Variable, but hook returned 'int'"),
    "dtype": (lambda g: g.double(), RuntimeError, "has changed the type of value"),
    "size": (lambda g: g[:1], RuntimeError, "has changed the size of value"),
    "broadcast": (lambda g: g[None], RuntimeError, "has changed the size of value"),
    "layout": (lambda g: g.to_sparse(), RuntimeError, "has changed the type of value"),
    "device": (lambda g: g.to("meta"), RuntimeError, "has changed the type of value"),
}


def runs(api: Any, mode: str) -> bool:
    """Whether results are checked: PyTorch does not check them under compiled autograd."""
    return api is Ours or mode == "eager"


CHECKED = [(api, mode) for api in APIS for mode in MODES if runs(api, mode)]
checked = pytest.mark.parametrize(
    ("api", "mode"), CHECKED, ids=[f"{api.name}-{mode}" for api, mode in CHECKED]
)
