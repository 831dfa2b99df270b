"""Which decoder layers can be a region of their own to the compiler, and which of them are built alike.

Weights that are tensor subclasses (quantized, sharded) keep a layer from being a region, which takes plain tensors
only, and so do hooks, since nothing may reach out of one. Sharded experts do not: upstream runs them on this process's
shards, which are plain tensors.
"""

from itertools import count

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor
else:
    DTensor = ()  # nothing is sharded

# Hooks that collect hidden states, which stay once they were asked for, and do nothing unless they are asked for.
UPSTREAM_HOOKS = "transformers.utils.output_capturing"

_numbers = count()


@torch.compiler.assume_constant_result  # asked while compiling: a graph is for the modules and tensors of then
def number_kinds(layers: nn.ModuleList) -> tuple[int | None, ...]:
    """A number for each layer, the same for layers that are built alike; None for those that cannot be a region.

    No two calls give the same numbers: layers are alike if their inputs are too, which they are in one forward.
    """
    kinds = [description(layer) if fits_a_region(layer) else None for layer in layers]
    numbers = {kind: None if kind is None else next(_numbers) for kind in dict.fromkeys(kinds)}
    return tuple(numbers[kind] for kind in kinds)


def fits_a_region(layer: nn.Module) -> bool:
    """Whether a layer has plain tensors only, experts aside, which have shards, and no hooks."""
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers()) | expert_shards(layer)
    is_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors.values())
    return is_plain and not any(map(has_hooks, layer.modules()))


def expert_shards(layer: nn.Module) -> dict[str, Tensor]:
    """What this process holds of the experts' weights, by their names in the layer; nothing if they are not sharded."""
    weights = layer.mlp.experts.named_parameters(prefix="mlp.experts")
    return {name: weight.to_local() for name, weight in weights if isinstance(weight, DTensor)}


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs code of the user's."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(hook.__module__ != UPSTREAM_HOOKS for hook in hooks)


def description(layer: nn.Module) -> str:
    """What a graph of the layer depends on: its modules, with all constants in them, and the kind of its tensors."""
    modules = []
    for name, module in layer.named_modules():
        attributes = {key: value for key, value in vars(module).items() if "hooks" not in key and key != "layer_idx"}
        leaves, tree = tree_flatten(attributes)
        modules.append((name, type(module), tree, *map(kind_of_value, leaves)))
    return repr(modules)


def kind_of_value(value) -> object:
    """A constant itself, a tensor's metadata, the code of a function, the class of anything else."""
    if isinstance(value, Tensor):
        placements = getattr(value, "placements", None)
        return type(value), value.shape, value.stride(), value.dtype, value.device, placements
    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return value
    return getattr(value, "__code__", type(value))
