"""The DeepSeek-V4 add-on: a static cache, and the forward that compiles as one graph with it.

Read in this order; each file imports only from those before it:

    positions, sizes                              where a token's state lives, and how large it is
    buffers, compressor_state, cache_layers       the state of a layer
    host_count, static_cache, trees               the cache, and what compilers and exporters see of it
    compression, attention, selection             the arithmetic of a layer
    static_shapes, devices, admission, layer_kinds, region, forward   a call of the model
    experts, few_rows, graph_per_shape, chunks, compiled              the call as a graph
    model_hooks, drafts, generate_hooks, integration                  the hooks into transformers
"""

from . import trees  # noqa: F401  (the cache and its layers are trees from the import on)
from .cache_layers import DeepseekV4CSAStaticLayer, DeepseekV4HCAStaticLayer, DeepseekV4SlidingStaticLayer
from .compiled import DeepseekV4StaticForward, compile_forward
from .integration import register, unregister
from .static_cache import DeepseekV4StaticCache

__all__ = [
    "DeepseekV4CSAStaticLayer",
    "DeepseekV4HCAStaticLayer",
    "DeepseekV4SlidingStaticLayer",
    "DeepseekV4StaticCache",
    "DeepseekV4StaticForward",
    "compile_forward",
    "register",
    "unregister",
]
