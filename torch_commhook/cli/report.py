"""Reports a run: the live line, ``metrics.jsonl``, the table, ``summary.json`` and pictures."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_commhook.cli.outputs import StepLog, is_installed
from torch_commhook.cli.train_config import is_no_hook
from torch_commhook.wording import align_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: The live line shows the mean speed of this many steps.
_SPEED_STEPS = 20
#: Columns of the live line: the least for its bar and its title, and the gaps of its four parts.
_LEAST_BAR = 10
_LEAST_TITLE = 8
_GAPS = 3


@dataclass(frozen=True)
class StepRecord:
    """One line of ``metrics.jsonl``. The bytes, seconds and tokens count from step 1.

    Attributes:
        step: the number of the step, from 1.
        loss: the mean loss over the ranks before this step's update, in nats per byte.
        lr: the learning rate of this step.
        seconds: the time of the steps so far.
        bytes_sent: bytes that rank 0 has sent for gradients; None if the hook does not tell.
        fp32_bytes: bytes that rank 0 would have sent for float32 gradients, with ring collectives.
        tokens: bytes of text that all ranks have trained on.
        bytes_scattered: bytes that rank 0 has sent in reduce-scatters within its replica.
        bytes_gathered: bytes that rank 0 has sent to gather parameters.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    bytes_sent: int | None
    fp32_bytes: int
    tokens: int
    bytes_scattered: int = 0
    bytes_gathered: int = 0


@dataclass(frozen=True)
class RunResult:
    """The result of one run, a row of the table.

    Attributes:
        hook: the hook as text, with its ``shard_hook`` and ``weights``.
        steps: the number of steps of this run.
        final_loss: the mean loss over the last ``final_steps`` steps, in nats per byte.
        final_steps: the number of steps in ``final_loss``.
        held_out_loss: the loss on the held-out text, in nats per byte; None if it was not computed.
        steps_per_second: the speed, without evaluation and checkpoints.
        bytes_per_step: bytes that rank 0 sends for gradients; None if the hook does not tell.
        fp32_bytes_per_step: bytes that it would send for float32 gradients, with ring collectives.
        records: the steps.
        metrics: the name of the file of the steps.
        is_interrupted: whether the run ended before its last step.
        checkpoint: the path of the latest checkpoint; None if there is none.
        scattered_per_step: bytes that rank 0 sends in reduce-scatters within its replica.
        gathered_per_step: bytes that rank 0 sends to gather parameters.
        choice: the hook that ``auto`` has chosen, and the reason; empty with other hooks.
    """

    hook: str
    steps: int
    final_loss: float
    final_steps: int
    held_out_loss: float | None
    steps_per_second: float
    bytes_per_step: float | None
    fp32_bytes_per_step: float
    records: tuple[StepRecord, ...]
    metrics: str = ""
    is_interrupted: bool = False
    checkpoint: str | None = None
    scattered_per_step: float = 0.0
    gathered_per_step: float = 0.0
    choice: str = ""

    @property
    def fp32_ratio(self) -> float | None:
        """The bytes of float32 gradients over the bytes sent; None if one is 0 or unknown."""
        return fp32_ratio(self.bytes_per_step, self.fp32_bytes_per_step)

    def to_plain(self) -> dict[str, Any]:
        """The result as plain values without its records, for JSON."""
        plain = asdict(self)
        del plain["records"]
        plain["fp32_ratio"] = self.fp32_ratio
        return plain


def fp32_ratio(sent: float | None, fp32: float) -> float | None:
    """Return ``fp32 / sent``; None if one is 0 or unknown."""
    return fp32 / sent if sent and fp32 else None


# ---- numbers as text -----------------------------------------------------------------------------


