"""What a static cache costs, before anything is allocated."""

from dataclasses import dataclass

import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .generation_deepseek_v4.cache_layers import DeepseekV4SlidingStaticLayer
from .generation_deepseek_v4.sizes import CSA, HCA, SLIDING
from .generation_deepseek_v4.static_cache import DeepseekV4StaticCache

# What shapes the cache of the public models.
PUBLIC_MODELS = {
    "flash": {"layer_types": [SLIDING, SLIDING, CSA] + [HCA, CSA] * 20, "index_topk": 512},
    "pro": {"layer_types": [HCA, HCA, CSA] + [HCA, CSA] * 29, "index_topk": 1024},
}


def public_config(name: str) -> DeepseekV4Config:
    """The config of DeepSeek-V4-Flash (`flash`) or -Pro (`pro`), as far as it shapes the cache; the rest is default."""
    model = PUBLIC_MODELS[name]
    return DeepseekV4Config(
        num_hidden_layers=len(model["layer_types"]),
        head_dim=512,
        sliding_window=128,
        compress_rates={CSA: 4, HCA: 128},
        index_head_dim=128,
        max_position_embeddings=1_048_576,
        **model,
    )


@dataclass(frozen=True)
class KindMemory:
    """Bytes of all layers of one kind, over all rows.

    Attributes:
        kind: as in `config.layer_types`.
        layers: how many layers are of it.
        fixed: bytes of their rings, whatever the context, once it is longer than the rings.
        entries: bytes of their entries, which the context's length decides.
        per_token: bytes of entries that one more token of context costs.
    """

    kind: str
    layers: int
    fixed: int
    entries: int
    per_token: float

    @property
    def total(self) -> int:
        return self.fixed + self.entries


@dataclass(frozen=True)
class CachePlan:
    """What a cache will cost, in bytes: by layer kind (`kinds`), and the counters of its rows (`lengths`)."""

    kinds: list[KindMemory]
    lengths: int

    @property
    def fixed(self) -> int:
        return self.lengths + sum(kind.fixed for kind in self.kinds)

    @property
    def entries(self) -> int:
        return sum(kind.entries for kind in self.kinds)

    @property
    def per_token(self) -> float:
        return sum(kind.per_token for kind in self.kinds)

    @property
    def total(self) -> int:
        return self.fixed + self.entries


def plan_cache_memory(
    config: DeepseekV4Config,
    max_cache_len: int,
    *,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    max_rollback: int = 0,
    max_compressed_len: int | dict[str, int] | None = None,
) -> CachePlan:
    """What a `DeepseekV4StaticCache` of these sizes will cost; `.total` is its `nbytes`, to the byte.

    Args:
        config: the model's config.
        max_cache_len: tokens that a row can hold, prompt and new ones together.
        batch_size: rows.
        dtype: of the model.
        max_rollback, max_compressed_len: as in `DeepseekV4StaticCache`.

    Raises:
        ValueError: sizes that `DeepseekV4StaticCache` refuses, or no row.

    Example:
        >>> plan_cache_memory(public_config("flash"), 1_048_576).total / 2**30
        6.73...
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    cache = DeepseekV4StaticCache(
        config, max_cache_len, max_rollback=max_rollback, max_compressed_len=max_compressed_len
    )
    # The cache itself, on the device that has shapes and no memory.
    cache.early_initialization(batch_size, 1, cache.layers[0].sizes.head_dim, dtype, torch.device("meta"))
    kinds = [kind_memory(kind, [layer for layer in cache.layers if layer.kind == kind]) for kind in (SLIDING, CSA, HCA)]
    lengths = sum(counter.nbytes for counter in cache.counters().values())
    return CachePlan([kind for kind in kinds if kind.layers], lengths)


def kind_memory(kind: str, layers: list[DeepseekV4SlidingStaticLayer]) -> KindMemory:
    """Bytes of the layers of one kind, which have been allocated."""
    total = sum(tensor.nbytes for layer in layers for tensor in layer.tensors().values())
    states = [state for layer in layers for state in layer.states().values()]
    entries = sum(state.entries.nbytes for state in states)
    per_token = sum(state.entries[:, 0].nbytes / state.sizes.rate for state in states)
    return KindMemory(kind, len(layers), fixed=total - entries, entries=entries, per_token=per_token)


def longest_context(
    config: DeepseekV4Config,
    memory: int,
    *,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    max_rollback: int = 0,
) -> int:
    """The largest `max_cache_len` whose cache fits in `memory` bytes, at most the model's `max_position_embeddings`.

    Args:
        config: the model's config.
        memory: bytes for the cache alone: the weights and a prefill's activations take theirs besides.
        batch_size, dtype, max_rollback: as in `plan_cache_memory`.

    Returns:
        Tokens per row, prompt and new ones together; 0 if not even one fits.

    Example:
        >>> longest_context(public_config("pro"), 4 * 2**30)
    """
    fits, too_long = 0, config.max_position_embeddings + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        plan = plan_cache_memory(config, middle, batch_size=batch_size, dtype=dtype, max_rollback=max_rollback)
        if plan.total <= memory:
            fits = middle
        else:
            too_long = middle
    return fits
