"""Nearly all uses of undocumented parts of ``fully_shard``, and which hooks fit it."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook.attachment.parameters import class_name
from torch_commhook.hooks.base import FunctionHook, Hook
from torch_commhook.memory.sharded_memory import WholeGradientMemory
from torch_commhook.memory.sharded_states import ShardedParameter
from torch_commhook.step.attached_hook import Attached

#: A group of parameters that ``fully_shard`` communicates together (its ``FSDPParamGroup``).
ParamGroup = Any
#: The reduction: one of the names, or a sum of multiplied terms.
ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard()``, or the ``replicate()`` that uses it, was applied."""
    return hasattr(module, "_get_fsdp_state") and hasattr(module, "reshard")


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """The groups of a model's parameters, in the order of its modules."""
    return list(dict.fromkeys(group for state in states(model) for group in _groups_of(state)))


def _groups_of(state: Any) -> list[ParamGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def trains_shards(model: nn.Module) -> bool:
    """Whether ``fully_shard`` reduces gradients of a model.

    It does not if all sharded parameters are frozen, and only ``ignored_params`` are trained.
    """
    return any(map(trainable, param_groups(model)))


def reshard(model: nn.Module) -> None:
    """Replace a model's parameters by its shards; after a forward some may still be whole."""
    for group in param_groups(model):
        group.reshard()
        if not group.is_sharded:  # PyTorch leaves them whole after an exception in the forward
            drop_whole(group)


def shard_group(group: ParamGroup) -> dist.ProcessGroup | None:
    """The ranks with shards of the same parameters; None for ``replicate()``."""
    return getattr(group.mesh_info, "shard_process_group", None)


def scatter_group(group: ParamGroup) -> dist.ProcessGroup | None:
    """A group for reduce-scatters only, if the user asked for one."""
    return getattr(group.mesh_info, "reduce_scatter_process_group", None)


def forward_group(group: ParamGroup) -> dist.ProcessGroup | None:
    """The ranks that hold the parameters after a forward, if these are fewer."""
    after = group.post_forward_mesh_info
    return None if after is None else getattr(after, "shard_process_group", None)


def replica_group(group: ParamGroup) -> dist.ProcessGroup | None:
    """The ranks with the same shards; None on a mesh of one dimension."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def axes(group: ParamGroup) -> list[dist.ProcessGroup]:
    """This rank's groups along all axes over which parameters are sharded or replicated.

    Includes those of tensor parallelism, and all groups that communicate.
    """
    of_group = shard_group, scatter_group, forward_group, replica_group
    found = [each for each in (get(group) for get in of_group) if each is not None]
    return found + mesh_groups(group)


def mesh_groups(group: ParamGroup) -> list[dist.ProcessGroup]:
    """This rank's groups along the axes of the meshes of a group's parameters."""
    found: list[dist.ProcessGroup] = []
    for each in group.fsdp_params:
        # The parameter may have an older mesh: PyTorch caches the first of equal meshes.
        found += each._spmd_mesh.get_all_groups()
    return found


def part_of(groups: Iterable[ParamGroup]) -> tuple[int, int]:
    """This rank's position on the mesh's axes other than replicas and shards.

    Returns:
        The position, counted over all these axes, and the number of positions; (0, 1) without any.
    """
    number, parts = 0, 1
    for group in groups:
        own = [each for each in (shard_group(group), replica_group(group)) if each is not None]
        ranks = [dist.get_process_group_ranks(each) for each in own]
        for each in group.fsdp_params:
            mesh = each.sharded_param.device_mesh
            axes = zip(mesh.get_all_groups(), mesh.get_coordinate() or (), mesh.shape, strict=False)
            others = [axis for axis in axes if dist.get_process_group_ranks(axis[0]) not in ranks]
            if math.prod(size for _, _, size in others) > parts:
                number, parts = 0, 1
                for _, coordinate, size in others:
                    number, parts = number * size + coordinate, parts * size
    return number, parts


def set_replica_group(group: ParamGroup, process_group: dist.ProcessGroup) -> None:
    """Replace the group that averages across replicas."""
    group.mesh_info.replicate_process_group = process_group


def sharded_parameters(model: nn.Module, group: ParamGroup) -> dict[int, ShardedParameter]:
    """Describe each parameter of a group that requires grad.

    Returns:
        The descriptions by the id of PyTorch's object of the parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if any(id(each) not in names for each in trainable(group)):
        raise ValueError(
            "attach: some parameters of a group that fully_shard() has formed from several modules "
            f"are not in {class_name(model)}; attach to a module that contains all of them"
        )
    shards = 1 if shard_group(group) is None else shard_group(group).size()  # type: ignore[union-attr]
    dtype = _reduced_dtype(group)
    return {
        id(each): ShardedParameter(
            name=names[id(each.sharded_param)],
            shape=each._orig_size,
            dim=each.fsdp_placement.dim if shards > 1 else 0,
            shards=shards,
            dtype=dtype or each.sharded_param.dtype,
            device=group.device,
        )
        for each in group.fsdp_params
        if each.sharded_param.requires_grad
    }


def _policy(group: ParamGroup, each: Any) -> Any:
    """A parameter's mixed-precision policy; before torch 2.15 its group's."""
    return each.mp_policy if hasattr(each, "mp_policy") else group.mp_policy


def _reduced_dtype(group: ParamGroup) -> torch.dtype | None:
    """The dtype of a group's gradients in their reduction; None if nothing requires grad."""
    found: list[torch.dtype] = []
    for each in group.fsdp_params:
        parameter, policy = each.sharded_param, _policy(group, each)
        if not parameter.requires_grad:
            continue
        computed = policy.param_dtype or parameter.dtype
        if not hasattr(each, "sharded_grad_dtype"):
            found.append(policy.reduce_dtype or computed)
        elif each._has_sharded_grad_dtype_override:  # from torch 2.15 on
            found.append(policy.reduce_dtype or each.sharded_grad_dtype or computed)
        else:  # unsharded gradients have the dtype of the shards
            found.append(policy.reduce_dtype or parameter.dtype)
    return functools.reduce(torch.promote_types, found) if found else None


def trainable(group: ParamGroup) -> list[Tensor]:
    """A group's parameters that require grad, as the model has them."""
    found = [each.sharded_param for each in group.fsdp_params]
    return [parameter for parameter in found if parameter.requires_grad]


class Communication(NamedTuple):
    """The objects through which a group of parameters communicates."""

    all_gather: Any
    reduce_scatter: Any


def communication(group: ParamGroup) -> Communication:
    return Communication(group._all_gather_comm, group._reduce_scatter_comm)


def set_communication(group: ParamGroup, communication: Communication) -> None:
    """Replace the objects through which a group communicates.

    As ``set_custom_all_gather`` and ``set_custom_reduce_scatter``, which refuse modules with
    several groups.
    """
    group._all_gather_comm, group._reduce_scatter_comm = communication


def is_default(communication: Communication) -> bool:
    """Whether the communication of ``fully_shard`` has not been replaced."""
    return all(
        type(each).__name__.startswith("Default") and type(each).__module__.startswith("torch.")
        for each in communication
    )


def set_post_backward(group: ParamGroup, function: Callable[..., None] | None) -> None:
    """Set the function that runs when a group's gradients are complete; None for PyTorch's."""
    if function is None:
        group.__dict__.pop("post_backward", None)
    else:  # an attribute of the object hides the method
        group.post_backward = function


def post_backward(group: ParamGroup, *arguments: Any) -> None:
    """Run PyTorch's own work for complete gradients of a group."""
    type(group).post_backward(group, *arguments)


def local_shard(each: Any) -> Tensor:
    """A parameter's shard on this rank, flat, with its padding."""
    shard: Tensor = each._sharded_param_data
    return shard


def reference(each: Any) -> Callable[[], Tensor | None]:
    """A function that returns a sharded parameter, or None once the model is freed.

    A weak reference to the parameter itself would prevent ``module.to()``.
    """
    weak = weakref.ref(each)

    def parameter() -> Tensor | None:
        found = weak()
        return None if found is None else found.sharded_param

    return parameter


def drop_whole(group: ParamGroup) -> None:
    """Drop a group's whole parameters; the next use gathers them again."""
    group.wait_for_unshard()  # parameters that were gathered ahead of their use
    group._to_sharded()


def with_gradient(group: ParamGroup) -> list[Any]:
    """The parameters whose gradients a group's next reduction takes."""
    all_of_them = getattr(group, "reduce_scatter_unused_params", False)
    order = getattr(group, "_reduce_scatter_param_indices", None)  # from torch 2.15 on
    found = group.fsdp_params if order is None else [group.fsdp_params[index] for index in order]
    return [
        each
        for each in found
        if hasattr(each, "_unsharded_param")
        and (
            each.unsharded_accumulated_grad is not None
            or each.unsharded_param.grad is not None
            or (all_of_them and each.unsharded_param.requires_grad)
            or _awaits_replicas(group, each)
        )
    ]


def _awaits_replicas(group: ParamGroup, each: Any) -> bool:
    """Whether a gradient that only shards have reduced so far takes part again, as zeros."""
    partial = getattr(group, "_get_partial_reduce_grad", None)  # from torch 2.15 on
    return partial is not None and partial(each) is not None


def _gradient_dtypes(group: ParamGroup) -> set[torch.dtype | None]:
    """The dtypes of a group's reduced gradients; None for the reduction's own dtype."""
    if hasattr(group, "_orig_dtype"):  # before torch 2.15
        return {group._orig_dtype}
    return {
        each.sharded_grad_dtype for each in group.fsdp_params if each.sharded_param.requires_grad
    }


def is_written_last(group: ParamGroup, op: object, dtype: torch.dtype) -> bool:
    """Whether PyTorch assigns a reduced gradient without further work on it.

    Then the tensor may be written until the backward ends. This is not so if PyTorch divides or
    casts the gradient, adds it to an existing one, copies it to another device, or calls hooks of
    the parameter.

    Args:
        group: the group; :func:`with_gradient` are being reduced.
        op: the reduction's operation.
        dtype: the dtype of the reduced tensor.
    """
    if group.device.type != "cpu" or op == dist.ReduceOp.SUM:
        return False
    if not _gradient_dtypes(group) <= {dtype, None} or group._all_reduce_hook is not None:
        return False
    return all(
        each.sharded_param.grad is None
        and not each.offload_to_cpu
        and not getattr(each.sharded_param, "_post_accumulate_grad_hooks", None)
        for each in group.fsdp_params
    )


def runs_hooks_in_backward(model: nn.Module) -> bool:
    """Whether modules call a user's functions in a backward, which may read gradients."""
    registered = nn.modules.module
    return bool(registered._global_backward_hooks or registered._global_backward_pre_hooks) or any(
        each._backward_hooks or each._backward_pre_hooks for each in model.modules()
    )


def gathered_dtypes(group: ParamGroup) -> set[Any]:
    """The dtypes in which a group's parameters are gathered."""
    return {
        _policy(group, each).param_dtype or each.sharded_param.dtype for each in group.fsdp_params
    }


def divide_factor(group: ParamGroup) -> float | None:
    """The argument of ``set_gradient_divide_factor``, or None."""
    factor: float | None = group.gradient_divide_factor
    return factor


@contextmanager
def without_reductions(groups: Sequence[ParamGroup]) -> Iterator[None]:
    """Let groups reduce no gradients inside the block, neither among shards nor replicas."""
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = False
    try:
        yield
    finally:
        for group, flags in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = flags


def states(model: nn.Module) -> list[Any]:
    """PyTorch's objects of the modules that ``fully_shard`` was applied to."""
    modules = filter(is_sharded, model.modules())
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))  # type: ignore[operator]


