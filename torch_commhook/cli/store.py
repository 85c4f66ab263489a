"""``store``: runs the store through which the ranks of an elastic training meet."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from torch_commhook.cli.option_types import whole_number

DEFAULT_HOST = "127.0.0.1"
#: torchrun's default.
DEFAULT_PORT = 29400


def main(argv: Sequence[str]) -> int:
    """Run ``store argv`` until SIGTERM; returns 0, or 1 if it cannot listen there."""
    from torch_commhook.cli.main import OneLineParser

    parser = OneLineParser(
        prog="commhook store",
        description="Run the store through which the ranks of an elastic training meet, until "
        "Ctrl-C or SIGTERM. The store needs little memory and time, and must outlive the ranks. "
        "Give each rank torch_commhook.Elastic(store='HOST:PORT', name=...).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=DEFAULT_PORT,
        help="port to listen on; 0 takes a free one",
    )
    parser.add_argument(
        "--host",
        default=DEFAULT_HOST,
        help="address to listen on. The default serves this machine only. Without a token "
        "(COMMHOOK_TOKEN_FILE) everybody who reaches the store can join the training: for other "
        "machines give this machine's address in a network of the ranks alone; 0.0.0.0 or :: means "
        "all networks",
    )
    options = parser.parse_args(argv)
    # They take seconds, which --help must not.
    from torch_commhook.collectives.wire import TOKEN_FILE, token_key
    from torch_commhook.elastic.stores import serve

    try:
        has_token = token_key() != b""
        store, port = serve(options.host, options.port)
    except OSError as error:
        where = f"--host {options.host!r} --port {options.port}"
        print(f"commhook store: error: {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # only its first line: a C++ stack follows
        print(f"commhook store: error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    ended = threading.Event()
    # Not before: Python runs no handler while the store is made.
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    whom = f"those with the token in {TOKEN_FILE}" if has_token else "all who reach it"
    where = f"{options.host}, port {port}"  # programs read the last word
    print(f"commhook store: for {whom}, listening on {where}", flush=True)
    ended.wait()
    del store
    return 0
