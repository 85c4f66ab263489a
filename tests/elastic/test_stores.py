"""A store with a token lets nobody in who has not the same one, and nobody read what it carries."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from repository import SUPPORT

from torch_commhook.addresses import with_port
from torch_commhook.collectives.wire import TOKEN_FILE
from torch_commhook.elastic.stores import serve, store_of

TOKEN = "a token that nobody can guess"


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    monkeypatch.setenv(TOKEN_FILE, str(path))
    return path


@pytest.fixture
def port(token: Path) -> Iterator[int]:
    """That of a store with a token."""
    store, port = serve("127.0.0.1", 0)
    yield port
    del store


def client(port: int, timeout: float = 20.0) -> dist.Store:
    return store_of(f"127.0.0.1:{port}", timeout)[0]


def test_it_is_a_store_like_any_other(port: int) -> None:
    first, second = client(port), client(port).clone()
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert [first.add("count", 2), second.add("count", 3)] == [2, 5]
    second.append("list", "a ")
    first.append("list", "b ")
    assert second.get("list") == b"a b "
    assert first.compare_set("key", "value", "other") == b"other" == second.get("key")
    waits = threading.Timer(0.2, lambda: first.set("late", "here"))
    waits.start()
    second.wait(["late"], timedelta(seconds=20))
    waits.join()
    large = os.urandom(5_000_000)
    first.set("large", large)
    assert second.get("large") == large
    assert first.delete_key("large") and not second.check(["large"])


def test_who_has_another_token_is_told(port: int, token: Path) -> None:
    token.write_text("another token, also a long one")
    with pytest.raises(dist.DistNetworkError, match=rf"{port}: the store there has another token"):
        client(port)
    token.write_text(TOKEN)
    client(port).set("key", "value")


def test_a_store_without_a_token_is_told_from_one_that_has_it(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.delenv(TOKEN_FILE)
        store, port = serve("127.0.0.1", 0)
    with pytest.raises(dist.DistNetworkError, match="has another token, or none"):
        client(port, timeout=1.0)
    del store


def test_a_store_that_is_not_there_yet_is_waited_for(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(dist.DistNetworkError, match=rf"127\.0\.0\.1, port {port}: Connection refu"):
        client(port, timeout=0.3)
    found = []
    waits = threading.Thread(target=lambda: found.append(client(port)))
    waits.start()
    time.sleep(0.2)
    store, _ = serve("127.0.0.1", port)
    waits.join(20)
    found[0].set("key", "value")
    assert store.get("key") == b"value"


def test_a_stranger_gets_no_byte_and_changes_nothing(port: int) -> None:
    """Without the token: whatever it writes, and whatever it has recorded of others."""
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:  # sees and keeps all that passes
        seen = threading.Thread(target=_record, args=(between, port, recorded))
        seen.start()
        ours = client(between.getsockname()[1])
        ours.set("weights", "a secret value")
        assert ours.get("weights") == b"a secret value"
        between.shutdown(socket.SHUT_RDWR)
        seen.join()
    assert len(recorded) > 100 and b"secret" not in recorded and b"weights" not in recorded
    for text in (b"\0" * 100, b"GET / HTTP/1.0\r\n\r\n", os.urandom(20_000), bytes(recorded)):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(text)
            stranger.shutdown(socket.SHUT_WR)
            answer = bytearray()
            while part := _received(stranger):
                answer += part
        assert b"secret" not in answer
    assert client(port).get("weights") == b"a secret value"
    assert client(port).num_keys() <= 2  # with what TCPStore itself counts
    os.environ.pop(TOKEN_FILE)
    with pytest.raises(RuntimeError):
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))


def _record(between: socket.socket, port: int, recorded: bytearray) -> None:
    """Passes connections on, and keeps what clients have written."""
    while True:
        try:
            near, _ = between.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", port))
        for one, other, keeps in ((near, far, True), (far, near, False)):
            args = (one, other, recorded if keeps else bytearray())
            threading.Thread(target=_pump, args=args, daemon=True).start()


def _pump(one: socket.socket, other: socket.socket, kept: bytearray) -> None:
    while part := _received(one):
        kept += part
        other.sendall(part)
    with suppress(OSError):  # the other thread was first
        other.shutdown(socket.SHUT_RDWR)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def test_connections_that_prove_nothing_keep_nobody_out(port: int) -> None:
    """More of them than the store keeps, from before and while others connect."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))  # two for each connection
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(1100)]
    ours = client(port)
    ours.set("key", "value")
    assert ours.get("key") == b"value"
    ended = sum(_has_ended(each) for each in strangers)
    for each in strangers:
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert 50 < ended < 1100  # the oldest


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_what_a_process_wrote_before_its_end_arrives(port: int) -> None:
    program = (
        "import sys\n"
        "from torch_commhook.elastic.stores import store_of\n"
        "store = store_of(sys.argv[1], 20.0)[0]\n"
        "for number in range(6):\n"
        "    store.set(str(number), b'x' * 5_000_000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [len(client(port).get(str(number))) for number in range(6)] == [5_000_000] * 6


def test_training_in_which_all_have_the_token(token: Path, tmp_path: Path) -> None:
    """A rank is killed, and its process starts anew."""
    events = [{"rank": 1, "step": 5, "do": "kill"}]
    case = {"hook": "with error", "ranks": 3, "steps": 60, "late": [8], "pause": 0.02}
    done = subprocess.run(
        [
            sys.executable,
            str(SUPPORT / "elastic_ranks.py"),
            str(tmp_path),
            json.dumps([{**case, "events": events}]),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["said"] == ["done", "killed", "done", "done"]
    assert len({tuple(steps[-1][:2]) for steps in found["steps"] if steps[-1][0] == 60}) == 1


def test_ctrl_c_ends_the_wait_for_a_store(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's ignores it
    waits = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    waits.start()
    with pytest.raises(KeyboardInterrupt):
        client(port, timeout=20.0)
    waits.join()
    signal.signal(signal.SIGINT, before)


def test_a_store_of_others_is_said_to_be_open(
    token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    assert store_of(store, 20.0) == (store, None)
    assert re.search("does not protect this training's store", caplog.text)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_over_ipv6(token: Path) -> None:
    store, port = serve("::1", 0)
    ours, host = store_of(with_port("::1", port), 20.0)
    ours.set("key", "value")
    assert (store.get("key"), host) == (b"value", "::1")