def format_bytes(count: float | None) -> str:
    """Format bytes with three digits in decimal units: ``21.6 MB``; ``unknown`` for None."""
    if count is None:
        return "unknown"
    value = float(count)
    units = ["B", "kB", "MB", "GB", "TB"]
    unit = units.pop(0)
    while value >= 999.5 and units:
        value /= 1000
        unit = units.pop(0)
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def format_ratio(ratio: float | None) -> str:
    """Describe a ratio of :func:`fp32_ratio`: ``2.00x smaller than fp32``."""
    if ratio is None:
        return "no ratio to fp32"
    if round(ratio, 2) == 1:
        return "the same as fp32"
    if ratio > 1:
        return f"{ratio:.2f}x smaller than fp32"
    return f"{1 / ratio:.2f}x larger than fp32"


def format_step_time(speed: float) -> str:
    """Format the time of a step at ``speed`` steps per second: ``215 ms/step``."""
    if speed <= 0:
        return "? s/step"
    seconds = 1 / speed
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms/step"
    return f"{seconds:.3g} s/step" if seconds < 999.5 else f"{seconds:.0f} s/step"


def format_duration(seconds: float) -> str:
    """Format as minutes and seconds, after hours if needed: ``3:07``, ``1:02:03``."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


# ---- the live line -------------------------------------------------------------------------------


class PlainLine:
    """Prints a line of text every ``every`` steps, for logs."""

    def __init__(self, title: str, last_step: int, every: int) -> None:
        self._title = title
        self._last_step = last_step
        self._every = every

    def update(self, record: StepRecord, speed: float) -> None:
        if record.step % self._every != 0 and record.step != self._last_step:
            return
        step = f"{record.step:{len(str(self._last_step))}}/{self._last_step}"
        print(
            f"{self._title}  step {step}  loss {record.loss:.4f}  {speed:.2f} steps/s"
            f"  {_sent(record)}",
            flush=True,
        )

    def close(self) -> None:
        pass


class RichLine:
    """Shows a progress bar on a terminal, with the steps, the loss, times and bytes.

    The bar gets the remaining columns. If they are few, the title first becomes shorter, then the
    text loses the details of the bytes.
    """

    def __init__(self, title: str, first_step: int, last_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._title = title
        self._last_step = last_step
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            expand=True,
            console=Console(),
        )
        self._task = self._progress.add_task(
            "", total=last_step, completed=first_step, numbers="starting"
        )
        self._show(first_step, "starting", "starting")
        self._progress.start()

    def update(self, record: StepRecord, speed: float) -> None:
        numbers = f"loss {record.loss:.3f}  {format_step_time(speed)}"
        left = format_duration((self._last_step - record.step) / speed) if speed > 0 else "?"
        self._show(
            record.step,
            f"{numbers}  {_sent(record)}  {left} left",
            f"{numbers}  {format_bytes(record.bytes_sent)}  {left} left",
        )

    def _show(self, step: int, numbers: str, short: str) -> None:
        """Show the text that fits beside a bar of ``_LEAST_BAR`` columns.

        It is ``short`` if ``numbers`` leaves too little room for the title.
        """
        steps = 2 * len(str(self._last_step)) + 1
        left = self._progress.console.width - steps - _LEAST_BAR - _GAPS
        if left - len(numbers) < min(len(self._title), _LEAST_TITLE):
            numbers = short
        title = _shortened(self._title, left - len(numbers))
        self._progress.update(self._task, completed=step, numbers=numbers, description=title)

    def close(self) -> None:
        self._progress.stop()


def _shortened(text: str, characters: int) -> str:
    if characters < _LEAST_TITLE // 2:
        return ""
    return text if len(text) <= characters else f"{text[: characters - 1]}\N{HORIZONTAL ELLIPSIS}"


def _sent(record: StepRecord) -> str:
    text = f"sent {format_bytes(record.bytes_sent)}"
    if record.bytes_scattered:
        text += f", scattered {format_bytes(record.bytes_scattered)}"
    if record.bytes_gathered:
        text += f", gathered {format_bytes(record.bytes_gathered)}"
    return f"{text}, {format_ratio(fp32_ratio(record.bytes_sent, record.fp32_bytes))}"


LiveLine = PlainLine | RichLine


def make_live_line(title: str, first_step: int, last_step: int, every: int) -> LiveLine:
    """Make a RichLine if stdout is a terminal and rich is installed, otherwise a PlainLine."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if is_terminal and is_installed("rich"):
        return RichLine(title, first_step, last_step)
    return PlainLine(title, last_step, every)


