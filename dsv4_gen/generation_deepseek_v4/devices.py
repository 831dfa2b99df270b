"""Where a model runs, and with it the state: each layer's where the layer runs, the lengths where the model begins.

A model may stand on several devices, and its weights may be elsewhere while nothing runs: accelerate offloads them to
the CPU or a disk, FSDP shards them. Its hooks are known by their attributes: accelerate need not be there.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .static_cache import DeepseekV4StaticCache


def device_of(module: nn.Module, *around: nn.Module) -> torch.device:
    """Where a module runs: where accelerate's hooks take it, else where its weights are.

    Args:
        module: the module.
        around: modules that it is a part of, from the innermost on, whose hooks take it along.
    """
    for owner in (module, *around):
        for hook in hooks_of(owner):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return with_index(device)
    weight = [*module.parameters(), *module.buffers()][0]
    # What FSDP has sharded runs on the devices of its mesh, even if the shards wait on the CPU.
    return with_index(weight.device_mesh.device_type) if hasattr(weight, "device_mesh") else weight.device


def with_index(device: torch.device | str | int) -> torch.device:
    """The device as tensors name it: `cuda` is the current one, `cuda:0` say."""
    return torch.empty(0, device=device).device


def hooks_of(module: nn.Module) -> list:
    """accelerate's hooks of one module."""
    return flat(module._hf_hook) if hasattr(module, "_hf_hook") else []


def flat(hook) -> list:
    """A hook of accelerate's, or those that it is made of (`SequentialHook`)."""
    return [leaf for part in hook.hooks for leaf in flat(part)] if hasattr(hook, "hooks") else [hook]


def first_device(model: nn.Module) -> torch.device:
    """Where a call of the model begins."""
    decoder = model.get_decoder()
    return device_of(decoder.embed_tokens, decoder, model)


def counting_device(model: nn.Module, cache: DeepseekV4StaticCache) -> torch.device:
    """Where tokens are counted: where the lengths are, or will be."""
    return first_device(model) if cache.lengths is None else cache.lengths.device


def layer_devices(model: nn.Module) -> list[torch.device]:
    """Where each layer runs."""
    decoder = model.get_decoder()
    return [device_of(layer.self_attn, layer, decoder, model) for layer in decoder.layers]


def allocate(model: nn.Module, cache: DeepseekV4StaticCache, batch_size: int) -> None:
    """Allocate what is not yet: each layer's state where the layer runs, ahead of its region.

    Args:
        model: upstream's `DeepseekV4ForCausalLM` or `DeepseekV4Model`.
        cache: the state.
        batch_size: rows.
    """
    if cache.is_initialized:
        return
    cache.allocate_lengths(batch_size, first_device(model))
    for state, device in zip(cache.layers, layer_devices(model)):
        if not state.is_initialized:
            state.allocate(batch_size, model.dtype, device)


def check_devices(model: nn.Module, cache: DeepseekV4StaticCache) -> None:
    """Raise `ValueError` if state that is allocated is not where the model runs."""
    placed = {"`lengths`": (cache.lengths, first_device(model))}
    for index, device in enumerate(layer_devices(model)):
        placed[f"layer {index}"] = (cache.layers[index].keys, device)
    for name, (tensor, device) in placed.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"The cache's state of {name} is on {tensor.device}, but the model runs that part on {device}. Let the "
                "first call allocate a new cache, or give `load_prompt_cache` the model."
            )


def to_device(values, device: torch.device):
    """`values`, a tree of tuples and dicts, with every tensor of it on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def why_eager(model: nn.Module) -> str | None:
    """What keeps a model from being compiled, and what to do about it; None where nothing does.

    Example:
        >>> why_eager(dispatch_model(model, {"model.embed_tokens": 0, ...}))
        "accelerate's hooks cannot be traced. ..."
    """
    hooks = [hook for module in model.modules() for hook in hooks_of(module)]
    if any(getattr(hook, "offload", False) for hook in hooks):
        return (
            "accelerate loads this model's offloaded weights in hooks, which cannot be traced. Call the model itself, "
            "which runs eagerly."
        )
    if hooks:
        return (
            "accelerate's hooks cannot be traced. Remove them with `accelerate.hooks.remove_hook_from_module(model, "
            "recurse=True)`: the activations are then moved from device to device without them, in one graph. Or call "
            "the model itself, which runs eagerly."
        )
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        return (
            "`fully_shard` gathers this model's weights in hooks that turn the compiler off. Call the model itself, "
            "which runs eagerly, or load it tensor-parallel instead."
        )
    return None
