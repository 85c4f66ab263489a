"""Differences between releases of torch, and the results of the tests on each of them."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

_PAGE = "see docs/torch_versions.md"
#: Whether Dynamo traces a hook that writes and that the compiled function registers; otherwise the
#: graph breaks.
HOOKS_MAY_WRITE = torch.__version__ < "2.15"
#: PyTorch's own hooks that the compiled function registers: Dynamo before 2.13 does not support
#: their closures.
closures_fail = pytest.mark.xfail(
    torch.__version__ < "2.13", strict=True, raises=UnboundLocalError, reason=_PAGE
)
#: Whether a Work can tell its error.
WORKS_HAVE_ERRORS = torch.__version__ >= "2.13"
#: Whether PyTorch's older FullyShardedDataParallel continues after a failed forward, with NO_SHARD
#: and use_orig_params.
FLATTENED_GOES_ON = torch.__version__ < "2.15"


def since(release: str) -> pytest.MarkDecorator:
    """Skips a test on older releases, such as those before ``"2.13"``."""
    return pytest.mark.skipif(torch.__version__ < release, reason=_PAGE)


def store(path: Path, code: str, counts: dict[str, int]) -> None:
    """Store the counts by outcome of a run that has passed, for this torch, with the commit."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    version, _, build = torch.__version__.partition("+")
    stored[version] = {
        "build": build,
        "python": platform.python_version(),
        "code": code,
        **{each: counts.get(each, 0) for each in ("passed", "skipped", "xfailed")},
    }
    path.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
