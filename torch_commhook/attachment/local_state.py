"""The parts of a local-steps state that are not in the hook's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook.attachment.parameter_exchange import BackgroundExchange
from torch_commhook.attachment.replica import Replica
from torch_commhook.attachment.rounds import Round
from torch_commhook.hooks.local_sgd import local_sgd, precise
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.state_values import check_tensor, shown
from torch_commhook.memory.states import (
    ANCHOR,
    LOCAL_STEPS,
    MEANS,
    PARAMETERS,
    checked_position,
    load_error,
)
from torch_commhook.step.ranks_apart import CheckedState


def taken_apart(
    state: Any, hook_name: str, own_key: str, by_name: Mapping[str, Tensor]
) -> CheckedState:
    """Split a state into this rank's parameters, the position in the round, and the rest.

    Does not check the rest.

    Args:
        state: the state to load.
        hook_name: the hook's name, for errors.
        own_key: the state's key for this rank's tensors.
        by_name: the parameters, as the hook's memory has them.

    Raises:
        ValueError: the state lacks a part, or its parameters have other names or shapes.
    """
    if not isinstance(state, dict) or LOCAL_STEPS not in state:
        raise load_error(
            f"the state must be one of a hook that keeps ranks apart, such as '{hook_name}', got "
            f"one without '{LOCAL_STEPS}'"
        )
    position = checked_position(state, "its ", load_error)
    rest = {key: value for key, value in state.items() if key != LOCAL_STEPS}
    pieces = state.get(own_key)
    if not isinstance(pieces, dict):  # the memory's check raises an error
        return CheckedState([], position, rest)
    kinds = [kind for kind in pieces if kind not in (PARAMETERS, MEANS)]
    rest[own_key] = {kind: pieces[kind] for kind in kinds}
    values = pieces.get(PARAMETERS, {})
    is_apart = position["done"] > 0 or position["is_open"]
    if not isinstance(values, dict) or (not values and is_apart):
        got = "none" if isinstance(values, dict) else shown(values)
        raise load_error(f"its '{PARAMETERS}' must have the rank's parameters, by name, got {got}")
    own = []
    for name, parameter in by_name.items() if values else ():
        # Infinite and NaN values pass: training may have diverged.
        own.append((parameter, _checked(values, PARAMETERS, name, parameter, parameter.dtype)))
    return CheckedState(own, position, rest)


def check_fragment(position: Mapping[str, Any], hook: local_sgd) -> None:
    """Refuse a position that a hook with other fragments cannot continue from.

    Raises:
        ValueError: an exchange was running, and its fragment has other parameters in this hook; or
            this hook has no fragment with the next number.
    """
    there = position.get("fragments", hook.fragments)
    if position.get("steps_in_flight", -1) >= 0 and there != hook.fragments:
        raise load_error(
            f"an exchange of one of {there} fragments was running, and the hook with fragments="
            f"{hook.fragments} cannot continue it; load it with fragments={there}, and call "
            "synchronize()"
        )
    if position.get("fragment", 0) >= hook.fragments:
        raise load_error(
            f"fragment {position['fragment']} of {there} is next (counted from 0), and the hook "
            f"has fragments={hook.fragments}; load it with fragments={there}, and call "
            "synchronize()"
        )


def checked_means(
    state: Mapping[str, Any], own_key: str, memories: Sequence[BucketMemory]
) -> dict[str, Tensor]:
    """The mean distances of a fragment whose exchange was running.

    Args:
        state: the state to load.
        own_key: its key for this rank's tensors.
        memories: the hook's memory of the fragment's buckets.

    Raises:
        ValueError: the state has other means.
    """
    parameters: dict[str, Tensor] = {}
    for memory in memories:
        parameters.update(zip(memory.names or (), memory.parameters, strict=True))
    own = state.get(own_key)
    values = own.get(MEANS) if isinstance(own, dict) else None
    if not isinstance(values, dict):
        raise load_error(
            f"its '{MEANS}' must have, by name, the mean distances of the fragment whose exchange "
            f"was running, got {shown(values)}"
        )
    return {
        name: _checked(values, MEANS, name, each, precise(each.dtype)).to(each.device, copy=True)
        for name, each in parameters.items()
    }


def position_of(place: Round, background: BackgroundExchange | None) -> dict[str, Any]:
    """The position in a round, in the form of a state.

    An exchange that has failed counts as not begun.

    Args:
        place: the position in the round.
        background: a running exchange with a known outcome.
    """
    if background is None:
        return place.position(-1)
    if background.failure is None:
        return place.position(background.steps)
    return place.before(background.fragment, background.began_at + background.steps).position(-1)


def exchange_of_state(
    replica: Replica, place: Round, steps: int, means: Mapping[str, Tensor]
) -> BackgroundExchange:
    """A running exchange with known means.

    Args:
        replica: the parameters' copy of the model.
        place: the position in the round.
        steps: the number of steps since the exchange began.
        means: mean distances by parameter name.
    """
    return BackgroundExchange(
        replica, place.fragment_before, began_at=place.began_at(steps), steps=steps, means=means
    )


def _checked(
    values: Mapping[str, Any], kind: str, name: str, parameter: Tensor, dtype: torch.dtype
) -> Tensor:
    if name not in values:
        raise load_error(
            f"the state must have parameter '{name}' of shape {tuple(parameter.shape)}, got none"
        )
    return check_tensor(
        f"'{kind}' of parameter '{name}'",
        values[name],
        parameter.shape,
        dtype,
        load_error,
        is_finite=False,
    )


def own_tensors(
    parameters: Mapping[str, Tensor], means: Mapping[str, Tensor] | None
) -> dict[str, dict[str, Tensor]]:
    """Copies of this rank's tensors for a state. Kinds and names are the same at every step.

    Args:
        parameters: the parameters by name.
        means: the mean distances of a running exchange by name, as far as they have arrived;
            others are saved as zeros. None for a hook without exchanges in the background.
    """
    own = {PARAMETERS: {name: each.detach().clone() for name, each in parameters.items()}}
    if means is not None:
        own[MEANS] = {
            name: torch.zeros_like(each, dtype=precise(each.dtype), requires_grad=False)
            for name, each in parameters.items()
            if name not in means
        }
        own[MEANS] |= {name: each.detach().clone() for name, each in means.items()}
    return own


def check_anchors(state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that a state has an anchor of each parameter.

    Otherwise each rank would use its own parameter as the anchor.

    Args:
        state: the state to load, already checked by the memory.
        names: the parameters' names.

    Raises:
        ValueError: the state lacks an anchor.
    """
    missing = sorted(set(names) - set(state["shared"].get(ANCHOR, {})))
    if missing:
        raise load_error(f"its '{ANCHOR}' lacks {missing}")
