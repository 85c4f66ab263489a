"""The transport with a token: who may connect, and what others see."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_threads import in_threads
from wire_ranks import StoreOfRank, Way, WireRanks, through

from torch_commhook import _C
from torch_commhook.collectives import wire

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def ranks() -> Iterator[Callable[..., WireRanks]]:
    made: list[WireRanks] = []

    def make(size: int, **options: Any) -> WireRanks:
        made.append(WireRanks(size, **{"keys": [KEY] * size, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def total(group: dist.ProcessGroup, numel: int) -> None:
    tensor = torch.arange(numel, dtype=torch.float32)
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, group.size() * torch.arange(numel, dtype=torch.float32))


@pytest.mark.parametrize("rails", [1, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_messages_of_all_lengths(ranks: Callable[..., WireRanks], size: int, rails: int) -> None:
    world = ranks(size, rails=rails)
    for numel in (1, 1_000, 100_003, 4_000_001):
        world.each(lambda rank, n=numel: total(world.groups[rank], n))


def test_connections_that_break(ranks: Callable[..., WireRanks]) -> None:
    world, is_over = ranks(3), threading.Event()

    def cut() -> None:
        for _ in range(20):
            if is_over.wait(0.02):
                return
            world.endpoints[0].cut()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for _ in range(5):
            world.each(lambda rank: total(world.groups[rank], 2_000_000))
    finally:
        is_over.set()
        thread.join()
    assert world.endpoints[0].counts()["broken"] > 0


@pytest.mark.parametrize("keys", [[KEY, OTHER], [KEY, b""], [b"", KEY]])
def test_ranks_with_different_tokens(ranks: Callable[..., WireRanks], keys: list[bytes]) -> None:
    world = ranks(2, keys=keys)

    def run(rank: int) -> None:
        with pytest.raises(dist.DistBackendError, match=r"do not fit: they have different tokens"):
            world.groups[rank].barrier().wait()

    world.each(run)


class Strangers(WireRanks):
    """Two ranks, and the ways between them."""

    def __init__(self) -> None:
        self.ways: list[Way] = []
        super().__init__(2, keys=[KEY] * 2)

    def more_backends(self) -> list[Any]:
        store, limit = dist.HashStore(), timedelta(seconds=20)

        def join(rank: int) -> Any:
            own = StoreOfRank(store, through(self.ways))
            return _C.WireBackend(self.endpoints[rank], own, "test", rank, 2, limit)

        return self.each(join)

    def close(self) -> None:
        super().close()
        for way in self.ways:
            way.close()


def test_what_a_stranger_sees_and_can_do() -> None:
    world = Strangers()
    secret = torch.frombuffer(
        bytearray(b"a gradient that nobody may read" * 1000), dtype=torch.uint8
    )

    def run(rank: int) -> None:
        outputs = [[torch.zeros_like(secret) for _ in range(2)]]
        world.groups[rank].allgather(outputs, [secret]).wait()
        assert all(torch.equal(each, secret) for each in outputs[0])

    world.each(run)
    seen = [data for way in world.ways for _, data in way.seen]
    every = b"".join(seen)
    assert len(every) > secret.numel() and b"nobody may read" not in every
    identity = world.endpoints[0].address.split()[0].encode()
    assert identity not in every and b"test" not in every

    port = int(world.endpoints[0].address.split()[2])
    replayed = [
        b"".join(d for s, d in way.seen if s == source)
        for way in world.ways
        for source in {s for s, _ in way.seen}
    ]
    for sent in [*replayed, b"", b"\0" * 5000, b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)]:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while data := stranger.recv(1 << 16):
                    answer += data
            except ConnectionResetError:
                pass
            assert len(answer) < 1000 and identity not in answer
    connections = world.endpoints[0].counts()["broken"]
    world.each(run)
    assert world.endpoints[0].counts()["broken"] == connections
    world.close()


def test_the_token_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wire.TOKEN_FILE, raising=False)
    assert wire.token_key() == b""
    path = tmp_path / "token"
    monkeypatch.setenv(wire.TOKEN_FILE, str(path))
    with pytest.raises(RuntimeError, match=r"COMMHOOK_TOKEN_FILE: .*No such file"):
        wire.token_key()
    path.write_bytes(b" short \n")
    with pytest.raises(RuntimeError, match="16 or more bytes, got 5"):
        wire.endpoint()
    path.write_bytes(b"a token of many bytes")
    first = wire.token_key()
    path.write_bytes(b"a token of many bytes\n")
    assert wire.token_key() == first and len(first) == 32
    path.write_bytes(b"another token of many bytes")
    assert wire.token_key() != first


def test_a_key_of_another_length() -> None:
    with pytest.raises(ValueError, match="key must have 32 bytes, got 3"):
        _C.WireEndpoint("127.0.0.1", key=b"abc")
    assert _C.tls_version().startswith("OpenSSL 3")


def test_threads_that_use_one_endpoint(ranks: Callable[..., WireRanks]) -> None:
    world = ranks(2)
    backends = [world.more_backends() for _ in range(3)]

    def run(index: int, rank: int) -> None:
        for _ in range(20):
            tensor = torch.ones(30_000)
            backends[index][rank].allreduce([tensor], dist.AllreduceOptions()).wait()
            assert tensor[0] == tensor[-1] == 2

    assert in_threads([functools.partial(run, i, r) for i in range(3) for r in range(2)]) == []
