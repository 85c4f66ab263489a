"""The document of benchmarks/gpu: targets that it meets or misses, and the page to read."""

from __future__ import annotations

from typing import Any

from gpu_runs import document

from benchmarks.gpu.document import page, targets


def time_row(**values: Any) -> dict[str, Any]:
    return {
        **{"group": "161x40704", "shards": 8, "works": "targeted"},
        **{"work": "flatten", "seconds": 1e-5},
        **{"first_quartile": 0.9e-5, "third_quartile": 1.1e-5, "samples": 30, "how": "graph"},
        **{"host_seconds": 16e-6, "nbytes": 10**7, "of_copy": 0.85, "least": 0.9},
        **{"most_host_seconds": 15e-6, **values},
    }


def test_targets_are_met_or_missed() -> None:
    rows = [
        time_row(),
        time_row(work="copy", of_copy=1.0, least=None, most_host_seconds=None),
        time_row(work="blockwise(): encode", of_copy=0.95, most_host_seconds=None),
    ]
    found = targets(document(dry_run=False, times=rows))
    assert [(each["what"].split(",")[0], each["wanted"], each["met"]) for each in found] == [
        ("flatten", "at least 0.9", False),
        ("flatten", "at most 15", False),
        ("blockwise(): encode", "at least 0.9", True),
    ]
    assert found[1]["reached"] == "16.0 us of the host"
    assert targets(document(times=rows)) == []  # of a dry run


def test_the_page_shows_what_was_found() -> None:
    own = {"passed": False, "finished": True, "seconds": 3.0, "text": "1 failed"}
    failed = {"name": "flatten", "passed": False, "seconds": 1.0, "text": "ended by SIGABRT"}
    count = {"kernel": "void encode_kernel<A>(B)", "nanoseconds": 12000.0, "dram_read": 8e6}
    count |= {"dram_written": 4e6, "nbytes": 10**7, "numel": 10**6, "warp_instructions": 781250.0}
    count |= {"issue_active": 0.5, "work": "flatten", "shards": 1}
    text = page(
        document(
            dry_run=False,
            clocks=[{"after": "smoke", "clocks.sm": "1980 MHz"}],
            machine={"card": "A Card"},
            parts={"smoke": {**own, "items": [failed]}},
            times=[time_row(), time_row(works="rest", work="copy", seconds=2e-5)],
            counters=[count],
        )
    )
    assert "- smoke: flatten: ended by SIGABRT" in text
    assert "| flatten, 161x40704, 8 shards | 0.850 x the copy | at least 0.9 | **no** |" in text
    assert "| 10.00 | 9.00 to 11.00 | 30 | graph | 16.0 | 1000 | 0.850 |" in text
    found = [text.index(f"\n{each}") for each in ("| flatten | 10.00 |", "| copy | 20.00 |")]
    assert found[0] < text.index("8 shards, without targets\n") < found[1]
    assert "| 12.0 | 1.20 | 0.50 | 25.0 |" in text
    assert "| smoke | 1980 MHz |" in text
