"""The file of ``commhook bench --out``: what is written is read, and other files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_commhook.planning import LinkFile, MeasuredLink
from torch_commhook.planning.link_file import CodecSpeed, CollectiveTime, HookTime, Message

FULL = LinkFile(
    ranks=2,
    backend="gloo",
    device="cpu",
    link=MeasuredLink(200e6, 0.025),
    messages=[Message(1024, 0.05), Message(1 << 26, 2.7)],
    collectives=[CollectiveTime("all_reduce", 1 << 20, 0.1)],
    codecs=[CodecSpeed("fp8()", 3.9, 1e9, 2e9, 1.5, 0.9)],
    hooks=[HookTime("allreduce()", 1.5, 1e8, 1.0), HookTime("mine.py:hook", 1.5, None, 1.0)],
    machine={"torch": "2.13", "threads": 1},
)


@pytest.mark.parametrize("found", [FULL, LinkFile(1, "gloo", "cpu")])
def test_what_is_written_is_read(tmp_path: Path, found: LinkFile) -> None:
    path = tmp_path / "link.json"
    found.write(path)
    assert LinkFile.read(path) == found
    assert LinkFile.read(str(path)) == found


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    FULL.write(tmp_path / "link.json")
    document = json.loads((tmp_path / "link.json").read_text())
    assert document["format"] == "commhook bench 1"
    assert document["link"] == {"bits_per_second": 200e6, "delay_seconds": 0.025}
    assert document["messages"][0] == {"bytes": 1024, "seconds": 0.05}


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(FULL.text()), **values})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ("{", "it is not valid JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[]", "it must be an object, got []"),
        ("{}", 'its format must be "commhook bench 1", got null'),
        (changed(format="commhook bench 2"), 'its format must be "commhook bench 1", got "commh'),
        (changed(ranks="2"), 'its ranks must be a whole number, got "2"'),
        (changed(ranks=0), "its ranks must be a whole number, got 0"),
        (changed(ranks=True), "its ranks must be a whole number, got true"),
        (changed(backend=1), "its backend must be a string, got 1"),
        (changed(link=3), "its link must be an object, got 3"),
        (changed(link={}), "its link.bits_per_second must be a number, got nothing"),
        (
            changed(link={"bits_per_second": 0, "delay_seconds": 0}),
            "its link is not valid (MeasuredLink: bits_per_second must be positive and finite, got "
            "0.0)",
        ),
        (
            changed(link={"bits_per_second": float("nan"), "delay_seconds": 0}),
            "its link.bits_per_second must be a number, got NaN",
        ),
        (
            changed(link={"bits_per_second": 10**400, "delay_seconds": 0}),
            "its link.bits_per_second must be a number, got 1000",
        ),
        (
            changed(link={"bits_per_second": 1, "delay_seconds": -1}),
            "its link.delay_seconds must be a number, got -1",
        ),
        (changed(messages={}), "its messages must be a list, got {}"),
        (changed(messages=[1]), "its messages[0] must be an object, got 1"),
        (changed(messages=[{"bytes": 1.5, "seconds": 1}]), "its messages[0].bytes must be a whole"),
        (changed(hooks=[{"hook": "a"}]), "its hooks[0].seconds must be a number, got nothing"),
        (changed(machine=[]), "its machine must be an object, got []"),
    ],
)
def test_what_is_no_file_of_bench(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        LinkFile.read(path)
    assert str(raised.value).startswith(f"{path} is not a file of commhook bench --out: {reason}")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "link.png"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"is not a file of commhook bench --out: it is not text$"):
        LinkFile.read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"link.json: No such file or directory$"):
        LinkFile.read(tmp_path / "link.json")
    with pytest.raises(ValueError, match=r": Is a directory$"):
        LinkFile.read(tmp_path)