def roots(of_states: Iterable[Any]) -> list[Any]:
    """The states of the modules whose forwards begin an iteration; they may be around a model.

    Before the first forward PyTorch has not chosen any.
    """
    return list(
        dict.fromkeys(root for each in of_states for root in each._state_ctx.all_states[:1])
    )


def root_module(root: Any) -> nn.Module:
    """The module of one of :func:`roots`."""
    module: nn.Module = root._modules[0]
    return module


def is_in_backward(root: Any) -> bool:
    """Whether a backward has begun and PyTorch has not ended it."""
    return bool(root._state_ctx.post_backward_final_callback_queued)


def is_unfinished(root: Any) -> bool:
    """Whether a forward or a backward has begun and PyTorch has not ended it."""
    return is_in_backward(root) or root._state_ctx.iter_forward_root is not None


def is_finalized_by_hand(state: Any) -> bool:
    """Whether gradients are reduced after the backward, when the user requests it."""
    # From torch 2.15 on.
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


def reset(root: Any) -> None:
    """Make a model usable again after an exception in its forward or backward."""
    groups = [group for state in root._state_ctx.all_states for group in _groups_of(state)]
    for group in groups:
        result = group._all_gather_result
        if result is not None and result.all_gather_work is not None:
            with suppress(RuntimeError, TimeoutError):  # it was part of the failed step
                result.all_gather_work.wait()
            group._all_gather_result = result._replace(all_gather_work=None)
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
    else:  # before torch 2.13
        _reset_iteration(root)
    for group in groups:
        for each in group.fsdp_params:
            # Gradients of that iteration, which PyTorch would keep for the next one.
            if "unsharded_accumulated_grad" in vars(each):  # before torch 2.15
                each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None


