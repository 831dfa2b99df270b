"""A decoder layer as a region of its own to the compiler, which traces and compiles each kind of layer once.

A region is an optimization only: where there cannot be one, the layer is called as it is.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .layer_kinds import expert_shards, number_kinds


def call_layer(layer: nn.Module, hidden_states: Tensor, **kwargs) -> Tensor:
    """One of upstream's `DeepseekV4DecoderLayer`s, with its own state among `kwargs`."""
    return layer(hidden_states, **kwargs)


def call_sharded_layer(
    layer: nn.Module, hidden_states: Tensor, kind: int, shards: dict[str, Tensor], **kwargs
) -> Tensor:
    """`call_layer` with this process's `shards` in place of the weights of those names, as the compiler sees it."""
    return functional_call(layer, shards, (hidden_states,), kwargs, tie_weights=False)


def kind_of_call(layer: nn.Module, hidden_states: Tensor, kind: int, shards: dict[str, Tensor], **kwargs) -> int:
    """Calls of `call_sharded_layer` that share a region. The compiler cannot tell where weights are replaced."""
    return kind


# A region may not change its inputs before torch 2.13; there the layers are compiled one by one.
has_regions = torch.__version__ >= "2.13"  # compared as versions, not as strings
if has_regions:
    as_region = torch.compiler.nested_compile_region
    # More kinds than any model has, each on many devices: torch raises where there are more.
    call_layer_as_region = as_region(call_layer, max_reuse_entries=256)
    call_sharded_layer_as_region = as_region(call_sharded_layer, max_reuse_entries=256, reuse_hash_fn=kind_of_call)


def region_kinds(layers: nn.ModuleList, *, wanted: bool) -> tuple[int | None, ...]:
    """For each layer the number of its kind, None where it is not to be a region (see `number_kinds`).

    Args:
        layers: a model's.
        wanted: False where hooks collect outputs, which cannot leave a region. An exporter has no use for one either.
    """
    if wanted and has_regions and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return number_kinds(layers)
    return (None,) * len(layers)


def run_layer(layer: nn.Module, hidden_states: Tensor, kind: int | None, **kwargs) -> Tensor:
    """`call_layer`, as a region of that `kind`, and as no region if `kind` is None."""
    if kind is None:
        return call_layer(layer, hidden_states, **kwargs)
    shards = expert_shards(layer)
    if shards:  # `int`, because a region takes no number that the compiler knows to be the host's
        return call_sharded_layer_as_region(layer, hidden_states, int(kind), shards, **kwargs)
    return call_layer_as_region(layer, hidden_states, **kwargs)
