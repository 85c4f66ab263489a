"""``store``: runs the store through which the ranks of an elastic training meet."""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_commhook.cli.option_types import whole_number

if TYPE_CHECKING:  # it takes seconds, which --help must not
    import torch.distributed as dist

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
        help="address to listen on. The default serves this machine only. Everybody who reaches "
        "the store can join the training: for other machines give this machine's address in a "
        "network of the ranks alone; 0.0.0.0 or :: means all networks",
    )
    options = parser.parse_args(argv)

    try:
        store = _store_at(options.host, options.port)
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
    print(f"commhook store: listening on {options.host}, port {store.port}", flush=True)
    ended.wait()
    return 0


def _store_at(host: str, port: int) -> dist.TCPStore:
    """A store that listens on one address only.

    Raises:
        OSError: the host is unknown, or the address is taken or not of this machine.
    """
    import torch.distributed as dist

    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if host == "*" or (re.match(r"(?i)fe[89ab].:", bare) and "%" not in bare):
            raise UnicodeError
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(
            "the host must be a name or an address of this machine, without a port, such as "
            "127.0.0.1, ::1 or fe80::1%eth0; 0.0.0.0 or :: means all networks"
            + (f" ({error.strerror})" if isinstance(error, OSError) else "")
        ) from None
    family, _, _, _, address = found[0]
    every = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=every)
    # With the scope of a link-local address, such as fe80::1%eth0.
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    bound, own = socket.getnameinfo(listener.getsockname(), numeric)
    # TCPStore would try for minutes to connect to an address of many hosts, such as 224.0.0.1.
    socket.create_connection((bound, int(own)), timeout=10).close()
    # The store now owns the descriptor.
    return dist.TCPStore(
        bound,
        int(own),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