def _reset_iteration(root: Any) -> None:
    """Do the work of ``_reset_iter_state`` in newer versions.

    Without it the next backward would not finish: some gradients would be missing.
    """
    context, shared = root._state_ctx, root._comm_ctx
    idle = type(root._training_state).IDLE
    if hasattr(shared, "reduce_scatter_states"):
        reduced = list(shared.reduce_scatter_states)
        shared.reduce_scatter_states.clear()
    else:  # before torch 2.12
        reduced, shared.reduce_scatter_state = [shared.reduce_scatter_state], None
    events = [getattr(state, "event", None) for state in reduced]
    shared.all_gather_state = None
    shared.post_forward_order.clear()
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _groups_of(state):
            events += [group._post_reduce_event, getattr(group._all_reduce_state, "event", None)]
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    for event in events:
        if event is not None:
            root._device_handle.current_stream().wait_event(event)
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


class _EndOfBackward:
    """Replaces a method of a state that PyTorch calls when a backward ends."""

    def __init__(self, state: Any) -> None:
        self._state = weakref.ref(state)
        self.listeners: list[Callable[[], None]] = []

    def __call__(self) -> None:
        state = self._state()
        if state is not None:
            type(state)._root_post_backward_final_callback(state)
        for listener in list(self.listeners):
            listener()


