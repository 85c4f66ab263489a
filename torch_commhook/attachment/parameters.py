"""The parameters and buffers of a model, and checks that they are still those of its hook."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.distributed._composable.contract import _get_registry
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C
from torch_commhook.autograd.registration import is_inside

# ---- the parameters of a model whose gradients a hook averages -----------------------------------


_WHOLE = "attach takes models whose parameters are whole on each rank"

#: An attribute of the parameters that FullyShardedDataParallel has flattened.
FLATTENED = "_fsdp_flattened"


def class_name(module: nn.Module) -> str:
    """The name of a module's class, such as ``package.module.Net``.

    PyTorch's sharding derives a class of its own from the user's. This returns the user's.
    """
    of_sharding = "torch.distributed."
    classes = [each for each in type(module).__mro__ if not each.__module__.startswith(of_sharding)]
    found = type(module) if classes[0] is nn.Module else classes[0]
    return f"{found.__module__}.{found.__qualname__}"


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The names and parameters that require grad, except those that DDP ignores.

    Raises:
        ValueError: there are none, one has no memory yet, an optimizer steps one in backward, or
            the dtype of its gradients is unknown, or not supported by DDP.
        TypeError: one is a DTensor, or FullyShardedDataParallel has flattened one.
        RuntimeError: replicate() was applied to a part of the model.
    """
    _check_not_replicated(model)
    if any(_is_flattened(module) for module in model.modules()) or any(
        FLATTENED in vars(parameter) for parameter in model.parameters()
    ):
        raise TypeError(
            f"attach: the parameters of {class_name(model)} are flattened by "
            f"FullyShardedDataParallel, which communicates their gradients itself; {_WHOLE}"
        )
    may_be_gathered = any("fully_shard" in _composables(module) for module in model.modules())
    ignored = ignored_names(model)
    parameters: list[tuple[str, Tensor]] = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    if not parameters:
        raise ValueError(f"attach: {class_name(model)} has no parameter that requires grad")
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ValueError(
                f"attach: parameter '{name}' is on the meta device; materialise the model "
                "(model.to_empty(device=...), then load or initialise it) before attaching"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"attach: parameter '{name}' is not initialised; run the model once before "
                "attaching"
            )
        if hasattr(parameter, "device_mesh") or (may_be_gathered and _is_gathered(model, name)):
            raise TypeError(
                f"attach: parameter '{name}' is a DTensor, and its sharding communicates its "
                f"gradients; {_WHOLE}"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"attach: parameter '{name}' has an optimizer in backward, which would step "
                "before gradients are averaged; let the optimizer step after backward, or in "
                "HookHandle.register_post_accumulate_hook"
            )
        _check_gradient_dtype(model, name, parameter)
    return parameters


def _check_gradient_dtype(model: nn.Module, name: str, parameter: Tensor) -> None:
    if parameter.grad_dtype == parameter.dtype:
        return
    what = f"attach: parameter '{name}' of {parameter.dtype} has grad_dtype {parameter.grad_dtype}"
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"{what}, but DistributedDataParallel takes gradients of the parameter's dtype only; "
            "attach the hook to the module itself, without DistributedDataParallel"
        )
    if parameter.grad_dtype is None:
        raise ValueError(
            f"{what}, so its gradients may have any dtype; set it to their dtype, such as "
            "parameter.grad_dtype = torch.float32"
        )


def ignored_names(model: nn.Module) -> Collection[str]:
    """The names of the parameters and buffers that DDP was told to ignore."""
    if isinstance(model, DistributedDataParallel):
        return {f"module.{name}" for name in model.parameters_to_ignore}
    return getattr(model, "_ddp_params_and_buffers_to_ignore", ())


def why_replaced(model: nn.Module, name: str, parameter: Tensor) -> str | None:
    """Describe the sharding that has replaced a parameter, for an error; None if there is none.

    Args:
        model: the model.
        name: the parameter's name when the hook was attached.
        parameter: the parameter that had this name then.
    """
    sharding = _sharding(model, name, parameter)
    if sharding is None:
        return None
    applied = f"{sharding} has been applied since the hook was attached"
    if sharding.endswith("()") and _is_fully_sharded(model, name):
        return f"{applied}; remove() the hook, and attach it again after {sharding}"
    return f"{applied}; {_WHOLE}; remove() the hook"


