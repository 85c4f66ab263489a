"""Checks of a training with ranks that come and go, after its history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from virtual_training import Counted, StepError, Trainer, TrainingPlan

from torch_commhook.elastic.membership import LeftOutError, TooFewRanksError, View
from torch_commhook.step.connected_group import PeerError

#: A history that takes longer, in virtual seconds, counts as a hang.
LONGEST = 90.0


@dataclass
class Outcome:
    """The facts to check. ``seconds`` are of virtual time, ``views`` those agreed on, in order."""

    training: TrainingPlan
    trainers: Sequence[Trainer]
    views: Sequence[View]
    seconds: float
    splits: bool
    loses_store: bool


def problems(run: Outcome) -> Iterator[str]:
    yield from _hangs(run)
    yield from _strange_errors(run)
    yield from _order_of_views(run.views)
    for trainer in run.trainers:
        yield from _own_steps(trainer)
    for views in _trainings(run.views):
        yield from _steps_of_training(run, views)
    yield from _end(run)


def _hangs(run: Outcome) -> Iterator[str]:
    if run.seconds >= LONGEST:
        yield f"it has not ended after {LONGEST:g} s"


_DOCUMENTED = (LeftOutError, TooFewRanksError, PeerError, StepError)


def _strange_errors(run: Outcome) -> Iterator[str]:
    for trainer in run.trainers:
        said = trainer.said
        if not isinstance(said, BaseException) or isinstance(said, _DOCUMENTED):
            if isinstance(said, LeftOutError) and "lacks its results" in str(said):
                yield f"process {trainer.process.number}: {said}"
            continue
        if "store: no answer" not in str(said) or not run.loses_store:
            yield f"process {trainer.process.number}: {type(said).__name__}: {said}"


def _order_of_views(views: Sequence[View]) -> Iterator[str]:
    for number, view in enumerate(views, 1):
        if view.number != number:
            yield f"view {view.number} is the {number}th"
        if len(set(view.members)) != len(view.members) or not view.trained:
            yield f"{view} has a member twice, or nobody that has trained"
    for before, after in pairwise(views):
        again = set(after.members) - set(before.members) - set(after.new)
        if again and after.steps:
            yield f"{sorted(again)} are in {after} as if they had trained in {before}"


def _own_steps(trainer: Trainer) -> Iterator[str]:
    number = trainer.process.number
    if trainer.sent_again:
        yield f"process {number}: {trainer.sent_again} parameters had other bits when it had joined"
    steps = [each.step for each in trainer.counted]
    if steps != list(range(steps[0], steps[0] + len(steps))) if steps else False:
        yield f"process {number} has counted the steps {steps}"
    for each in trainer.counted:
        if each.count != each.step:
            yield f"process {number}: its optimizer has done {each.count} of {each.step} steps"
            return


def _trainings(views: Sequence[View]) -> list[list[View]]:
    """The views of each training: a new training has no member of the last view."""
    found: list[list[View]] = []
    for view in views:
        if not found or not set(view.members) & set(found[-1][-1].members):
            found.append([])
        found[-1].append(view)
    return found


def _steps_of_training(run: Outcome, views: Sequence[View]) -> Iterator[str]:
    """The steps of a training: each has one result, among the members of one view."""
    by_own = {each.own: each for each in run.trainers}
    partial: list[tuple[int, Counted]] = []
    # The view in which each rank's part has ended.
    last = {own: view for view in run.views for own in view.members}
    results: dict[int, dict[tuple[str, frozenset[int], frozenset[int]], list[int]]] = {}
    for own, view in last.items():
        # It ended before it knew its number, or it has only seen another training.
        if own not in by_own or view not in views:
            continue
        after = views[view.number - views[0].number + 1 :][:1]
        is_sure = not run.splits and not by_own[own].plan.is_touched
        for each in by_own[own].counted:
            # A lost rank may count one step that the others then repeat.
            if after and not is_sure and each.step == after[0].steps + 1:
                continue
            if after and each.step > after[0].steps + 1:
                yield f"rank {own} has counted step {each.step} after {after[0]} without it"
            if own in each.joining:  # it does not have all parameters yet
                partial.append((own, each))
                continue
            key = each.digest, each.senders, each.joining
            results.setdefault(each.step, {}).setdefault(key, []).append(own)
    for step, found in sorted(results.items()):
        if len(found) > 1:
            who = sorted(found.values())
            yield f"step {step} has {len(found)} results: of ranks {who}"
            return
        ((_, senders, joining),) = found
        members = senders | joining
        of_step = [view for view in views if set(view.members) == members and view.steps < step]
        if not of_step:
            yield f"step {step} has the gradients of {sorted(senders)}, which are no view"
        elif any(v.number > of_step[-1].number and v.steps < step for v in views):
            yield f"step {step} has the gradients of {sorted(senders)}, which were a view before"
    for own, each in partial:
        found = results.get(each.step, {})
        if found and not any(key[1:] == (each.senders, each.joining) for key in found):
            yield f"rank {own}, which joins, has another step {each.step} than the others"
    if results and sorted(results) != list(range(1, max(results) + 1)):
        yield f"the steps {sorted(results)} have been counted"


def _end(run: Outcome) -> Iterator[str]:
    """Ranks without faults train to the end, if there are enough of them."""
    untouched = [each for each in run.trainers if not each.plan.is_touched]
    enough = 2 * len(untouched) > len(run.trainers) and len(untouched) >= run.training.min_ranks
    if run.splits or not enough:
        return
    is_over = any(each.said == "done" and not each.plan.leaves_at for each in run.trainers)
    for each in untouched:
        steps = each.counted[-1].step if each.counted else 0
        if is_over and isinstance(each.said, TooFewRanksError) and steps == run.training.steps - 1:
            continue  # in the last step it has lost another rank, after others had left
        if each.said != "done":
            yield (
                f"process {each.process.number}, to which nothing has happened, has counted "
                f"{len(each.counted)} of {run.training.steps} steps: {each.said}"
            )
