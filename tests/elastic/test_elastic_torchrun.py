"""torchrun starts a rank's process again, and the training lets it in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from repository import SUPPORT

#: Enough that a process which imports torch again still finds the training under way.
STEPS = 400


def test_a_rank_that_torchrun_starts_again_joins(tmp_path: Path) -> None:
    store = subprocess.Popen(
        [sys.executable, "-m", "torch_commhook", "store", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    agents = []
    try:
        assert store.stdout is not None
        port = store.stdout.readline().split()[-1]
        (tmp_path / "b dies").touch()
        for name in ("a", "b"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc-per-node=1", "--max-restarts=3"]
            program = [str(SUPPORT / "elastic_torchrun.py"), port, name, str(tmp_path), str(STEPS)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            agents.append(subprocess.Popen([*torchrun, *program], env=environment))
        assert [agent.wait(120) for agent in agents] == [0, 0]
    finally:
        for process in [*agents, store]:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"{name}.log").read_text().splitlines() for name in ("a", "b")]
    first, second = ([line.split() for line in log] for log in logs)
    assert [int(step) for step, *_ in first] == list(range(1, STEPS + 1))
    assert len({process for *_, process in first}) == 1
    assert len({process for *_, process in second}) == 2, "started again"
    digests = {step: digest for step, digest, _ in first}
    assert all(digests[step] == digest for step, digest, _ in second)
    assert int(second[-1][0]) == STEPS
