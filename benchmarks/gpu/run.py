"""One run: its parts, the time for each, and their entries in the document."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .commands import Ended, Task, read_lines, run_task, run_tasks
from .document import Store
from .facts import smi


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Attributes:
        function: runs the part, and adds items to the run.
        most: its limit in seconds.
        kept: seconds that earlier parts leave for it.
        needs_library: skip the part if the library does not load.
    """

    name: str
    function: Callable[[Run], None]
    most: float
    kept: float
    needs_library: bool = True


@dataclass
class Run:
    """The data that the parts share.

    Attributes:
        device: ``"cuda"``; ``"cpu"`` or ``"host"`` in a dry run. With ``"host"``, the smoke part
            runs the CUDA kernels on the host for CPU tensors.
        folder: for logs and for the commands' results.
        end: the ``time.monotonic()`` at which the run must end.
        cores: processes that may work at once.
        tests: a folder with test files, in place of the tree's own.
        test_seconds: the limit of one test.
        patience: a factor for the limits of parts and commands, for slow machines.
    """

    store: Store
    device: str
    folder: Path
    end: float
    cores: int
    tests: Path | None = None
    test_seconds: float = 60.0
    patience: float = 1.0
    library_loads: bool = True
    part: dict[str, Any] = field(default_factory=dict)
    part_end: float = 0.0

    @property
    def dry(self) -> bool:
        return self.device != "cuda"

    @property
    def document(self) -> dict[str, Any]:
        return self.store.document

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def left(self) -> float:
        """Seconds that the part still has."""
        return self.part_end - time.monotonic()

    # ---- items -----------------------------------------------------------------------------------

    def item(self, name: str, passed: bool | None, seconds: float, text: str, **more: Any) -> None:
        """Adds an outcome to the part, or replaces the one with that name, and stores it.

        Args:
            more: stored with it; ``again`` if a run that continues this one repeats it.
        """
        items = self.part["items"]
        items[:] = [item for item in items if item["name"] != name]
        items.append(
            {"name": name, "passed": passed, "seconds": round(seconds, 2), "text": text, **more}
        )
        self.store.save()

    def command_item(self, name: str, how: Ended, **more: Any) -> None:
        """Adds a command's outcome: its exit status says whether it passed.

        A command that had no time to start is not a failure: it did not run.
        """
        passed = None if how.status is None and how.seconds == 0 else how.status == 0
        self.item(name, passed, how.seconds, how.text, again=how.is_cut_off, **more)

    def has(self, name: str) -> bool:
        """Whether the earlier run that this one continues has stored that item."""
        return any(
            item["name"] == name and item["passed"] is not None and not item.get("again")
            for item in self.part["items"]
        )

    # ---- commands --------------------------------------------------------------------------------

    def module(
        self, name: str, module: str, *arguments: str | Path, seconds: float, **variables: str
    ) -> Task:
        """A task that runs a module of this package, and the file for its results."""
        record = self.record(name)
        record.unlink(missing_ok=True)
        own = ["--device", self.device, "--record", record]
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments, *own]
        return Task(name, command, seconds * self.patience, variables)

    def record(self, name: str) -> Path:
        path = self.folder / "records" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def told(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.record(name))

    def one(self, task: Task) -> Ended:
        return run_task(task, logs=self.logs, end=self.part_end)

    def each(
        self,
        tasks: Iterable[Task],
        ended: Callable[[Task, Ended], Iterable[Task]],
        at_once: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        run_tasks(tasks, logs=self.logs, end=self.part_end, ended=ended, at_once=at_once, tick=tick)


def do_parts(run: Run, parts: Sequence[Part]) -> None:
    """Runs parts in order. A part that raises an error is a failure, and the next ones run."""
    for i, part in enumerate(parts):
        own: dict[str, Any] = {"passed": None, "finished": False, "seconds": 0.0, "text": ""}
        run.part = run.document["parts"].setdefault(part.name, {**own, "items": []})
        if run.part["finished"]:
            continue
        begun = time.monotonic()
        kept = sum(later.kept for later in parts[i + 1 :])
        run.part_end = min(begun + part.most * run.patience, run.end - kept)
        if not run.library_loads and part.needs_library:
            run.part["text"] = "the library does not load"
        elif run.left() < 3:
            run.part["text"] = "no time was left"
        else:
            try:
                run.store.save()
                part.function(run)
            except Exception:
                run.item("the run itself", False, 0.0, traceback.format_exc()[-2000:])
            run.part |= {"finished": True, **summary(run.part["items"])}
        run.part["seconds"] += round(time.monotonic() - begun, 1)
        run.document["clocks"].append({"after": part.name, **({} if run.dry else smi())})
        run.store.save()
        run.store.save_logs(run.logs)
        word = {True: "ok", False: "FAILED", None: "not run"}[run.part["passed"]]
        took, text = run.part["seconds"], run.part["text"]
        print(f"{part.name:12s} {word:8s} {took:5.0f} s  {text}", flush=True)


def summary(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether a part passed, with a line on its items."""
    failed = [item for item in items if item["passed"] is False]
    passed = [item for item in items if item["passed"]]
    rest = [item for item in items if item["passed"] is None]
    word = False if failed else (True if passed else None)
    if len(items) == 1:
        lines = items[0]["text"].splitlines() or [""]
        return {"passed": word, "text": lines[-1]}
    counts = [(passed, "passed"), (failed, "failed"), (rest, "not run")]
    text = ", ".join(f"{len(found)} {name}" for found, name in counts if found)
    if failed:
        text += f" ({', '.join(item['name'] for item in failed[:4])}{', …' * (len(failed) > 4)})"
    return {"passed": word, "text": text or "nothing to do"}
