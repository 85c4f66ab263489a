"""Steps on each rank's own gradients, and an average of the parameters now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.hooks.base import Hook, check_is_chosen
from torch_commhook.hooks.fragments import fragments_of
from torch_commhook.hooks.mean import allreduce
from torch_commhook.hooks.traits import HookTraits
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.replays import cannot_be_captured
from torch_commhook.memory.states import ANCHOR, ERROR, MOMENTUM


@dataclass(frozen=True)
class outer_sgd:  # noqa: N801 (written as it is called, within a hook)
    """How :class:`local_sgd` moves the anchor: SGD, with the mean distance as its gradient.

    The same as ``torch.optim.SGD``. The defaults are DiLoCo's (Douillard et al., 2023,
    arXiv:2311.08105); ``outer_sgd(1.0, 0.0)`` makes the anchor the mean of the ranks' parameters.

    Args:
        lr: learning rate.
        momentum: of the steps before; 0 needs no memory.
        nesterov: whether the momentum is that of Nesterov. Without momentum it changes nothing.

    Raises:
        TypeError: no numbers.
        ValueError: ``lr`` is not positive, or ``momentum`` not from 0 to below 1.

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
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(
                    f"outer_sgd: {name} must be a number, got {type(value).__qualname__}"
                )
        if not isinstance(self.nesterov, bool):
            raise TypeError(
                f"outer_sgd: nesterov must be a bool, got {type(self.nesterov).__qualname__}"
            )
        if not 0 < self.lr < math.inf:
            raise ValueError(f"outer_sgd: lr must be positive, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_sgd: momentum must be from 0 to below 1, got {self.momentum}")

    def step(self, anchors: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
        """Move the anchors.

        Args:
            anchors: written.
            gradients: of the anchors' shapes and dtypes.
            momenta: written; of the same shapes and dtypes, zeros at first. Without momentum none.
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
    """Let each rank step on its own gradients, and bring the ranks together every ``H`` steps.

    In the style of DiLoCo (Douillard et al., 2023, arXiv:2311.08105). All ranks start from the same
    parameters, the anchor. Gradients stay each rank's own, and nothing is sent in a backward. After
    every ``H`` steps of the optimizer, before ``optimizer.step()`` returns, the ranks average how
    far they have come from the anchor, an outer optimizer moves the anchor by that, and the
    parameters become the new anchor. With ``H = 1``, SGD and ``outer_sgd(1.0, 0.0)`` that is
    data-parallel SGD, to rounding.

    Traffic is that of ``hook``, divided by ``H``. Memory is the anchor and, with momentum, as much
    again: float32 for parameters of 16 bits, the parameters' own dtype for others.

    With ``fragments``, ``delay`` or ``mix`` it works in the style of Streaming DiLoCo (Douillard et
    al., 2025, arXiv:2501.18512). The model's parameters are cut into ``fragments``, each of which
    is exchanged once in ``H`` steps, ``H / fragments`` steps after the one before: traffic is the
    same, at most a fragment at once. An exchange begins after a step with the distances of that
    moment, and goes on in the background for ``delay`` steps. Only then does the outer optimizer
    move the fragment's anchor, and its parameters become ``mix`` times themselves plus
    ``1 - mix`` times the anchor. The step that needs a mean which has not come yet waits for it.

    A step is over when optimizers of ``torch.optim`` have stepped all of the model's parameters
    that have a gradient. A step that no optimizer takes (``GradScaler`` skips it, or the update is
    written by hand) is noticed when the next forward begins, by gradients that
    ``zero_grad()`` has taken away meanwhile; so is one in which only some of the parameters were
    stepped. Ranks must take equally many.

    On sharded models the replicas of a mesh of two dimensions, or of ``replicate()``, are apart.
    The ranks of a replica average their gradients, and after every ``H`` steps each averages its
    shards' distances over the replicas (``docs/sharded.md``).

    The optimizer's own state, buffers of the model and random numbers stay each rank's; see
    ``docs/local_sgd.md`` for what that means, and for checkpoints. At the end of training
    :meth:`HookHandle.synchronize` brings the ranks together.

    Only for hooks that are attached (:func:`torch_commhook.attach`).

    Args:
        H: steps from one exchange to the next.
        outer: moves the anchor; ``outer_sgd(0.7, 0.9)`` by default.
        hook: averages the distances; :class:`allreduce` by default. With one that compresses, such
            as ``error_feedback(blockwise(bits=4))``, traffic falls by both factors.
        error_reset: whether a rank goes on from the anchor and what it has not sent yet, not from
            the anchor alone: error reset (Xie et al., 2020, arXiv:2007.13221). What is sent late
            is then late for the other ranks only. For hooks that remember what they lose. Ranks
            stay apart by that until :meth:`HookHandle.synchronize`, which sends it uncompressed.
            Not with the next three.
        fragments: parts of the model that are exchanged one by one: by repeated layers, fragment p
            having layers p, p + ``fragments`` and so on; the rest by size (``docs/local_sgd.md``).
        delay: steps during which an exchange goes on, below ``H / fragments``. 0 waits for it.
        mix: weight of a rank's own parameters where an exchange ends, from 0 to below 1. With 0 a
            rank gives up its own steps since the exchange began.

    Raises:
        TypeError: no int, no ``outer_sgd``, no hook of the library, no bool, or no number.
        ValueError: ``H`` is not positive, or ``hook`` keeps ranks apart itself; with
            ``error_reset``, it remembers nothing of whole buckets, or has a group of its own, or
            there are ``fragments``, ``delay`` or ``mix``; with ``fragments``, it settles something
            for the whole model, as ``adaptive`` does. ``fragments`` is not from 1 to ``H``,
            ``delay`` not from 0 to below ``H / fragments``, or ``mix`` not from 0 to below 1. From
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

    _commhook_traceable = True
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
        if not isinstance(H, int) or isinstance(H, bool):
            raise TypeError(f"local_sgd: H must be an int, got {type(H).__qualname__}")
        if H < 1:
            raise ValueError(f"local_sgd: H must be at least 1, got {H}")
        outer = outer_sgd() if outer is None else outer
        hook = allreduce() if hook is None else hook
        if not isinstance(outer, outer_sgd):
            raise TypeError(
                f"local_sgd: outer must be an outer_sgd, got {type(outer).__qualname__}"
            )
        if not isinstance(hook, Hook):
            raise TypeError(
                "local_sgd: hook must be one of torch_commhook.hooks, got "
                f"{type(hook).__qualname__}"
            )
        check_is_chosen("local_sgd: hook", hook)
        if hook.keeps_ranks_apart:
            raise ValueError(f"local_sgd: hook must bring the ranks together, got {hook}")
        if not isinstance(error_reset, bool):
            raise TypeError(
                f"local_sgd: error_reset must be a bool, got {type(error_reset).__qualname__}"
            )
        if error_reset and (not hook.keeps_error or hook.splits_buckets or hook.has_own_groups()):
            raise ValueError(
                "local_sgd: with error_reset, hook must remember what it loses of each bucket, and "
                f"average over the model's ranks, got {hook}; use error_feedback"
            )
        if error_reset and hook.error_decay != 1.0:
            raise ValueError(
                "local_sgd: with error_reset, what hook remembers must not decay, since a rank "
                f"takes all of it back, got {hook}"
            )
        self.H = H
        self.outer = outer
        self.hook = hook
        self.traits = replace(self.traits, has_stages=hook.has_stages)
        self.error_reset = error_reset
        self._set_streaming(fragments, delay, mix)

    def _set_streaming(self, fragments: int, delay: int, mix: float) -> None:
        for name, value in (("fragments", fragments), ("delay", delay)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"local_sgd: {name} must be an int, got {type(value).__qualname__}")
        if not isinstance(mix, (int, float)) or isinstance(mix, bool):
            raise TypeError(f"local_sgd: mix must be a number, got {type(mix).__qualname__}")
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
                "local_sgd: with fragments, hook must not be about all of them together, got "
                f"{self.hook}"
            )
        self.fragments = fragments
        self.delay = delay
        self.mix = float(mix)
        if self.error_reset and self.is_streaming:
            raise ValueError(
                "local_sgd: error_reset must be False where there are fragments, delay or mix, got "
                "True; error feedback sends what is lost with the fragment's next exchange"
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
        assert names is not None  # of a hook that is attached
        number_of = fragments_of(memory.model_sizes, self.fragments)
        for fragment in range(self.fragments):
            places = [i for i, name in enumerate(names) if number_of[name] == fragment]
            if places:
                self._prepare(memory.part(_part_name(fragment), places))

    def _prepare(self, memory: BucketMemory) -> None:
        self._anchors(memory)
        self._momenta(memory)
        self.hook.prepare(memory)

    def pieces(self, memory: BucketMemory, fragment: int | None) -> list[BucketMemory]:
        """The memories of the parts of a bucket that travel by themselves.

        Args:
            memory: of a bucket.
            fragment: those of one; None for all.
        """
        if self.fragments == 1:
            return [memory]
        if fragment is None:
            return list(memory.parts.values())
        part = memory.parts.get(_part_name(fragment))
        return [] if part is None else [part]

    def step_counted(self, memory: HookMemory) -> None:
        self.hook.step_counted(memory)

    def check_capture(self, memory: BucketMemory) -> None:
        raise cannot_be_captured(str(self), "the host counts the optimizer's steps")

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The gradients as they are."""
        return bucket.buffer()  # type: ignore[return-value]

    # No annotations: DDP compares them as they are, and does not understand strings.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"{self}: ranks are brought together after the optimizer's steps, of which only a hook "
            "that is attached knows; use torch_commhook.attach(model, hook)"
        )

    # ---- for the exchange ------------------------------------------------------------------------

    def distance(self, memory: BucketMemory, *, unsent: bool = False) -> Tensor:
        """How far the parameters have come since the last exchange: where they were less these.

        Args:
            memory: of a bucket.
            unsent: with what the hook remembers that it has not sent.

        Returns:
            Flat, of the parameters' dtype, laid out as the bucket is.
        """
        # Not kept: it would lie there unused for as many steps as there are between exchanges.
        flat = torch.empty(memory.numel, dtype=memory.dtype, device=memory.device)
        pieces = memory.layout.views(flat)
        # Rounded as the parameters were when they left it.
        start = self._anchors(memory) if unsent else self._start(memory)
        torch._foreach_copy_(pieces, start)
        torch._foreach_sub_(pieces, memory.parameters)
        return flat

    def means(self, memory: BucketMemory, result: Tensor) -> list[Tensor]:
        """The mean distance of each parameter, of its shape and the anchor's dtype.

        Args:
            memory: of a bucket.
            result: what the hook has made of the ranks' distances.
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
        """Move the anchor by the mean distance of the ranks, and the parameters there.

        Args:
            memory: of a bucket.
            means: as :meth:`means` gives them.
            unsent: whether these have all that the hook had not sent.
            mix: weight of the parameters as they are.
        """
        anchors = self._anchors(memory)
        self.outer.step(anchors, means, self._momenta(memory))
        if self.error_reset:
            # What ranks have lost of the sum becomes theirs to go on from, too.
            memory.fold_all_shards()
        if unsent:
            memory.tensors[ERROR].zero_()
        if not mix:
            self.return_to_start(memory)
            return
        # In the anchor's dtype: parameters of 16 bits are rounded once.
        mixed = [parameter.to(anchors[0].dtype) for parameter in memory.parameters]
        mixed = list(torch._foreach_mul(mixed, mix))
        torch._foreach_add_(mixed, anchors, alpha=1.0 - mix)
        torch._foreach_copy_(memory.parameters, mixed)

    def return_to_start(self, memory: BucketMemory) -> None:
        """Put the parameters where they are after an exchange."""
        torch._foreach_copy_(memory.parameters, self._start(memory))

    def is_ahead(self, memory: BucketMemory) -> bool:
        """Whether this rank's parameters are elsewhere than the anchor, after an exchange."""
        return self.error_reset and bool(memory.tensors[ERROR].any())

    def has_moved(self, memory: BucketMemory) -> bool:
        """Whether the parameters are elsewhere than where an exchange has put them."""
        places = zip(self._start(memory), memory.parameters, strict=True)
        return any(not torch.equal(start.to(each.dtype), each) for start, each in places)

    def unsent(self, memory: BucketMemory) -> list[tuple[Tensor, Tensor]]:
        """The tensors that a failed exchange must leave as they were, and copies of them.

        The hook's errors. With ``error_reset`` not those of whole buckets: a rank's distance is
        measured from them, and has what they lack.
        """
        names = self.hook.shards(memory) if self.hook.keeps_error else []
        if self.hook.keeps_error and not self.error_reset:
            names = [ERROR, *names]
        found = [memory.tensors[name] for name in names if name in memory.tensors]
        kept = [(tensor, tensor.clone()) for tensor in found]
        for part in memory.parts.values():
            kept += self.unsent(part)
        return kept

    def anchor_here(self, memory: BucketMemory) -> set[int]:
        """Put the anchor where the parameters are, where somebody has moved them.

        Returns:
            The ids of these parameters.
        """
        found = set()
        errors = memory.layout.views(memory.tensors[ERROR]) if self.error_reset else []
        starts = zip(self._start(memory), self._anchors(memory), memory.parameters, strict=True)
        for number, (start, anchor, parameter) in enumerate(starts):
            # One of more precision than the parameter is at the same place.
            if not torch.equal(start.to(parameter.dtype), parameter):
                anchor.copy_(parameter)
                found.add(id(memory.parameters[number]))
                if errors:
                    errors[number].zero_()
        return found

    def anchor_at_start(self, memory: BucketMemory, parameters: Set[int]) -> None:
        """Put the anchors of parameters, by their ids, where this rank has gone on from.

        With ``error_reset``, for parameters that are loaded on all ranks: this rank's own.
        """
        errors = memory.layout.views(memory.tensors[ERROR])
        places = zip(self._start(memory), self._anchors(memory), errors, strict=True)
        for parameter, (start, anchor, error) in zip(memory.parameters, places, strict=True):
            if id(parameter) in parameters:
                anchor.copy_(start)
                error.zero_()

    def _start(self, memory: BucketMemory) -> list[Any]:
        """Where a rank goes on from after an exchange."""
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


def _part_name(fragment: int) -> str:
    return f"fragment {fragment}"


def precise(dtype: torch.dtype) -> torch.dtype:
    """The anchor's dtype: what is added up over the steps needs more than 16 bits."""
    return torch.float32 if dtype.itemsize == 2 else dtype
