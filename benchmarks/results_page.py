"""Writes ``docs/results.md`` from the stored results of long runs: ``make results``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_loss_local
import bench_loss_sharded
import bench_measured_link
import bench_plan
import bench_wan
import called_for
from bench_auto import AT_MOST
from bench_link import BASELINE, format_caps
from bench_loss import has_buckets_of_train, table
from link_rank import ALONE
from machine import FOLDER
from sharded_rank import BFLOAT16, FLOAT32

ROOT = FOLDER.parent
PAGE = ROOT / "docs" / "results.md"
RESULTS = FOLDER / "results"
TORCH_PAGE = ROOT / "docs" / "torch_versions.md"
TESTED_TORCHES = ROOT / "torch_commhook" / "cli" / "doctor" / "tested_torches.json"
LONG_RUNS = ROOT / "tests" / "long_runs"


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def rows(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for line in body:
        yield f"| {' | '.join(line)} |"


def hook_name(job: str) -> str:
    return job if job in (ALONE, BASELINE) else f"`{job}`"


def target(row: dict[str, Any]) -> str:
    """A row's target in brackets, with a mark if the row misses it."""
    missed = "" if row["holds"] else ", **missed**"
    return f"({row['target'].replace('<=', 'at most')}{missed})"


# ---- steps over links ----------------------------------------------------------------------------


def links(name: str) -> Iterator[str]:
    """The table of one run of bench_link, and the results for its targets."""
    found = load(RESULTS / name)
    groups: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        groups.setdefault(row["group"].split(",")[0], {})[row["job"]] = row
    rates = sorted(
        groups, key=lambda rate: -groups[rate].get(BASELINE, groups[rate][ALONE])["seconds"]
    )
    body = []
    for job in groups[rates[0]]:
        line = [hook_name(job)]
        for rate in rates:
            row = groups[rate][job]
            ratio = "" if row["ratio"] is None else f" ({row['ratio']:.3f})"
            line.append(f"{row['seconds'] * 1e3:.0f} ms{ratio}")
        sent = groups[rates[0]][job]["details"]["link MB"]
        body.append([*line, f"{sent:.2f}" if sent > 0.001 else ""])
    yield from rows(["", *(spaced(rate) for rate in rates), "MB sent"], body)
    yield ""
    targets = [row for row in found["rows"] if row["target"] is not None]
    held = [
        f"`{row['job']}` at {spaced(row['group'].split(',')[0])} {row['ratio']:.3f} {target(row)}"
        for row in targets
    ]
    yield f"Targets: {'; '.join(held)}."


def choices(path: Path) -> Iterator[str]:
    """The section on bench_auto, with a row for each link; empty before its first run."""
    if not path.exists():
        return
    yield "## What `auto` chooses"
    yield ""
    yield "`make bench-auto`: steps of the same model over links of given rates and delays each"
    yield "way, with `auto` after its choice, and with each hook with a small enough error. The"
    yield f"target is {AT_MOST:g} times the step with the fastest of these hooks."
    yield ""
    results = load(path)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault(row["group"], []).append(row)
    body = []
    for link, found in groups.items():
        auto = found[-1]
        note = next(each for each in results["notes"] if each.startswith(f"{link}: "))
        chosen = note.partition(" chose ")[2].partition(": ")[0]
        times = [f"{row['seconds'] * 1e3:.0f} ms" for row in found]
        missed = "" if auto["holds"] else ", **missed**"
        body.append([spaced(link), *times, f"`{chosen}`", f"{auto['ratio']:.3f}{missed}"])
    first = next(iter(groups.values()))
    names = [f"`{row['job']}`" for row in first]
    yield from rows(["", *names, "chosen", "of the fastest"], body)
    yield ""


def spaced(rate: str) -> str:
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def shards(setting: str) -> Iterator[str]:
    """The table of one setting of bench_sharded, and the results for its targets."""
    found = load(RESULTS / "bench_sharded.json")["rows"]
    beside: dict[str, dict[str, Any]] = {}
    for row in found:
        name, _, baseline = row["group"].partition(" beside ")
        if name == setting:
            beside.setdefault(row["job"], {})[baseline] = row
    baselines = FLOAT32, BFLOAT16
    body = []
    for job, of_baseline in beside.items():
        first = of_baseline[FLOAT32]
        ratios = [of_baseline[baseline]["ratio"] for baseline in baselines]
        cells = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        sent = "" if job == ALONE else f"{first['details']['link MB']:.1f}"
        body.append([hook_name(job), f"{first['seconds']:.2f} s", *cells, sent])
    header = ["", "step", *(f"of `{name}`" for name in baselines), "MB sent by a host"]
    yield from rows(header, body)
    yield ""
    held = [
        f"`{row['job']}` {row['ratio']:.3f} of `{row['group'].partition(' beside ')[2]}` "
        f"{target(row)}"
        for rows_of_job in beside.values()
        for row in rows_of_job.values()
        if row["target"] is not None
    ]
    yield f"Targets: {'; '.join(held)}."


