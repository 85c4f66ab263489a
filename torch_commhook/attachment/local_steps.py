"""Steps on each rank's own gradients, and the exchanges that give ranks the same parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook.attachment.elastic import ElasticTraining
from torch_commhook.attachment.local_state import (
    CheckedState,
    Round,
    agree_on_anchors,
    check_fragment,
    checked_means,
    split_state,
)
from torch_commhook.attachment.parameter_exchange import (
    BackgroundExchange,
    ParameterExchange,
    RepeatableExchange,
)
from torch_commhook.attachment.road import Replica, Road, stop_watching_optimizers
from torch_commhook.attachment.training_state import BeforeForward, register_first
from torch_commhook.hooks.local_sgd import local_sgd, precise
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.states import ANCHOR, LOCAL_STEPS, MEANS, PARAMETERS, load_error
from torch_commhook.memory.watches import cannot_be_captured
from torch_commhook.metrics import BucketTraffic, count_bucket
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.bucket_hooks import check_not_in_backward
from torch_commhook.wording import warn_user


class LocalSteps:
    """Counts the steps of a model whose hook keeps ranks apart, and runs the exchanges.

    Args:
        model: the model.
        attached: the hook, a :class:`local_sgd`.
        road: returns the road that the hook uses at the moment.

    Attributes:
        done: the number of steps since the last exchange.
        is_open: whether a step has begun and not ended.
    """

    def __init__(self, model: nn.Module, attached: Attached, road: Callable[[], Road]) -> None:
        self._attached = attached
        self._road = road
        self._model = weakref.ref(model)
        self.done = 0
        self.is_open = False
        self._round = Round(self.hook.H, self.hook.fragments)
        self._background: BackgroundExchange | None = None
        attached.memory.before_change = self._settle_background
        self._in_step = False  # inside an optimizer's step, which may run forward and backward
        self._is_counted = False  # a step was counted, and its exchange has not run yet
        self._stepped: set[int] = set()  # parameters that the open step has changed
        # DDP asks for memory in the first backward, when an optimizer may have stepped already.
        self._names = [name for memory in self._memories() for name in memory.names or ()]
        self._references = self._replica.references()
        self._is_over = False  # no more warnings
        # By id: parameters that a user has written since an exchange, and their earlier anchors.
        self._written: dict[int, list[Tensor]] = {}
        self._has_agreed = False  # on anchors, since the ranks last had the same parameters
        self._gradient_versions: dict[int, int] = {}  # of sharded ones, after the last backward
        # First: the model's other messages before a forward come after the exchange.
        self._forward_handle = register_first(model, BeforeForward(self))
        self._end = weakref.finalize(model, self.close, "lost its model")
        self._end.atexit = False

    @property
    def hook(self) -> local_sgd:
        hook = self._attached.hook
        assert isinstance(hook, local_sgd)
        return hook

    def close(self, what: str = "was removed") -> None:
        """Stop counting."""
        self._end.detach()
        try:
            self.warn_if_apart(what)
        finally:  # the warning may be an error
            self._is_over = True
            self._forward_handle.remove()
            stop_watching_optimizers()
            if self._background is not None:
                self._background.leave()

    def warn_if_apart(self, what: str) -> None:
        """Warn once if the ranks' parameters differ now, and say how to avoid it.

        Args:
            what: the event, as a verb after the hook's name.
        """
        if self._is_over or self._attached.memory.world_size == 1:
            return
        steps = self.done + bool(self._stepped)
        if steps:
            when = f"{steps} step{'' if steps == 1 else 's'} after the ranks' last exchange"
        elif any(map(self.hook.is_ahead, self._attached.memory.bucket_memories())):
            when = "while ranks had updates that they had not sent"
        else:
            return
        self._is_over = True
        warn_user(
            f"torch_commhook: hook '{self._attached.name}' {what} {when}, so the ranks' parameters "
            "differ. Call HookHandle.synchronize() first, on all ranks",
            RuntimeWarning,
        )

    def let_go(self) -> None:
        """Release the parameters; :meth:`state_dict` finds them by name."""
        self._references.clear()

    @property
    def _replica(self) -> Replica:
        return self._road().replica

    @property
    def _training(self) -> ElasticTraining | None:
        """The ranks, with ``elastic``; else None."""
        return self._road().elastic

    def _by_name(self) -> dict[str, Tensor]:
        """The parameters that still exist, as the hook's memory has them."""
        return self._replica.find(self._names)

    # ---- counting steps --------------------------------------------------------------------------

    def note_backward(self) -> None:
        """Note a backward: at its begin, or on sharded models at its end.

        Raises:
            RuntimeError: in ``join()``, or while a CUDA graph captures the current stream.
        """
        if self._attached.memory.replays.is_capturing:
            raise cannot_be_captured(
                f"hook '{self._attached.name}'", "the host counts the optimizer's steps"
            )
        model = self._model()
        if isinstance(model, DistributedDataParallel) and model._join_config.enable:
            raise RuntimeError(
                f"hook '{self._attached.name}': all ranks must take equally many steps, so join() "
                "cannot be used; give each as many batches"
            )
        if self._is_at_rest:
            self._look_for_anchor()
        self._give_state()  # if the model's own forward was not called
        if self._replica.is_sharded:
            gradients = [parameter.grad for parameter in self._living()]
            self._gradient_versions = {
                id(each): each._version for each in gradients if each is not None
            }
        self.is_open = True

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]
    ) -> None:
        """Note that an optimizer is about to step parameters with these ids.

        Raises:
            RuntimeError: it steps inside backward, or only some parameters on each rank.
        """
        if not self._ids().isdisjoint(parameters):
            check_not_in_backward(self._attached.name)
            if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
                raise RuntimeError(
                    f"hook '{self._attached.name}': {type(optimizer).__name__} steps only some "
                    "parameters on each rank and broadcasts them, so ranks would take no steps of "
                    "their own. Give each rank an optimizer of all parameters, such as "
                    "torch.optim.Adam(model.parameters()), or attach a hook that averages gradients"
                )
            self._in_step = True
            self._give_state()

    def _give_state(self) -> None:
        """Send new ranks their state, before the first step after an exchange."""
        training = self._training
        if training is not None:
            training.new_ranks.give()

    def count_optimizer_step(self, parameters: frozenset[int]) -> None:
        """Note that an optimizer has stepped parameters with these ids."""
        own = self._ids() & parameters
        if not own:
            return
        self._in_step = False
        self._stepped |= own
        if any(id(p) not in self._stepped for p in self._living() if p.grad is not None):
            self.is_open = True
        else:
            self._count()

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]
    ) -> None:
        """Run the exchange that is due, once all models have counted the step."""
        if self._is_counted and not self._ids().isdisjoint(parameters):
            self._take_turn()

    def before_forward(self, module: nn.Module) -> None:
        """End a step before the model's own forward. The model calls this."""
        if self.is_open and torch.is_grad_enabled():
            self._end_step()

    @torch.compiler.disable
    def _end_step(self) -> None:
        """End a step that optimizers have not ended, when another one begins."""
        if self._in_step:  # a closure
            return
        gradients = [parameter.grad for parameter in self._living()]
        if not (self._stepped or all(each is None or self._is_zeroed(each) for each in gradients)):
            return  # accumulated gradients
        self._count()
        self._take_turn()

    def _count(self) -> None:
        self.done += 1
        self._round.steps += 1
        stats = self._attached.stats
        stats.local_steps += 1
        stats.gradient_bytes += self._gradient_bytes
        if self._background is not None:
            self._background.steps += 1
        training = self._training
        if training is not None:
            training.count_local_step()
        self._is_counted = True
        self.is_open = False
        self._stepped.clear()

    @cached_property
    def _gradient_bytes(self) -> int:
        own = (p.to_local() if isinstance(p, DTensor) else p for p in self._living())
        return sum(parameter.nbytes for parameter in own)

    def _living(self) -> list[Tensor]:
        """The parameters, as optimizers have them."""
        found = [reference() for reference in self._references]
        return [parameter for parameter in found if parameter is not None]

    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self._living()))

    def _is_zeroed(self, gradient: Tensor) -> bool:
        """Whether a user has zeroed a gradient. All ranks with shards of it return the same."""
        if isinstance(gradient, DTensor):
            # One rank's shard may be empty or zero anyway. An addition of fully_shard() to an
            # existing gradient does not change the version of the whole.
            if gradient._version == self._gradient_versions.get(id(gradient), 0):
                return False
            return not gradient.to_local().any()
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        return not values.any()

    # ---- the anchor ------------------------------------------------------------------------------

    @property
    def _is_at_rest(self) -> bool:
        """Whether parameters are where an exchange has put them, apart from a user's writes."""
        return self.done == 0 and not self.is_open and not self._stepped

    def _memories(self) -> list[BucketMemory]:
        """The hook's memory of each bucket."""
        found = []
        for index, parameters in enumerate(self._road().parameter_buckets()):
            memory = self._attached.memory_of(parameters, index)
            assert memory is not None
            found.append(memory)
        return found

    def _pieces(self, fragment: int | None = None) -> list[BucketMemory]:
        """The hook's memory of the parts that one exchange sends: a fragment's, or all."""
        memories = self._memories()
        return [piece for each in memories for piece in self.hook.pieces(each, fragment)]

    def _settle_background(self) -> None:
        """Wait until no exchange writes to the hook's memory."""
        if self._background is not None:
            self._background.look()

    @torch.no_grad()
    def _look_for_anchor(self) -> None:
        """Move the anchors of parameters that a user has written since the last exchange."""
        for memory in self._memories():
            for parameter, before in self.hook.anchor_here(memory).items():
                if not self._written.get(parameter):
                    self._written[parameter] = before

    def _agree_on_anchors(self) -> None:
        """Give all ranks the same anchors, if a user may have written since they had them."""
        agree_on_anchors(
            self.hook,
            self._memories(),
            self._written,
            self._replica.group,
            waits=not self._has_agreed,
        )
        # If the exchange fails, the ranks agree again: some may not have learnt the result.
        self._written = {parameter: [] for parameter in self._written}

    # ---- the exchange ----------------------------------------------------------------------------

    @torch.inference_mode(False)  # an optimizer may step in inference mode
    @torch.no_grad()
    def _take_turn(self) -> None:
        """Run the exchange that is due after a counted step. All ranks must call this together.

        Raises:
            PeerError: an exchange has failed on another rank.
            Exception: the hook raised it.
        """
        self._is_counted = False
        background = self._background
        if background is not None and background.steps >= self.hook.delay:
            self._end_background(background)
            if self._training is not None:
                return  # new ranks get their state before the next step
        if self._background is not None or not self._round.is_due:
            return
        fragment = self._round.turn
        if not self.hook.delay:
            self._exchange(fragment)
            self._round.next_turn()
            return
        begun = BackgroundExchange(
            self._attached,
            self._replica,
            fragment,
            began_at=self._round.steps,
            keeps_all=self._training is not None,
        )
        self._background = begun
        begun.begin(self._pieces(fragment), self._agree_on_anchors)
        self._round.next_turn()

    @torch.inference_mode(False)
    @torch.no_grad()
    def synchronize(self) -> None:
        """Give all ranks the same parameters, with nothing unsent and no exchange running."""
        if self._background is not None:
            self._end_background(self._background, at_the_end=True)
        if self._is_at_rest:
            self._look_for_anchor()
        self._exchange(at_the_end=True)
        self._written.clear()
        self._round = self._round.at(0, 0)

    def _end_background(self, background: BackgroundExchange, *, at_the_end: bool = False) -> None:
        """End the exchange of a fragment and move its parameters: on all ranks, or on none.

        Args:
            background: the exchange.
            at_the_end: whether ranks are to have the same parameters afterwards.

        Raises:
            PeerError, Exception: as :meth:`_take_turn`.
            BaseException: the ranks do not know the outcome; they end the exchange after the next
                step.
        """
        training = self._training
        if training is not None:
            self._end_among(training, background, lets_in=not at_the_end)
            return
        replica = self._replica
        background.settle()
        background.fail_if(replica.share_failure(background.failure))
        self._background = None
        if background.failure is not None:
            self._round = self._position_before(background)
            raise background.failure
        replica.drop_copies()
        self._move_by(background)

    def _move_by(self, background: BackgroundExchange) -> None:
        """Move the parameters by the means of an exchange that has ended."""
        assert background.means is not None
        for memory in self._pieces(background.fragment):
            means = [background.means[name] for name in memory.names or ()]
            self.hook.move(memory, means, mix=self.hook.mix)
        self._have_moved(background.traffic)

    def _end_among(
        self, training: ElasticTraining, background: BackgroundExchange, *, lets_in: bool
    ) -> None:
        """End an exchange among ranks that come and go; as :meth:`_end_background`.

        The ranks agree on the outcome. If the exchange has failed on one of them, or a rank is lost
        meanwhile, all exchange the fragment again at once.
        """
        training.stop_clock()
        background.settle()
        self._background = None
        why = RuntimeError("the exchange failed on another rank")

        def has_failed() -> bool:
            failed = self._replica.on_any_rank(background.failure is not None)
            if failed:
                background.fail_if(why)
                self._agree_on_anchors()
            return failed

        def move(repeated: ParameterExchange | None) -> None:
            if repeated is None:
                self._move_by(background)
            else:
                repeated.move(mix=self.hook.mix)
                self._have_moved(repeated.traffic)

        RepeatableExchange(
            self._attached,
            training,
            lambda: self._pieces(background.fragment),
            has_failed,
            move,
            undone=lambda: background.fail_if(why),
        ).run(lets_in=lets_in)

    def _exchange(self, fragment: int | None = None, *, at_the_end: bool = False) -> None:
        """Average the ranks' distances from the anchor, and move the parameters by the mean.

        This is a step of its own: the ranks agree before any parameter changes.

        Args:
            fragment: the fragment to exchange; None for all.
            at_the_end: whether ranks are to have the same parameters afterwards. The hook then
                sends all that is unsent, and does nothing if the parameters are equal already.
        """
        unsent = at_the_end and self.hook.error_reset

        def is_wanted() -> bool:
            self._agree_on_anchors()
            return not at_the_end or self._replica.on_any_rank(self._is_apart())

        def move(exchange: ParameterExchange | None) -> None:
            if exchange is not None:
                exchange.move(unsent=unsent, mix=0.0 if at_the_end else self.hook.mix)
                self._have_moved(exchange.traffic, together=at_the_end)

        training, replica = self._training, self._replica
        if training is not None:
            # In synchronize() no rank may join: it would call it too, after the others have ended.
            RepeatableExchange(
                self._attached,
                training,
                lambda: self._pieces(fragment),
                is_wanted,
                move,
                unsent=unsent,
            ).run(lets_in=not at_the_end)
            return
        exchange = ParameterExchange(self._attached, replica.group)
        memories = self._pieces(fragment)
        replica.begin()
        try:
            wanted = is_wanted()
            if wanted:
                exchange.send(memories, unsent=unsent)
                exchange.receive()
                replica.drop_copies()
            replica.end()
        except BaseException as error:
            exchange.undo()
            raised = replica.fail_with(error)
            if raised is error:
                raise
            raise raised from error
        if wanted:
            move(exchange)

    def _have_moved(self, traffic: list[BucketTraffic], *, together: bool = False) -> None:
        """Note that an exchange has written the parameters.

        Args:
            traffic: the traffic of each bucket.
            together: whether all ranks have the same parameters now. Some exchanges ensure this.
        """
        attached = self._attached
        if together or (self.hook.fragments == 1 and not self.hook.mix):
            self.done = 0
            self.is_open = False
            self._stepped.clear()
            self._has_agreed = False
        else:
            self._has_agreed = True
        self._written.clear()
        attached.memory.count_step()
        for index, each in enumerate(traffic):
            is_first = index == 0
            count_bucket(
                attached.stats, index, len(traffic), each, first=is_first, of_gradients=False
            )

    def _is_apart(self) -> bool:
        """Whether this rank's parameters may differ from the others'."""
        if self.done > 0 or self._stepped:
            return True
        # Only writes to parameters show a step that the user writes by hand.
        return any(
            self.hook.has_moved(memory) or self.hook.is_ahead(memory) for memory in self._memories()
        )

    # ---- a new rank ------------------------------------------------------------------------------

    def round_position(self) -> tuple[int, int, int, bool]:
        """The position in a round, for :meth:`begin_at` on a new rank."""
        return self.done, self._round.turn, self._round.steps, self._has_agreed

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin_at(self, position: tuple[int, int, int, bool]) -> None:
        """Begin at another rank's position. The hook's memory is loaded. Writes the parameters."""
        self.done, turn, steps, self._has_agreed = position
        self._round = self._round.at(turn, steps)
        # With error_reset, the other rank is ahead of the anchor.
        for memory in self._memories() if not self.hook.is_streaming else ():
            self.hook.return_to_start(memory)

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's memory and the rank's parameters. Waits for a running exchange.

        An exchange that has failed counts as not begun; it raises in the step that ends it. On a
        sharded model, all ranks of a replica must call this at the same step.
        """
        background = self._background
        if background is not None:
            try:
                background.look()
            finally:  # the others wait for this rank
                if background.is_shared:
                    background.fail_if(self._replica.share_failure(background.failure))
        memory = self._attached.memory
        state = memory.state_dict()
        state[LOCAL_STEPS] = self._position(background)
        # While the parameters are equal too, so that states always have the same parts.
        own, parameters = state[memory.own_key], self._by_name()
        own[PARAMETERS] = {name: each.detach().clone() for name, each in parameters.items()}
        if self.hook.delay:
            means = (background and background.means) or {}
            own[MEANS] = {
                name: torch.zeros_like(each, dtype=precise(each.dtype), requires_grad=False)
                for name, each in parameters.items()
                if name not in means  # they have not arrived
            }
            own[MEANS] |= {name: each.detach().clone() for name, each in means.items()}
        return state

    def _position(self, background: BackgroundExchange | None) -> dict[str, Any]:
        position = {"done": self.done, "is_open": self.is_open}
        if not self.hook.is_streaming:
            return position
        place, in_flight = self._round, -1
        if background is not None and background.failure is None:
            in_flight = background.steps
        elif background is not None:  # one that has failed counts as not begun
            place = self._position_before(background)
        return {**position, **place.position(in_flight)}

    def _position_before(self, background: BackgroundExchange) -> Round:
        """The position in which the fragment of a failed exchange is next."""
        return self._round.at(background.fragment, background.began_at + background.steps)

    def check_state(self, state: Any) -> CheckedState:
        """Check a :meth:`state_dict` and split it into its parts.

        Raises:
            ValueError: it is no such state, or does not fit.
        """
        memory = self._attached.memory
        checked = split_state(state, self._attached.name, memory.own_key, self._by_name())
        rest = memory.check_state(checked.rest)
        # Otherwise each rank would use its own parameter as the anchor.
        missing = sorted(set(self._names) - set(rest["shared"].get(ANCHOR, {})))
        if missing:
            raise load_error(f"its '{ANCHOR}' lacks {missing}")
        check_fragment(checked.position, self.hook)
        means = None
        if checked.position.get("steps_in_flight", -1) >= 0:
            place = self._round.at(checked.position["fragment"], checked.position["steps_of_round"])
            means = checked_means(state, memory.own_key, self._pieces(place.fragment_before))
        return checked._replace(rest=rest, means=means)

    @torch.no_grad()
    def take_state(self, checked: CheckedState) -> None:
        """Continue from the result of :meth:`check_state`. Writes the parameters."""
        if self._background is not None:
            self._background.leave()
            self._background = None
        self._replica.drop_copies()
        self._attached.memory.load_state(checked.rest)
        self._road().memory_loaded(checked.rest["buckets"])
        for bucket in self._memories():
            self.hook.return_to_start(bucket)
        for parameter, value in checked.parameters:
            parameter.copy_(value)
        position = checked.position
        self.done, self.is_open = position["done"], position["is_open"]
        self._round = self._round.at(
            position.get("fragment", 0), position.get("steps_of_round", position["done"])
        )
        if checked.means is not None:
            steps = position["steps_in_flight"]
            self._background = BackgroundExchange(
                self._attached,
                self._replica,
                self._round.fragment_before,
                began_at=self._round.began_at(steps),
                steps=steps,
                means=checked.means,
            )
        self._is_counted = False
        self._stepped.clear()
        # The state may be of a round with a write, of which ranks may have saved different anchors.
        self._written = {id(each): [] for memory in self._memories() for each in memory.parameters}
        self._has_agreed = False