def is_whole(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether a parameter is still in its place, and no sharding has flattened it."""
    module = _path(model, name)[-1]
    now = module._parameters.get(name.rpartition(".")[2])
    return now is parameter and FLATTENED not in vars(parameter)


def _is_flattened(module: nn.Module) -> bool:
    """Whether FullyShardedDataParallel has replaced a module's parameters by a flat one."""
    # With use_orig_params=True the module keeps its parameters, which carry FLATTENED.
    return getattr(module, "_fsdp_use_orig_params", True) is False


def _path(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules from a model down to the one with a parameter, as far as they exist."""
    modules = [model]
    for part in name.split(".")[:-1]:
        module = getattr(modules[-1], part, None)
        if not isinstance(module, nn.Module):
            break
        modules.append(module)
    return modules


def _composables(module: nn.Module) -> Any:
    """The composable functions, such as fully_shard, that were applied to a module, by name."""
    return _get_registry(module) or {}


def _sharding(model: nn.Module, name: str, parameter: Tensor) -> str | None:
    modules = _path(model, name)
    if FLATTENED in vars(parameter) or any(map(_is_flattened, modules)):
        return "FullyShardedDataParallel"
    for module in modules:
        for function in ("fully_shard", "replicate"):
            if function in _composables(module):
                return f"{function}()"
    if getattr(modules[-1], "_is_fsdp_managed_module", False):  # applied around the model
        return "fully_shard()"
    now = getattr(modules[-1], name.rpartition(".")[2], None)
    return "a sharding by DTensor" if hasattr(now, "device_mesh") else None


def _is_fully_sharded(model: nn.Module, name: str) -> bool:
    """Whether a parameter is in a module of ``fully_shard`` or of the newer ``replicate()``."""
    path = _path(model, name)
    in_it = any(hasattr(module, "reshard") for module in path)
    return in_it or getattr(path[-1], "_is_fsdp_managed_module", False)


def _is_gathered(model: nn.Module, name: str) -> bool:
    """Whether a parameter is whole only until ``fully_shard`` shards it again."""
    for module in _path(model, name):
        reshard = getattr(module, "reshard", None)
        if "fully_shard" in _composables(module) and reshard is not None:
            reshard()  # leaves the parameters in its ignored_params unchanged
    return hasattr(model.get_parameter(name), "device_mesh")


def _check_not_replicated(model: nn.Module) -> None:
    """Refuse replicate(): its DDP, made in the first forward, would average gradients again."""
    for name, module in model.named_modules():
        # The newer replicate() is a fully_shard() and makes DTensors.
        if "replicate" in _composables(module) and not hasattr(module, "reshard"):
            place = f"its module '{name}'" if name else class_name(module)
            raise RuntimeError(
                f"attach: replicate() was applied to {place}, so a DistributedDataParallel "
                "averages its gradients from the first forward on; call "
                "module.register_comm_hook(None, hook), or use the newer replicate() of "
                "torch.distributed._composable.replicate_with_fsdp"
            )


def check_not_in_ddp(parameters: Sequence[tuple[str, Tensor]], *, attached: bool = False) -> None:
    """Refuse parameters whose gradients a DDP averages, since DDP would overwrite the results.

    Args:
        parameters: names and parameters.
        attached: whether they have a hook already.
    """
    for name, parameter in parameters:
        hooks: Any = parameter._post_accumulate_grad_hooks or {}
        if _C.has_ddp_hook(parameter) or any(
            getattr(getattr(hook, "func", hook), "__module__", None)
            == DistributedDataParallel.__module__
            for hook in hooks.values()
        ):
            if attached:
                raise RuntimeError(
                    "torch_commhook: a DistributedDataParallel that was made after the hook was "
                    "attached, or by replicate(), averages the gradient of parameter "
                    f"'{name}' too; remove() the hook, and attach it to that DDP"
                )
            around = _ddp_of(parameter)
            which = "" if around is None else f", the one around {class_name(around.module)}"
            raise RuntimeError(
                f"attach: a DistributedDataParallel averages the gradient of parameter '{name}' "
                f"already; attach the hook to that{which}: "
                "attach(ddp, hook). It is trainer.model in Lightning, trainer.model_wrapped in "
                "transformers, and what prepare() returns in Accelerate"
            )


def _ddp_of(parameter: Tensor) -> DistributedDataParallel | None:
    """The DDP that has a parameter, if the garbage collector knows one."""
    found: list[DistributedDataParallel] = [
        each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)
    ]
    return next((ddp for ddp in found if any(p is parameter for p in ddp.parameters())), None)


# ---- a model's values that rank 0 sends to the others --------------------------------------------


#: Integers with as many bytes. Complex values of 16 bytes have none.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_values(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that rank 0 sends when a hook is attached, by name."""
    ignored = ignored_names(module)
    named = (*module.named_parameters(), *module.named_buffers())
    # Frozen parameters that are DTensors differ among ranks.
    return {
        name: tensor.detach()
        for name, tensor in named
        if name not in ignored and tensor.numel() and not hasattr(tensor, "device_mesh")
    }


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that rank 0 sends in forwards, by name: DDP ignores none of them."""
    ignored = ignored_names(module)
    statistics = {
        id(buffer)
        for each in module.modules()
        if isinstance(each, _NormBase) and each.training
        for buffer in each._buffers.values()
    }
    # Backward does not use the statistics of a training batch norm: .data keeps their version, so
    # that backward of an earlier forward still works.
    return {
        name: buffer.data if id(buffer) in statistics else buffer.detach()
        for name, buffer in module.named_buffers()
        if name not in ignored and buffer.layout is torch.strided and buffer.numel()
    }


def check_values(
    module: nn.Module, *, init_sync: bool, broadcast_buffers: bool
) -> dict[str, object]:
    """Check that rank 0's values can be written.

    Args:
        module: the module.
        init_sync: whether ``attach`` writes parameters and buffers.
        broadcast_buffers: whether forwards write buffers.

    Returns:
        Settings that must be the same on all ranks, as for :func:`agree`.

    Raises:
        RuntimeError: a value cannot be written.
    """
    first = first_values(module) if init_sync else {}
    buffers = buffers_of(module) if broadcast_buffers else {}
    for name, tensor in {**buffers, **first}.items():
        settings = {"init_sync": name in first, "broadcast_buffers": name in buffers}
        why = why_not_written(tensor, in_bytes=name not in first)
        if why is not None:
            without = " and ".join(f"{each}=False" for each, is_set in settings.items() if is_set)
            raise RuntimeError(
                f"attach: {kind_of(module, name)} '{name}' cannot get rank 0's values: {why}. "
                f"Replace it, or pass {without}, so that each rank keeps its own"
            )
    return {
        "the parameters and buffers to send": _described(first),
        "the buffers to send": _described(buffers),
    }


def kind_of(module: nn.Module, name: str) -> str:
    """Whether a name is that of a parameter or of a buffer."""
    return "buffer" if any(name == each for each, _ in module.named_buffers()) else "parameter"


def _described(values: dict[str, Tensor]) -> list[str]:
    return [
        f"'{name}' of shape {tuple(each.shape)}, {each.dtype} and {each.layout}, a "
        f"{type(each).__name__} on {each.device.type}"
        for name, each in values.items()
    ]


@torch.no_grad()
def why_not_written(tensor: Tensor, *, in_bytes: bool = False) -> str | None:
    """Why a tensor cannot take another rank's values; None if it can.

    Args:
        tensor: the tensor, detached.
        in_bytes: whether the values arrive through :func:`unpack`.
    """
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_inference():
        return "it was made in torch.inference_mode()"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        try:  # with its own values
            if in_bytes:
                unpack(joined_bytes([tensor]), [tensor])
            else:
                tensor.copy_(_flatten_dense_tensors([tensor]).view(tensor.shape))
        except Exception as error:
            return f"its class {type(tensor).__name__} raises {type(error).__name__}: {error}"
    elif torch._debug_has_internal_overlap(tensor) == 1:
        return "it is expanded, so several of its elements share memory"
    return None


@torch.no_grad()
def joined_bytes(buffers: Collection[Tensor]) -> Tensor:
    """Returns the bytes of all buffers as a flat uint8 tensor. They must be on one device."""
    pieces = [
        buffer.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for buffer in _in_order(buffers)
    ]
    return torch.cat(pieces)


@torch.no_grad()
def unpack(sent: Tensor, buffers: Collection[Tensor]) -> None:
    """Writes the bytes that another rank's :func:`packed` returned into the buffers."""
    ordered = _in_order(buffers)
    sizes = [buffer.numel() * buffer.element_size() for buffer in ordered]
    for buffer, piece in zip(ordered, sent.split(sizes), strict=True):
        values = piece.view(buffer.dtype).view(buffer.shape)
        if not _has_bits_of(buffer, values):
            buffer.copy_(values)


def _has_bits_of(buffer: Tensor, values: Tensor) -> bool:
    """Whether the buffer has these values already, bit by bit.

    A write would give it a new version, and backward of an earlier graph would fail. False where
    finding out takes long: under a compiler, and on other devices than the CPU.
    """
    if torch.compiler.is_dynamo_compiling() or type(buffer) is not Tensor or not buffer.is_cpu:
        return False
    bits = _BITS.get(buffer.element_size())  # 0.0 is not -0.0 here, and NaN is NaN
    if bits is None or buffer.is_conj() or buffer.is_neg():
        return False
    return torch.equal(buffer.view(bits), values.view(bits))


def _in_order(buffers: Collection[Tensor]) -> list[Tensor]:
    """Sorts by element size, the largest first, so that each buffer's bytes are aligned."""
    return sorted(buffers, key=lambda buffer: -buffer.element_size())


# ---- checks that a model still has the parameters that its hook was attached to ------------------


_FUNCTIONAL_FILE = torch.nn.utils.stateless.__file__


class WatchedParameters:
    """The parameters that a model had when a hook was attached.

    The gradient of a parameter that is added later would silently stay each rank's own. A converted
    parameter no longer fits its bucket.

    Args:
        model: the model.
        parameters: the names and parameters whose gradients the hook averages.
        in_ddp: whether DDP's own reducer calls the hook.

    Attributes:
        parameters: as given; empty after :meth:`clear`.
        is_sure: whether the last call of :meth:`change` saw the model's own parameters.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[tuple[str, Tensor]], *, in_ddp: bool
    ) -> None:
        self._model = weakref.ref(model)
        self.parameters = list(parameters)
        self._averaged = {id(parameter) for _, parameter in parameters}
        self._forms = _C.ParameterForms([parameter for _, parameter in parameters], in_ddp)
        ignored = ignored_names(model)
        self._frozen = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in self._averaged
            and not parameter.requires_grad
            and name not in ignored
        ]
        self._members = _C.module_members(model)
        self.is_sure = False
        self._way_out = (
            "wrap the module in a new DistributedDataParallel"
            if in_ddp
            else "remove() the hook and attach it again"
        )

    def clear(self) -> None:
        """Stop watching, and release the parameters."""
        self.parameters.clear()
        self._averaged.clear()
        self._forms.clear()
        self._frozen.clear()
        self._members = 0

    def change(self) -> str | None:
        """How the parameters have changed, as the text of an error, or None."""
        model = self._model()
        self.is_sure = True
        if model is None or not self.parameters:
            return None
        changed = self._forms.change()
        if changed is not None:
            number, what = changed
            name, _ = self.parameters[number]
            return self._sharded(model) or (
                f"torch_commhook: parameter '{name}' {what}; convert, move or change a model "
                "before it is wrapped and before a hook is attached"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                return (
                    f"torch_commhook: parameter '{name}' did not require grad when the hook was "
                    f"attached, and does now; {self._way_out}"
                )
        members = _C.module_members(model)
        if members == self._members:
            return None
        # torch.func.functional_call has put other tensors in the parameters' place.
        self.is_sure = not is_inside(_FUNCTIONAL_FILE)
        if not self.is_sure:
            return None
        sharded = self._sharded(model)
        if sharded is not None:
            return sharded
        ignored = ignored_names(model)
        for name, parameter in model.named_parameters():
            if (
                parameter.requires_grad
                and id(parameter) not in self._averaged
                and name not in ignored
                # A function that computes gradients may have put other tensors there for a while.
                and isinstance(parameter, nn.Parameter)
            ):
                return (
                    f"torch_commhook: parameter '{name}' was added to the model after the hook was "
                    f"attached, and its gradient is not averaged; {self._way_out}"
                )
        self._members = members
        return None

    def _sharded(self, model: nn.Module) -> str | None:
        for name, parameter in self.parameters:
            if is_whole(model, name, parameter):
                continue
            why = why_replaced(model, name, parameter)
            if why is not None:
                return f"torch_commhook: parameter '{name}' was replaced: {why}"
        return None