def measured_links() -> Iterator[str]:
    header = ["hosts", "rate", "measured", "round trip", "measured", "near"]
    found = load(RESULTS / "bench_measured_link.json")["rows"]
    yield from rows(header, [bench_measured_link.cells(row) for row in found])


def plans() -> Iterator[str]:
    found = load(RESULTS / "bench_plan.json")["rows"]
    columns = list(dict.fromkeys(map(_plan_column, found)))
    body: dict[str, dict[str, str]] = {}
    for row in found:
        text = f"{row['planned_seconds'] * 1e3:.0f} ms ({row['off']:+.0%})"
        body.setdefault(row["hook"], {})[_plan_column(row)] = text
    lines = [
        [hook_name(hook), *(cells.get(column, "") for column in columns)]
        for hook, cells in body.items()
    ]
    yield from rows(["", *columns], lines)
    yield ""
    near = sum(abs(row["off"]) <= bench_plan.NEAR for row in found)
    yield f"{near} of {len(found)} are within {bench_plan.NEAR:.0%}."


def _plan_column(row: dict[str, Any]) -> str:
    """The column of a row: the link, and the model if it is bench_wan's."""
    small = ", 2.9 M parameters" if row["source"] == "bench_wan" else ""
    return f"{spaced(row['link'])}{small}"


# ---- loss ----------------------------------------------------------------------------------------


def times_to_loss() -> Iterator[str]:
    """The table of bench_wan."""
    body = []
    for row in bench_wan.table(load(RESULTS / "bench_wan.json")["runs"]):
        took = ["never", ""]
        if row["seconds"] is not None:
            took = [f"{row['seconds']:.0f} s", f"{row['ratio']:.3f}"]
        if row["at_most"] is not None:
            missed = row["reached"] < row["seeds"] or row["ratio"] > row["at_most"]
            took[1] += f" (at most {row['at_most']:.2f}{', **missed**' if missed else ''})"
        reached = f"{row['reached']} of {row['seeds']}"
        numbers = f"{row['last loss']:.4f}", f"{row['step ms']:.0f} ms", f"{row['MB a step']:.2f}"
        body.append([f"`{row['way']}`", reached, *took, *numbers])
    header = ["", "seeds that reach it", "time", "of DDP's", "last loss", "step", "MB per step"]
    yield from rows(header, body)


