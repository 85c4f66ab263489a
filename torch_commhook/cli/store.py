"""``store``: runs the store through which the ranks of an elastic training meet."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from torch_commhook.cli.option_types import number

#: torchrun's default.
DEFAULT_PORT = 29400


def main(argv: Sequence[str]) -> int:
    """Run ``store argv`` until SIGTERM; returns 0, or 1 if the port is taken."""
    from torch_commhook.cli.main import OneLineParser

    parser = OneLineParser(
        prog="commhook store",
        description="Run the store through which the ranks of an elastic training meet, until "
        "Ctrl-C or SIGTERM. The store needs little memory and time, and must outlive the ranks. "
        "Give each rank torch_commhook.Elastic(store='HOST:PORT', name=...).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one"
    )
    port = parser.parse_args(argv).port

    import torch.distributed as dist

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:  # only its first line: a C++ stack follows
        print(f"commhook store: error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(f"commhook store: listening on port {store.port}", flush=True)
    ended.wait()
    return 0


def _port(text: str) -> int:
    port = number(text, int, "a whole number")
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {port}")
    return port
