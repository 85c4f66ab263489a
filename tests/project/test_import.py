"""What an import of the package leaves out."""

from __future__ import annotations

import subprocess
import sys

#: What takes seconds, or only some users need: the compiler, and what uses it or plans steps.
LEFT_OUT = ("torch._dynamo", "torch_commhook.reducer.reducer", "torch_commhook.attachment.choosing")


def test_the_package_leaves_the_compiler_out() -> None:
    program = f"import sys, torch_commhook; print([m for m in {LEFT_OUT} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