def loss_table(column: str, found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows of a table of losses, with ``column`` as the first one."""
    body = []
    for row in found:
        most = row["at_most"]
        verdict = ""
        if most is not None:
            verdict = f"at most {most:.2f}" + ("" if row["ratio"] <= most else ", **missed**")
        numbers = (
            f"{row['loss']:.4f}",
            f"{row['ratio']:.4f}",
            verdict,
            f"{row['held_out_loss']:.4f}",
        )
        body.append([f"`{row[column]}`", f"{row['seeds']}", *numbers])
        if "MB per step" in row:
            body[-1].append(f"{row['MB per step']:.2f}")
    header = [column, "seeds", "loss", "of uncompressed", "target", "held-out loss"]
    yield from rows([*header, "MB sent per step"][: len(body[0])], body)


def losses() -> Iterator[str]:
    runs = load(RESULTS / "bench_loss.json")["runs"]
    steps = {run["steps"] for run in runs}
    yield (
        f"`train`'s default model trains on 2 ranks for {', '.join(f'{n:,}' for n in steps)} "
        "steps. The numbers are means over seeds. The loss is the mean of the last twentieth of "
        "the steps, in nats per byte."
    )
    shown = {row["hook"] for row in table(runs)}
    before = [run for run in runs if run["hook"] in shown and not has_buckets_of_train(run)]
    if before:
        said = [
            f"`{run['hook']}` of seed {run['seed']} ({format_caps(run['bucket_cap_mb'])} MiB)"
            for run in before
        ]
        yield f"These runs had buckets of other sizes than `train` has now: {', '.join(said)}."
    yield ""
    yield from loss_table("hook", table(runs))


def sharded_losses() -> Iterator[str]:
    runs = load(RESULTS / "bench_loss_sharded.json")["runs"]
    steps, model = runs[0]["steps"], runs[0]["model"]
    yield (
        f"`train` trains a model of {model['layers']} layers, {model['dim']} values wide, on 4 "
        f"ranks for {steps:,} steps. Each rank has one sequence of {model['seq']} bytes in a step. "
        "The model has four shards (`fsdp`), or two replicas of two shards (`hsdp`). Each ratio "
        "compares with the same sharding without compression."
    )
    yield ""
    yield from loss_table("job", bench_loss_sharded.table(runs))


def local_losses() -> Iterator[str]:
    """A table for each number of steps."""
    runs = load(RESULTS / "bench_loss_local.json")["runs"]
    batch, model = runs[0]["batch"], runs[0]["model"]
    yield (
        f"`train` trains a model of {model['layers']} layers, {model['dim']} values wide, on 2 "
        f"ranks, each with {batch} sequences of {model['seq']} bytes in each step. `to plain` "
        "compares held-out losses with those of uncompressed exchanges after the same number of "
        "steps. `of seeds` has the smallest and the largest value of single seeds."
    )
    for steps in sorted({run["steps"] for run in runs}):
        found = bench_loss_local.table([run for run in runs if run["steps"] == steps], steps)
        yield ""
        yield f"After {steps:,} steps:"
        yield ""
        yield from rows(bench_loss_local.HEADER, [bench_loss_local.cells(row) for row in found])


# ---- long tests ----------------------------------------------------------------------------------


def long_tests() -> Iterator[str]:
    killed = load(LONG_RUNS / "kill_and_resume.json")["rows"]
    soaked = load(LONG_RUNS / "soak_hooks.json")["rows"]
    feedback = load(LONG_RUNS / "error_feedback_runs.json")
    modes = load(LONG_RUNS / "all_modes.json")["outcomes"]
    elastic = load(LONG_RUNS / "elastic_histories.json")
    training = load(LONG_RUNS / "training_histories.json")
    found = sum("seed" in row for row in training["planted"])
    same = sum(not row["different"] for row in killed)
    runs = sum(row["runs"] for row in soaked)
    wrong = sum(len(row["wrong"]) for row in soaked)
    failures = sum(row["runs_with_a_failure"] for row in soaked)
    hooks = len({row["hook"] for row in soaked})
    bounded = feedback["constant_gradients"]["rows"]
    results = [
        [
            "`make modes`: each hook gives the same result in eager mode, under "
            "`torch.compile` and under compiled autograd, on DDP, its Python reducer and a "
            "module",
            ", ".join(f"{count:,} {outcome}" for outcome, count in modes.items()),
        ],
        [
            "`make kill-and-resume`: training killed at a random step and resumed, compared "
            "with uninterrupted training",
            f"{same} of {len(killed)} runs end with the same bits",
        ],
        [
            f"`make soak-hooks`: {hooks} hooks whose collectives follow one another, with "
            "delays in every stage, on 2 and 3 ranks",
            f"{runs:,} runs, {failures:,} of them with a failure, {wrong} wrong",
        ],
        [
            f"`make elastic-histories`: {elastic['histories']:,} random histories of elastic "
            "training in virtual time, after which all members hold the same bits",
            f"{sum(elastic['faults'].values()):,} faults, {elastic['views']:,} views, "
            f"{elastic['steps_repeated']:,} steps repeated, {len(elastic['wrong'])} wrong",
        ],
        [
            f"`make training-histories`: {training['histories']:,} random histories of training on "
            "ranks as threads, compared with a plain calculation",
            f"{len(training['wrong'])} wrong; {found} of {len(training['planted'])} planted faults "
            "found",
        ],
        [
            "`make error-feedback`: the remembered errors stay bounded over "
            f"{feedback['constant_gradients']['steps']:,} steps",
            f"{sum(row['bounded'] for row in bounded)} of {len(bounded)} codecs",
        ],
    ]
    for row in results:
        name = row[0].partition(":")[0].strip("`").removeprefix("make ")
        commit = called_for.passed().get(name, {}).get("commit", "")[:8]
        row.append(f"`{commit}`" if commit else "not stored")
        if called_for.has_changed(name):
            row[-1] += ", **of other code**"
    yield "A result of other code is older than a change of the run's files, torch or the compiler."
    yield ""
    yield from rows(["run", "result", "commit"], results)


# ---- the page ------------------------------------------------------------------------------------


def page() -> str:
    where = load(RESULTS / "bench_link.json")["environment"]
    machine = (
        f"{where['processor']}, {where['processors']} processors, torch {where['torch']}, Python "
        f"{where['python']}"
    )
    parts = [
        "# Results",
        "",
        "This page has all measured steps, losses and long runs. It shows which hook pays over",
        "which link. All runs used one machine:",
        f"{machine}.",
        "`make results` writes the page from the stored results. Speeds of operators, dispatch and",
        "process groups are in `benchmarks/results`;",
        "[benchmarks](../benchmarks/README.md) describes the measurements.",
        "",
        "## Steps over slow links",
        "",
        "`make bench-link`: the time of a step of `train`'s default model, on 2 ranks with one",
        "thread each. Their hosts have links of the rate in the column. The numbers in brackets",
        "are relative to DDP without a hook.",
        "",
        *links("bench_link.json"),
        "",
        "![Step time over link rate](images/link.png)",
        "",
        "## Steps over a far link",
        "",
        "`make bench-far`: the same over a link with a round trip of 50 ms.",
        "",
        *links("bench_link_far.json"),
        "",
        "The next table compares a step of `local_sgd` that exchanges in the background with one",
        "without communication:",
        "",
        *links("bench_link_far_streamed.json"),
        "",
        *choices(RESULTS / "bench_auto.json"),
        "## Time to a loss over a far link",
        "",
        "`make bench-wan`: the time in which two ranks reach the held-out loss of DDP after",
        "1,000 steps, over 200 Mbit/s and a round trip of 50 ms. Methods that send all gradients",
        "train for 1,200 steps, and those that exchange parameters for 1,500. Some methods end",
        "before they reach the loss. Times are medians of the seeds that reach it.",
        "",
        *times_to_loss(),
        "",
        "![Loss over time on a far link](images/wan.png)",
        "",
        "## Steps of sharded models over slow links",
        "",
        "`make bench-sharded`: a step of `train`'s default model with `fully_shard`, over links",
        "of 200 Mbit/s. Each of 4 ranks has batches of one sequence. With four hosts, gradients",
        "and parameters travel over the links (Gloo's reduce-scatter sends twice the needed",
        "bytes):",
        "",
        *shards("fsdp"),
        "",
        "With two hosts of two ranks each, each host has a replica. Gradients travel between the",
        "hosts, and parameters inside each host:",
        "",
        *shards("hsdp"),
        "",
        "![Steps of sharded models](images/sharded.png)",
        "",
        "## Links as `bench` measures them",
        "",
        "`make bench-measured-link`: `commhook bench` between hosts with links of a given rate and",
        "round trip. Each figure comes from new processes on new hosts; the brackets have the",
        "largest deviation. All hosts share the processors of one machine.",
        "",
        *measured_links(),
        "",
        "## Predictions of `plan`",
        "",
        "`python benchmarks/bench_plan.py --from-bench`: the time of a step that `commhook plan`",
        "predicts from files of `commhook bench`, and its difference from the measured time.",
        "",
        *plans(),
        "",
        "## Loss with compression",
        "",
        "`make bench-loss`:",
        "",
        *losses(),
        "",
        "![Loss over bytes sent](images/loss_over_bytes.png)",
        "",
        "![Loss over time at 200 Mbit/s](images/loss_over_time.png)",
        "",
        "`make bench-loss-sharded`:",
        "",
        *sharded_losses(),
        "",
        "`make bench-loss-local`:",
        "",
        *local_losses(),
        "",
        "## Long runs",
        "",
        *long_tests(),
    ]
    return "\n".join(parts) + "\n"


def torches() -> str:
    """The page on versions of torch, with the results of the tests on each."""
    begin, end = "<!-- make test-torch, make results -->\n", "<!-- end -->\n"
    head, _, rest = TORCH_PAGE.read_text().partition(begin)
    body = []
    for name, run in load(TESTED_TORCHES).items():
        counts = (f"{run[each]:,}" for each in ("passed", "skipped", "xfailed"))
        body.append([name, run["build"], run["python"], *counts, f"`{run['code']}`"])
    header = ["torch", "build", "Python", "passed", "skipped", "expected failures", "commit"]
    table = "\n".join(rows(header, body))
    return f"{head}{begin}{table}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    try:
        text, on_torches = page(), torches()
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(ROOT)
        print(f"results_page: {missing} is missing; run its benchmark first", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    TORCH_PAGE.write_text(on_torches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
