"""A static cache means static shapes, whatever the compiler's settings: by default it makes symbols of sizes."""

from operator import index

import torch
from torch import Tensor

from .static_cache import DeepseekV4StaticCache


def static_shapes(settings: dict) -> dict:
    """Settings for `torch.compile` in which `dynamic` is False where it was left open."""
    return settings | {"dynamic": bool(settings.get("dynamic"))}


def fix_shapes(cache: DeepseekV4StaticCache, inputs: Tensor) -> None:
    """Make every size of a call the number that it is, where a compiler of the user's own settings made it a symbol.

    That is while a graph is traced, after the compiler has seen two values of a size; else this does nothing.

    Args:
        cache: of the call.
        inputs: `(batch, seq, ...)`, ids or embeddings.
    """
    if torch.compiler.is_dynamo_compiling():
        for tensor in (inputs, *cache.tensors().values()):
            for size in tensor.shape:
                index(size)
        index(cache.max_cache_len)
        for layer in cache.layers:
            index(layer.sizes.cache.max_cache_len)
            for state in layer.states().values():
                index(state.sizes.max_compressed_len)
