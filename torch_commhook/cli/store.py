"""``store``: runs the store in which the ranks of an elastic training meet, until it is ended."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence

#: As torchrun's.
DEFAULT_PORT = 29400


def main(argv: Sequence[str]) -> int:
    """Run ``store argv``; returns 0 when it is ended by SIGTERM, 1 where the port is taken."""
    from torch_commhook.cli.main import OneLineParser

    parser = OneLineParser(
        prog="commhook store",
        description="Run the store in which the ranks of an elastic training meet, until Ctrl-C "
        "or SIGTERM. It needs little of its host, and must outlive the ranks: give each of them "
        "torch_commhook.Elastic(store='HOST:PORT', ...).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="to listen on; 0 takes one that is free"
    )
    port = parser.parse_args(argv).port

    import torch.distributed as dist

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:  # the first line; a stack of C++ follows
        print(f"commhook store: {str(error).splitlines()[0]}")
        return 1
    print(f"commhook store: listening on port {store.port}", flush=True)
    ended.wait()
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {port}")
    return port
