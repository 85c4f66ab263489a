"""Differences between releases of torch, for tests."""

from __future__ import annotations

import pytest
import torch

#: Whether Dynamo traces a hook that writes and that the compiled function registers; otherwise the
#: graph breaks.
HOOKS_MAY_WRITE = torch.__version__ < "2.15"
#: Hooks that the compiled function registers: Dynamo 2.11 does not support their closures.
not_on_2_11 = pytest.mark.skipif(torch.__version__ < "2.12", reason="see docs/torch_versions.md")
#: Whether PyTorch's older FullyShardedDataParallel continues after a failed forward, with NO_SHARD
#: and use_orig_params.
FLATTENED_GOES_ON = torch.__version__ < "2.15"
