"""What compilers and exporters see of a cache: a tree of tensors, and constants that never change.

The host's count is no part of it. A cache that comes out of a tree starts with a count of its own, which asks the
device.
"""

from torch import Tensor
from torch.utils._pytree import register_pytree_node

from .compressor_state import CompressorState
from .host_count import HostCount
from .static_cache import LAYER_CLASSES, DeepseekV4StaticCache


def flatten_state(state) -> tuple[list, tuple]:
    """The tensors of a layer or of a compressor, and everything else by name."""
    children = {name: value for name, value in vars(state).items() if isinstance(value, Tensor | CompressorState)}
    constants = tuple((name, value) for name, value in vars(state).items() if name not in children)
    return list(children.values()), (type(state), tuple(children), constants)


def unflatten_state(children: list, context: tuple):
    """The layer or the compressor that `flatten_state` took apart, around other tensors."""
    state_class, names, constants = context
    state = state_class.__new__(state_class)
    vars(state).update(zip(names, children))
    vars(state).update(constants)
    return state


def flatten_cache(cache: DeepseekV4StaticCache) -> tuple[list, tuple]:
    """The layers and the counters of a cache, and what it was made for."""
    return [cache.layers, cache.lengths, cache.seq_length, cache.high_water], (cache.sizes, cache.state_fields)


def unflatten_cache(children: list, context: tuple) -> DeepseekV4StaticCache:
    """The cache that `flatten_cache` took apart, around other layers and counters."""
    cache = DeepseekV4StaticCache.__new__(DeepseekV4StaticCache)
    super(DeepseekV4StaticCache, cache).__init__(layers=children[0])
    cache.lengths, cache.seq_length, cache.high_water = children[1:]
    cache.sizes, cache.state_fields = context
    cache.host = HostCount()
    cache.host.lose_count()
    return cache


for state_class in (CompressorState, *LAYER_CLASSES.values()):
    register_pytree_node(state_class, flatten_state, unflatten_state)
register_pytree_node(DeepseekV4StaticCache, flatten_cache, unflatten_cache)
