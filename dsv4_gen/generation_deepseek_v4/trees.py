"""What compilers and exporters see of a cache: a tree of tensors, and constants that never change.

The host's count is no part of it. A cache that comes out of a tree starts with a count of its own, which asks the
device. Exported programs keep the constants as JSON, and take only caches that agree with them.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .compressor_state import CompressorState
from .host_count import HostCount
from .sizes import CacheSizes, CompressorSizes, LayerSizes
from .static_cache import COUNTERS, LAYER_CLASSES, DeepseekV4StaticCache

STATE_CLASSES = {cls.__name__: cls for cls in (CompressorState, *LAYER_CLASSES.values())}
SIZES_CLASSES = {cls.__name__: cls for cls in (CompressorSizes, LayerSizes)}


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


def state_to_json(context: tuple) -> dict:
    """The context of `flatten_state` in terms of JSON."""
    state_class, names, constants = context
    constants = {
        name: {"sizes": type(value).__name__, **asdict(value)} if type(value) in SIZES_CLASSES.values() else value
        for name, value in constants
    }
    return {"class": state_class.__name__, "tensors": names, "constants": constants}


def state_from_json(saved: dict) -> tuple:
    """What `state_to_json` was given."""
    constants = tuple(
        (name, sizes_from_json(value) if isinstance(value, dict) else value)
        for name, value in saved["constants"].items()
    )
    return STATE_CLASSES[saved["class"]], tuple(saved["tensors"]), constants


def sizes_from_json(saved: dict) -> LayerSizes | CompressorSizes:
    fields = {name: value for name, value in saved.items() if name != "sizes"}
    return SIZES_CLASSES[saved["sizes"]](**fields | {"cache": CacheSizes(**fields["cache"])})


def flatten_cache(cache: DeepseekV4StaticCache) -> tuple[list, tuple]:
    """The layers and the counters of a cache, and what it was made for."""
    return [cache.layers, *cache.counters().values()], (cache.sizes, cache.state_fields)


def unflatten_cache(children: list, context: tuple) -> DeepseekV4StaticCache:
    """The cache that `flatten_cache` took apart, around other layers and counters."""
    layers, *counters = children
    cache = DeepseekV4StaticCache.__new__(DeepseekV4StaticCache)
    super(DeepseekV4StaticCache, cache).__init__(layers=layers)
    vars(cache).update(zip(COUNTERS, counters))
    cache.sizes, cache.state_fields = context
    cache.host = HostCount()
    cache.host.lose_count()
    return cache


def cache_to_json(context: tuple) -> dict:
    """The context of `flatten_cache` in terms of JSON."""
    sizes, state_fields = context
    return {"sizes": asdict(sizes), "state_fields": state_fields}


def cache_from_json(saved: dict) -> tuple:
    """What `cache_to_json` was given."""
    return CacheSizes(**saved["sizes"]), saved["state_fields"]


def names_of_state(state) -> tuple[list, tuple]:
    """`flatten_state`, each child with its name."""
    children, context = flatten_state(state)
    return [(GetAttrKey(name), child) for name, child in zip(context[1], children)], context


def names_of_cache(cache: DeepseekV4StaticCache) -> tuple[list, tuple]:
    """`flatten_cache`, each child with its name."""
    children, context = flatten_cache(cache)
    return [(GetAttrKey(name), child) for name, child in zip(("layers", *COUNTERS), children)], context


def register_tree(
    cls: type, flatten: Callable, unflatten: Callable, names: Callable, to_json: Callable, from_json: Callable
) -> None:
    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"dsv4_gen.{cls.__name__}",
        to_dumpable_context=to_json,
        from_dumpable_context=from_json,
        flatten_with_keys_fn=names,
    )


for state_class in STATE_CLASSES.values():
    register_tree(state_class, flatten_state, unflatten_state, names_of_state, state_to_json, state_from_json)
register_tree(DeepseekV4StaticCache, flatten_cache, unflatten_cache, names_of_cache, cache_to_json, cache_from_json)

# An exported program has a cache among its example inputs: it may be unpickled as data, which runs no code.
torch.serialization.add_safe_globals(
    [*STATE_CLASSES.values(), *SIZES_CLASSES.values(), CacheSizes, HostCount, DeepseekV4StaticCache]
)
