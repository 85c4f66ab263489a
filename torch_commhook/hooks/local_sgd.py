"""Steps on each rank's own gradients, and an average of the parameters every H steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.hooks.base import Hook, HookTraits
from torch_commhook.hooks.compressed import check_inner_hook
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.states import ANCHOR, ERROR, MOMENTUM
from torch_commhook.memory.watches import cannot_be_captured
from torch_commhook.wording import check_type

# ---- the fragments of a model that :class:`local_sgd` exchanges one by one -----------------------


#: The first number in a parameter's name is its layer's, as in ``layers.3.weight``.
_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)\.")


def fragments_of(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Assign each parameter of a model to a fragment.

    Layers go to fragments in turn: fragment p has layers p, p + ``count``, p + 2 ``count`` and so
    on, as in Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512). The layers of several
    lists are numbered consecutively, in the order of the lists' names. Each module outside layers
    goes to the fragment with the fewest elements so far, the largest module first. If there are
    fewer layers than fragments, layers are assigned like these modules. If there are fewer layers
    and modules than fragments, so are single parameters. The order of ``sizes`` does not matter.

    Args:
        sizes: the number of elements of each parameter, by name.
        count: the number of fragments.

    Returns:
        The fragment's number, 0 to ``count - 1``, by parameter name. No fragment is empty.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if count > len(sizes):
        raise ValueError(
            f"local_sgd: fragments must be at most {len(sizes)}, the number of the model's "
            f"parameters, got {count}"
        )
    layers: dict[tuple[str, int], list[str]] = {}
    modules: dict[str, list[str]] = {}
    for name in sorted(sizes):
        found = _LAYER.match(name)
        if found is not None:
            layers.setdefault((found[1], int(found[2])), []).append(name)
        else:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    in_turn = [names for _, names in sorted(layers.items())]
    by_size = list(modules.values())
    if len(in_turn) < count:
        by_size, in_turn = in_turn + by_size, []
        if len(by_size) < count:
            by_size = [[name] for name in sorted(sizes)]
    fragments = [in_turn[first::count] for first in range(count)]
    elements = [sum(sizes[name] for names in each for name in names) for each in fragments]
    by_size.sort(key=lambda names: -sum(sizes[name] for name in names))
    for names in by_size:
        smallest = min(range(count), key=lambda number: (elements[number], len(fragments[number])))
        fragments[smallest].append(names)
        elements[smallest] += sum(sizes[name] for name in names)
    return {
        name: number for number, each in enumerate(fragments) for names in each for name in names
    }


# ---- steps on each rank's own gradients, and an average of the parameters every H steps ----------


@dataclass(frozen=True)
class outer_sgd:  # noqa: N801 (written as it is called, within a hook)
    """The outer optimizer of :class:`local_sgd`: SGD with the mean distance as the gradient.

    Same as ``torch.optim.SGD``. The defaults are DiLoCo's (Douillard et al., 2023,
    arXiv:2311.08105). With ``outer_sgd(1.0, 0.0)`` the anchor becomes the mean of the ranks'
    parameters.

    Args:
        lr: the learning rate.
        momentum: the momentum's factor. 0 needs no memory.
        nesterov: whether to use Nesterov's momentum. Without momentum it changes nothing.

    Raises:
        TypeError: ``lr`` or ``momentum`` is not a number, or ``nesterov`` is not a bool.
        ValueError: ``lr`` is not positive, or ``momentum`` is not in [0, 1).

    Example:
        >>> hooks.outer_sgd()
        outer_sgd(lr=0.7, momentum=0.9, nesterov=True)
        >>> hooks.local_sgd(30, outer=hooks.outer_sgd(lr=1.0, momentum=0.0))
        local_sgd(30, outer=outer_sgd(lr=1.0, momentum=0.0, nesterov=True))
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "momentum"):
            check_type(f"outer_sgd: {name}", getattr(self, name), "a number", int, float)
        check_type("outer_sgd: nesterov", self.nesterov, "a bool", bool)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"outer_sgd: lr must be positive, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_sgd: momentum must be from 0 to below 1, got {self.momentum}")

    def step(self, anchors: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
        """Move the anchors in place.

        Args:
            anchors: the anchors. Written.
            gradients: gradients of the anchors' shapes and dtypes.
            momenta: momenta of the same shapes and dtypes, at first zeros. Written. Empty without
                momentum.
        """
        if self.momentum:
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, gradients)
            if self.nesterov:
                gradients = list(torch._foreach_add(gradients, momenta, alpha=self.momentum))
            else:
                gradients = momenta
        torch._foreach_add_(anchors, gradients, alpha=-self.lr)


