"""A decoder layer as a region of its own to the compiler, which traces and compiles each kind of layer once."""

import torch
from torch import Tensor, nn


def call_layer(layer: nn.Module, hidden_states: Tensor, **kwargs) -> Tensor:
    """One of upstream's `DeepseekV4DecoderLayer`s, with its own state among `kwargs`."""
    return layer(hidden_states, **kwargs)


# A region may not change its inputs before torch 2.13; there the layers are compiled one by one.
has_regions = torch.__version__ >= "2.13"  # compared as versions, not as strings
if has_regions:
    # More kinds than any model has, each on many devices: torch raises where there are more.
    call_layer_as_region = torch.compiler.nested_compile_region(call_layer, max_reuse_entries=256)


def run_layer(layer: nn.Module, hidden_states: Tensor, *, as_region: bool, **kwargs) -> Tensor:
    """`call_layer`, as a region where that is wanted and possible.

    A region is an optimization only. An exporter has no use for it, and what hooks collect inside cannot leave it.
    """
    if as_region and has_regions and not torch.compiler.is_exporting():
        return call_layer_as_region(layer, hidden_states, **kwargs)
    return call_layer(layer, hidden_states, **kwargs)
