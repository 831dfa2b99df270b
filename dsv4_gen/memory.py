"""What a static cache costs, before anything is allocated."""

from dataclasses import dataclass

import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .generation_deepseek_v4.cache_layers import CSA, HCA, SLIDING, compressed_len, needs_indexer, ring_size
from .generation_deepseek_v4.static_cache import DeepseekV4StaticCache

LENGTH_BYTES = torch.long.itemsize

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
class LayerMemory:
    """Bytes of one layer's state.

    Attributes:
        rings: its rings of tokens, which do not grow with the context once it is longer than them.
        entries: its compressor's and its indexer's entries, which do.
    """

    rings: int
    entries: int

    @property
    def total(self) -> int:
        return self.rings + self.entries


def layer_memory(
    config: DeepseekV4Config,
    kind: str,
    max_cache_len: int,
    *,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    max_rollback: int = 0,
    max_compressed_len: int | None = None,
) -> LayerMemory:
    """Bytes of a layer of `kind` in a `DeepseekV4StaticCache` of these sizes. Every buffer has one slot to spare.

    Example:
        >>> layer_memory(config, "heavily_compressed_attention", max_cache_len=1_048_576).entries
    """
    channel = batch_size * dtype.itemsize
    sliding = (ring_size(config.sliding_window, max_rollback, max_cache_len) + 1) * config.head_dim
    if kind == SLIDING:
        return LayerMemory(rings=sliding * channel, entries=0)

    rate = config.compress_rates[kind]
    entries = max_compressed_len or compressed_len(max_cache_len, rate)
    if kind == HCA:
        source = (ring_size(rate, max_rollback, max_cache_len) + 1) * 2  # kv and gate
        return LayerMemory(
            rings=(sliding + source * config.head_dim) * channel, entries=(entries + 1) * config.head_dim * channel
        )
    source = (ring_size(2 * rate, max_rollback, max_cache_len) + 1) * 2 * 2  # kv and gate, Ca and Cb
    widths = config.head_dim + (config.index_head_dim if needs_indexer(config, entries) else 0)
    return LayerMemory(rings=(sliding + source * widths) * channel, entries=(entries + 1) * widths * channel)


def cache_nbytes(
    config: DeepseekV4Config,
    max_cache_len: int,
    *,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    max_rollback: int = 0,
    max_compressed_len: dict[str, int] | None = None,
) -> int:
    """`cache.nbytes` of a `DeepseekV4StaticCache` of these sizes, to the byte.

    Args:
        config: the model's config.
        max_cache_len: tokens that a row can hold.
        batch_size: rows.
        dtype: of the model.
        max_rollback, max_compressed_len: as in `DeepseekV4StaticCache`.

    Example:
        >>> cache_nbytes(DeepseekV4Config(), max_cache_len=131_072)
    """
    layers = sum(
        layer_memory(
            config,
            kind,
            max_cache_len,
            batch_size=batch_size,
            dtype=dtype,
            max_rollback=max_rollback,
            max_compressed_len=(max_compressed_len or {}).get(kind),
        ).total
        for kind in config.layer_types
    )
    return layers + lengths_nbytes(batch_size)


def lengths_nbytes(batch_size: int) -> int:
    """Bytes of a cache's `lengths`, `high_water` and `seq_length`."""
    return (2 * batch_size + 1) * LENGTH_BYTES


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
    # Allocates nothing, but checks the sizes and fills in the compressed lengths.
    cache = DeepseekV4StaticCache(
        config, max_cache_len, max_rollback=max_rollback, max_compressed_len=max_compressed_len
    )
    sizes = {"batch_size": batch_size, "dtype": dtype, "max_rollback": max_rollback}
    kinds = []
    for kind in (SLIDING, CSA, HCA):
        if layers := cache.config.layer_types.count(kind):
            slots = cache.max_compressed_len.get(kind)
            layer = layer_memory(cache.config, kind, max_cache_len, **sizes, max_compressed_len=slots)
            per_token = 0.0 if kind == SLIDING else layer.entries / (slots + 1) / cache.config.compress_rates[kind]
            kinds.append(
                KindMemory(kind, layers, layers * layer.rings, layers * layer.entries, per_token=layers * per_token)
            )
    return CachePlan(kinds, lengths=lengths_nbytes(batch_size))


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
        if cache_nbytes(config, middle, batch_size=batch_size, dtype=dtype, max_rollback=max_rollback) <= memory:
            fits = middle
        else:
            too_long = middle
    return fits