_END = "_root_post_backward_final_callback"


def listen_to_end(state: Any, listener: Callable[[], None]) -> None:
    """Call a function when a backward that began with a state's module ends."""
    end = vars(state).setdefault(_END, _EndOfBackward(state))
    if listener not in end.listeners:
        end.listeners.append(listener)


def stop_listening(state: Any, listener: Callable[[], None]) -> None:
    """Undo :func:`listen_to_end`."""
    end = vars(state).get(_END)
    if end is not None and listener in end.listeners:
        end.listeners.remove(listener)
        if not end.listeners:
            del vars(state)[_END]


# ---- checks whether a hook fits a sharded model --------------------------------------------------


def check_fits(attached: Attached, op: str = "attach", *, is_shard_hook: bool = False) -> None:
    """Refuse hooks that do not support a sharded model.

    Args:
        attached: the hook.
        op: the function's name in errors.
        is_shard_hook: whether it is a ``shard_hook``, beside a hook that averages across replicas.
    """
    hook = attached.hook
    on_shards = isinstance(attached.memory, WholeGradientMemory)
    if _scales_steps(hook):
        raise TypeError(
            f"{op}: {hook} scales all gradients of a step after their average, which no hook can "
            "do on a model with fully_shard() or replicate(); call "
            "torch.nn.utils.clip_grad_norm_() after backward()"
        )
    if hook.chooses:
        raise TypeError(
            f"{op}: {hook} chooses a hook on a model whose ranks have all of it; on a model with "
            "fully_shard() or replicate(), attach the hook itself, which `commhook plan "
            "--parallel` with fsdp or hsdp finds"
        )
    if is_shard_hook:
        _check_shard_hook(attached, op)
    if on_shards and hook.keeps_ranks_apart:
        raise TypeError(
            f"{op}: {hook} keeps replicas apart, but on a mesh of one dimension each rank has a "
            "part of the only replica; shard over a mesh of two dimensions, of replicas and shards"
        )
    if on_shards:
        if isinstance(hook, FunctionHook):
            raise TypeError(
                f"{op}: hook '{attached.name}' averages whole gradients, but a rank has only its "
                "shards of sharded parameters; subclass torch_commhook.hooks.Hook, "
                "with average_shard(), or shard over a mesh of two dimensions"
            )
        hook.check_shards()


def _check_shard_hook(attached: Attached, op: str) -> None:
    hook, error = attached.hook, None
    if not hook.keeps_ranks_apart:
        try:
            hook.check_shards()
        except TypeError as raised:
            error = raised
        else:
            return
    raise TypeError(
        f"{op}: shard_hook takes part in reduce-scatters, but '{attached.name}' cannot; give it as "
        "hook=, which averages across replicas"
    ) from error


def _scales_steps(hook: Hook) -> bool:
    return hook.scales_steps or any(map(_scales_steps, hook.hooks_inside()))


def check_backward() -> None:
    """Refuse a backward in which ``fully_shard`` would reduce only some gradients."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and module.in_compiled_autograd_region:
        raise RuntimeError(
            "torch_commhook: compiled autograd runs this backward, in which fully_shard computes "
            "different gradients, with a hook or without; call backward() outside of it"
        )