class local_sgd(Hook):  # noqa: N801 (a hook is written as it is called)
    """Let each rank step on its own gradients, and average the parameters every ``H`` steps.

    In the style of DiLoCo (Douillard et al., 2023, arXiv:2311.08105). All ranks start from the same
    parameters, the anchor. A backward sends nothing: gradients stay each rank's own. After every
    ``H`` optimizer steps, before ``optimizer.step()`` returns, the ranks average their parameters'
    distances from the anchor. The outer optimizer moves the anchor by the mean, and the parameters
    become the new anchor. With ``H = 1``, SGD and ``outer_sgd(1.0, 0.0)`` this is data-parallel
    SGD, up to rounding.

    Traffic is that of ``hook``, divided by ``H``. Memory is one anchor for each parameter and, with
    momentum, as much again: float32 for 16-bit parameters, the parameter's own dtype for others.

    With ``fragments``, ``delay`` or ``mix`` it works in the style of Streaming DiLoCo (Douillard et
    al., 2025, arXiv:2501.18512). The model is divided into ``fragments``. Each fragment is
    exchanged once in ``H`` steps, ``H / fragments`` steps after the previous one. Total traffic is
    the same, but the peak is one fragment. An exchange sends the distances at its begin, and runs
    in the background for ``delay`` steps. Then the outer optimizer moves the fragment's anchor, and
    its parameters become ``mix`` times themselves plus ``1 - mix`` times the anchor. If the mean
    has not arrived by then, the step waits for it.

    A step ends when optimizers of ``torch.optim`` have stepped all of the model's parameters that
    have a gradient. Some steps involve no optimizer: ``GradScaler`` skips it, or the update is
    written by hand. The hook notices these, and steps of only some parameters, at the next forward,
    because ``zero_grad()`` has removed the gradients. All ranks must take equally many steps.

    On a sharded model the replicas of a mesh of two dimensions, or of ``replicate()``, are apart.
    The ranks of a replica average their gradients. Every ``H`` steps each rank averages its shards'
    distances over the replicas (``docs/sharded.md``).

    The optimizer's state, the model's buffers and random numbers stay each rank's own.
    ``docs/local_sgd.md`` describes the consequences, and checkpoints. At the end of training
    :meth:`HookHandle.synchronize` gives all ranks the same parameters.

    Only for attached hooks (:func:`torch_commhook.attach`).

    Args:
        H: the number of steps between two exchanges.
        outer: moves the anchor. The default is ``outer_sgd(0.7, 0.9)``.
        hook: averages the distances. The default is :class:`allreduce`. With a hook that
            compresses, such as ``error_feedback(blockwise(bits=4))``, both factors reduce traffic.
        error_reset: whether a rank continues from the anchor plus its unsent error: error reset
            (Xie et al., 2020, arXiv:2007.13221). Late parts of its update are then late for other
            ranks only. Needs a hook that remembers errors. Ranks differ by these errors until
            :meth:`HookHandle.synchronize`, which sends them uncompressed. Not together with
            ``fragments``, ``delay`` or ``mix``.
        fragments: the number of parts that are exchanged one by one. Fragment p has the repeated
            layers p, p + ``fragments`` and so on; other parameters are assigned by size
            (``docs/local_sgd.md``).
        delay: the number of steps during which an exchange runs, below ``H / fragments``. 0 waits
            for it at once.
        mix: the weight of a rank's own parameters at the end of an exchange, in [0, 1). With 0 a
            rank drops its own steps since the exchange began.

    Raises:
        TypeError: an argument has another type than above.
        ValueError: ``H`` is not positive; ``hook`` keeps ranks apart itself; with ``error_reset``,
            ``hook`` remembers no errors of whole buckets, has a group of its own, or is combined
            with ``fragments``, ``delay`` or ``mix``; with ``fragments``, ``hook`` decides about all
            buckets together, as ``adaptive`` does. ``fragments`` is not in [1, ``H``], ``delay``
            not in [0, ``H / fragments``), or ``mix`` not in [0, 1). From
            :func:`torch_commhook.attach`: the model has fewer parameters than ``fragments``.

    Example:
        >>> def train(rank):
        ...     torch.manual_seed(0)
        ...     model = nn.Linear(2, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     handle = attach(model, hooks.local_sgd(4, outer=hooks.outer_sgd(1.0, 0.0)))
        ...     for _ in range(8):
        ...         optimizer.zero_grad()
        ...         model(torch.full((1, 2), float(rank))).sum().backward()  # sends nothing
        ...         optimizer.step()  # each fourth brings the ranks together
        ...     handle.synchronize()
        ...     return model.weight.detach(), handle.stats().steps
        >>> (first, rounds), (second, _) = run_ranks(train, 2)
        >>> rounds, torch.equal(first, second)
        (2, True)
    """

    traits = HookTraits(keeps_ranks_apart=True)

    def __init__(
        self,
        H: int,  # noqa: N803 (as the papers call it)
        *,
        outer: outer_sgd | None = None,
        hook: Hook | None = None,
        error_reset: bool = False,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
    ) -> None:
        super().__init__()
        check_type("local_sgd: H", H, "an int", int)
        if H < 1:
            raise ValueError(f"local_sgd: H must be at least 1, got {H}")
        outer = outer_sgd() if outer is None else outer
        hook = allreduce() if hook is None else hook
        check_type("local_sgd: outer", outer, "an outer_sgd", outer_sgd)
        check_inner_hook("local_sgd: hook", hook)
        if hook.keeps_ranks_apart:
            raise ValueError(f"local_sgd: hook must not keep ranks apart itself, got {hook}")
        check_type("local_sgd: error_reset", error_reset, "a bool", bool)
        if error_reset and (not hook.keeps_error or hook.splits_buckets or hook.has_own_groups()):
            raise ValueError(
                "local_sgd: with error_reset, hook must remember its errors of each bucket, and "
                f"average over the model's ranks, got {hook}; use error_feedback"
            )
        if error_reset and hook.error_decay != 1.0:
            raise ValueError(
                "local_sgd: with error_reset, hook's error memory must not decay, since a rank "
                f"takes all of it back, got {hook}"
            )
        self.H = H
        self.outer = outer
        self.hook = hook
        self.traits = replace(self.traits, has_stages=hook.has_stages)
        self.error_reset = error_reset
        self._set_streaming(fragments, delay, mix)

    def _set_streaming(self, fragments: int, delay: int, mix: float) -> None:
        check_type("local_sgd: fragments", fragments, "an int", int)
        check_type("local_sgd: delay", delay, "an int", int)
        check_type("local_sgd: mix", mix, "a number", int, float)
        if not 1 <= fragments <= self.H:
            raise ValueError(
                f"local_sgd: fragments must be from 1 to {self.H}, which is H, got {fragments}"
            )
        if not 0 <= delay * fragments < self.H:
            raise ValueError(
                "local_sgd: delay must be from 0 to below H / fragments, which is "
                f"{self.H / fragments:g}, got {delay}"
            )
        if not 0 <= mix < 1:
            raise ValueError(f"local_sgd: mix must be from 0 to below 1, got {mix}")
        if fragments > 1 and self.hook.settles_buckets:
            raise ValueError(
                "local_sgd: with fragments, hook must not decide about all buckets together, got "
                f"{self.hook}"
            )
        self.fragments = fragments
        self.delay = delay
        self.mix = float(mix)
        if self.error_reset and self.is_streaming:
            raise ValueError(
                "local_sgd: error_reset must be False with fragments, delay or mix, got "
                "True; error feedback sends errors with the fragment's next exchange"
            )

    @property
    def is_streaming(self) -> bool:
        """Whether ranks stay apart after an exchange, or take steps during one."""
        return self.fragments > 1 or self.delay > 0 or self.mix > 0

    def hooks_inside(self) -> Sequence[Hook]:
        return (self.hook,)

    def prepare(self, memory: BucketMemory) -> None:
        if self.fragments == 1:
            self._prepare(memory)
            return
        names = memory.names
        assert names is not None  # the hook is attached
        number_of = fragments_of(memory.model_sizes, self.fragments)
        for fragment in range(self.fragments):
            places = [i for i, name in enumerate(names) if number_of[name] == fragment]
            if places:
                self._prepare(memory.part(f"fragment {fragment}", places))

    def _prepare(self, memory: BucketMemory) -> None:
        self._anchors(memory)
        self._momenta(memory)
        self.hook.prepare(memory)

    def pieces(self, memory: BucketMemory, fragment: int | None) -> list[BucketMemory]:
        """The memories of a bucket's parts that are exchanged one by one: of a fragment, or all."""
        if self.fragments == 1:
            return [memory]
        if fragment is None:
            return list(memory.parts.values())
        part = memory.parts.get(f"fragment {fragment}")
        return [] if part is None else [part]

    def step_counted(self, memory: HookMemory) -> None:
        self.hook.step_counted(memory)

    def check_capture(self, memory: BucketMemory) -> None:
        raise cannot_be_captured(str(self), "the host counts the optimizer's steps")

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return the gradients unchanged."""
        return bucket.buffer()  # type: ignore[return-value]

    # No annotations: DDP compares them as objects, and does not accept strings.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"{self}: averages parameters after the optimizer's steps, which only an attached hook "
            "counts; use torch_commhook.attach(model, hook)"
        )

    # ---- for the exchange ------------------------------------------------------------------------

    def distance(self, memory: BucketMemory, *, unsent: bool = False) -> Tensor:
        """The parameters' distance since the last exchange: old values minus present ones.

        A flat tensor of the parameters' dtype, in the bucket's order. ``unsent`` adds the hook's
        unsent errors.
        """
        # Not kept: it would stay unused for all steps between two exchanges.
        flat = torch.empty(memory.numel, dtype=memory.dtype, device=memory.device)
        pieces = memory.layout.views(flat)
        start = self._anchors(memory) if unsent else self._start(memory)
        torch._foreach_copy_(pieces, _rounded(start, memory))
        torch._foreach_sub_(pieces, memory.parameters)
        return flat

    def means(self, memory: BucketMemory, result: Tensor) -> list[Tensor]:
        """The mean distance of each parameter, with its shape and the anchor's dtype.

        ``result`` is the hook's mean of the ranks' distances.
        """
        return list(memory.layout.views(result.to(precise(memory.dtype))))

    def move(
        self,
        memory: BucketMemory,
        means: list[Tensor],
        *,
        unsent: bool = False,
        mix: float = 0.0,
    ) -> None:
        """Move the anchor by the ranks' mean distance, and the parameters to the anchor.

        Args:
            means: the result of :meth:`means`.
            unsent: whether the means include all unsent errors.
            mix: the weight of the parameters' present values.
        """
        anchors = self._anchors(memory)
        self.outer.step(anchors, means, self._momenta(memory))
        if self.error_reset:
            # A rank takes back the errors of the sum, too.
            memory.fold_all_segments()
        if unsent:
            memory.tensors[ERROR].zero_()
        if not mix:
            self.return_to_start(memory)
            return
        # In the anchor's dtype: 16-bit parameters are rounded once.
        mixed = [parameter.to(anchors[0].dtype) for parameter in memory.parameters]
        mixed = list(torch._foreach_mul(mixed, mix))
        torch._foreach_add_(mixed, anchors, alpha=1.0 - mix)
        torch._foreach_copy_(memory.parameters, mixed)

    def return_to_start(self, memory: BucketMemory) -> None:
        """Set the parameters to their values after an exchange."""
        torch._foreach_copy_(memory.parameters, self._start(memory))

    def is_ahead(self, memory: BucketMemory) -> bool:
        """Whether this rank's parameters differ from the anchor after an exchange."""
        return self.error_reset and bool(memory.tensors[ERROR].any())

    def has_moved(self, memory: BucketMemory) -> bool:
        """Whether the parameters have changed since an exchange set them."""
        places = zip(self.starts(memory), memory.parameters, strict=True)
        return any(not torch.equal(start, parameter) for start, parameter in places)

    def unsent(self, memory: BucketMemory) -> list[tuple[Tensor, Tensor]]:
        """The tensors that a failed exchange must restore, and copies of them.

        These are the hook's errors. With ``error_reset`` the errors of whole buckets are left out:
        a rank's distance is measured from them, and contains the rest.
        """
        names = self.hook.segments(memory) if self.hook.keeps_error else []
        if self.hook.keeps_error and not self.error_reset:
            names = [ERROR, *names]
        found = [memory.tensors[name] for name in names if name in memory.tensors]
        kept = [(tensor, tensor.clone()) for tensor in found]
        for part in memory.parts.values():
            kept += self.unsent(part)
        return kept

    def anchor_here(self, memory: BucketMemory) -> dict[int, list[Tensor]]:
        """Move the anchor to parameters that a user has changed.

        Returns:
            By the ids of these parameters, what :meth:`anchor_and_error` had before.
        """
        found = {}
        starts = zip(memory.parameters, self.starts(memory), strict=True)
        changed = [p for p, start in starts if not torch.equal(start, p)]
        kept = self.anchor_and_error(memory) if changed else {}
        for parameter in changed:
            anchor, *errors = kept[id(parameter)]
            found[id(parameter)] = [anchor.clone(), *(error.clone() for error in errors)]
            anchor.copy_(parameter)
            for error in errors:
                error.zero_()
        return found

    def anchor_and_error(self, memory: BucketMemory) -> dict[int, list[Tensor]]:
        """Each parameter's anchor and, with ``error_reset``, its unsent error, by its id."""
        errors = [memory.layout.views(memory.tensors[ERROR])] if self.error_reset else []
        places = zip(self._anchors(memory), *errors, strict=True)
        return dict(zip(map(id, memory.parameters), map(list, places), strict=True))

    def starts(self, memory: BucketMemory) -> list[Tensor]:
        """The parameters' values after an exchange, in their dtype."""
        return _rounded(self._start(memory), memory)

    def _start(self, memory: BucketMemory) -> list[Any]:
        """The values from which a rank continues after an exchange."""
        anchors = self._anchors(memory)
        if not self.error_reset:
            return anchors
        return list(torch._foreach_sub(anchors, memory.layout.views(memory.tensors[ERROR])))

    def _anchors(self, memory: BucketMemory) -> list[Any]:
        return memory.per_parameter(
            ANCHOR,
            lambda _, parameter: parameter.detach().to(precise(parameter.dtype), copy=True),
        )

    def _momenta(self, memory: BucketMemory) -> list[Any]:
        if not self.outer.momentum:
            return []
        return memory.per_parameter(
            MOMENTUM,
            lambda _, parameter: torch.zeros_like(
                parameter, dtype=precise(parameter.dtype), requires_grad=False
            ),
        )

    def __repr__(self) -> str:
        said = [str(self.H)]
        if self.outer != outer_sgd():
            said.append(f"outer={self.outer}")
        if type(self.hook) is not allreduce:
            said.append(f"hook={self.hook}")
        if self.error_reset:
            said.append("error_reset=True")
        if self.fragments > 1:
            said.append(f"fragments={self.fragments}")
        if self.delay:
            said.append(f"delay={self.delay}")
        if self.mix:
            said.append(f"mix={self.mix}")
        return f"local_sgd({', '.join(said)})"


def _rounded(values: list[Tensor], memory: BucketMemory) -> list[Tensor]:
    """Values of a higher precision than the bucket's parameters, rounded as these were."""
    return [
        value.to(parameter.dtype)
        for value, parameter in zip(values, memory.parameters, strict=True)
    ]


def precise(dtype: torch.dtype) -> torch.dtype:
    """The anchor's dtype: a sum over many steps needs more than 16 bits."""
    return torch.float32 if dtype.itemsize == 2 else dtype