# ---- files ---------------------------------------------------------------------------------------


class Reporter:
    """Reports the steps of one run on rank 0: on the live line, as JSON lines, and to other logs.

    A resumed run continues the file of the earlier run, whose first ``first_step`` steps took
    ``seconds``: the reporter keeps the lines up to there, and replaces the others.
    """

    def __init__(
        self,
        path: Path,
        line: LiveLine,
        first_step: int = 0,
        seconds: float = 0.0,
        logs: Sequence[StepLog] = (),
    ) -> None:
        self._line = line
        self._logs = logs
        self._times = deque([seconds], maxlen=_SPEED_STEPS + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_up_to(path, first_step) if first_step > 0 else []
        self._file = open(path, "w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def step(self, record: StepRecord) -> None:
        """Report one step."""
        self._times.append(record.seconds)
        elapsed = self._times[-1] - self._times[0]
        speed = (len(self._times) - 1) / elapsed if elapsed > 0 else 0.0
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()
        known: dict[str, float | None] = asdict(record)
        del known["step"]
        known["fp32_ratio"] = fp32_ratio(record.bytes_sent, record.fp32_bytes)
        known["seconds_per_step"] = 1 / speed if speed > 0 else None
        for log, _ in self._logs:
            log(record.step, {name: each for name, each in known.items() if each is not None})
        self._line.update(record, speed)

    def close(self) -> None:
        """Close the file, the live line and the logs."""
        self._line.close()
        self._file.close()
        for _, close in self._logs:
            close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
    return kept


def write_summary(path: Path, config: dict[str, Any], results: Sequence[RunResult]) -> None:
    """Write the configuration and the result of each run as JSON."""
    content = {"config": config, "runs": [result.to_plain() for result in results]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---- the end -------------------------------------------------------------------------------------


def format_table(results: Sequence[RunResult]) -> str:
    """A table with a row for each run.

    Scattered and gathered bytes have columns only if a run has any.
    """
    has_scattered = any(result.scattered_per_step for result in results)
    has_gathered = any(result.gathered_per_step for result in results)
    header = ["hook", "final loss", "held-out", "steps/s", "sent per step", "fp32 / sent"]
    header += ["scattered per step"] * has_scattered + ["gathered per step"] * has_gathered
    rows = []
    for result in results:
        held_out = "-" if result.held_out_loss is None else f"{result.held_out_loss:.4f}"
        ratio = result.fp32_ratio
        row = [
            result.hook,
            f"{result.final_loss:.4f}",
            held_out,
            f"{result.steps_per_second:.2f}",
            format_bytes(result.bytes_per_step),
            "-" if ratio is None else f"{ratio:.2f}x",
        ]
        row += [format_bytes(result.scattered_per_step)] * has_scattered
        row += [format_bytes(result.gathered_per_step)] * has_gathered
        rows.append(row)
    return "\n".join(align_columns(header, rows, is_underlined=True))


def format_final_loss(result: RunResult) -> str:
    """The sentence that states the final loss."""
    last = "of the last step"
    if result.final_steps > 1:
        last = f"the mean over the last {result.final_steps} steps"
    text = (
        f"final loss {result.final_loss:.4f} nats per byte ({result.final_loss / math.log(2):.2f} "
        f"bits), {last}"
    )
    if result.held_out_loss is not None:
        text += f"; held-out loss {result.held_out_loss:.4f}"
    return text


# ---- draws the loss of runs by step, by bytes sent and by time -----------------------------------


#: The colours of lines. Most people with colour blindness can tell them apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c564b", "#6a3d9a")
_DASHES = ("-", "--", "-.", ":")
#: The colour of the run without a hook. Its curve lies below the others.
_GREY = "#7f7f7f"
#: Smoothing averages over this share of the steps before, and as many after, each step.
_SMOOTHED_SHARE = 0.025
_INCHES = 4.2
#: The characters in a row of the legend, per panel.
_LABEL_CHARACTERS = 44
#: If the largest number of bytes is less than this many times the smallest, the axis has ticks
#: between powers of ten.
_FEW_TICKS = 10.0


@dataclass(frozen=True)
class _Panel:
    title: str
    label: str
    place: Callable[[StepRecord], float | None]


_STEPS = _Panel("by step", "step", lambda record: record.step)
_BYTES = _Panel(
    "by bytes sent", "sent by rank 0 for gradients", lambda record: record.bytes_sent or None
)
_TIME = _Panel("by time", "time of the steps (s)", lambda record: record.seconds)


def draw_loss(path: Path, results: Sequence[RunResult], title: str = "") -> bool:
    """Write a PNG with two curves for each run: the loss, and the smoothed loss.

    Returns whether matplotlib is installed. If not, the function writes nothing.
    """
    if not is_installed("matplotlib"):
        return False
    loss_figure(results, title).savefig(path, dpi=120)
    return True


def loss_figure(results: Sequence[RunResult], title: str) -> Figure:
    """The picture of :func:`draw_loss`: a panel for each kind of axis, above a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sends = any(_BYTES.place(record) for result in results for record in result.records)
    panels = (_STEPS, _BYTES, _TIME) if sends else (_STEPS, _TIME)
    figure = Figure(figsize=(_INCHES * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # unlike pyplot, it needs no display
    figure.suptitle(title)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    styles = _styles(results)
    for panel, axes in zip(panels, all_axes, strict=True):
        for result, style in zip(results, styles, strict=True):
            _draw_curve(axes, result, panel, style)
        axes.set(title=f"loss {panel.title}", xlabel=panel.label)
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if panel is _BYTES:
            _count_bytes(axes)
    all_axes[0].set_ylabel("loss (nats per byte)")
    lines, labels = all_axes[0].get_legend_handles_labels()
    width = _LABEL_CHARACTERS * len(panels)
    columns = max(1, min(len(labels), width // max(map(len, labels), default=1)))
    figure.legend(
        lines,
        ["\n".join(textwrap.wrap(label, width // columns)) for label in labels],
        loc="outside lower center",  # where it covers no curve
        ncols=columns,
        frameon=False,
    )
    return figure


def line_styles() -> Iterator[dict[str, Any]]:
    """Different styles of lines without end: the colours, then dashed colours."""
    return ({"color": color, "linestyle": dash} for dash in cycle(_DASHES) for color in _COLORS)


def _styles(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The style of each curve: that of the hook; grey for no hook."""
    kinds = line_styles()
    plain = {"color": _GREY, "linestyle": "-", "linewidth": 3.0, "zorder": 1.5}
    return [
        plain if is_no_hook(result.hook) else {**next(kinds), "linewidth": 1.5, "zorder": 2.0}
        for result in results
    ]


def _draw_curve(axes: Axes, result: RunResult, panel: _Panel, style: dict[str, Any]) -> None:
    places = [panel.place(record) for record in result.records]
    losses = [record.loss for record in result.records]
    smooth = smoothed(losses)
    shown = [i for i, place in enumerate(places) if place is not None]
    x = [place for place in places if place is not None]
    label = "no hook" if is_no_hook(result.hook) else result.hook
    raw = {"color": style["color"], "linewidth": 0.8, "alpha": 0.3, "zorder": 1.0}
    axes.plot(x, [losses[i] for i in shown], **raw)
    axes.plot(x, [smooth[i] for i in shown], label=label, **style)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, of which there are fewer at both ends.

    At the beginning, where losses fall fast, a mean has as many values after its centre as before.
    """
    most = round(_SMOOTHED_SHARE * len(values))
    sums = [0.0, *accumulate(values)]
    found = []
    for i in range(len(values)):
        before = min(most, i)
        first, end = i - before, min(i + before + 1, len(values))
        found.append((sums[end] - sums[first]) / (end - first))
    return found


def _count_bytes(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with a few ticks for any range of bytes."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xscale("log")
    least, most = axes.get_xlim()
    is_short = most < _FEW_TICKS * least
    axes.xaxis.set_major_locator(MaxNLocator(4) if is_short else LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
