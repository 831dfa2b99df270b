"""What a static cache costs, before anything is allocated."""

from dataclasses import dataclass

import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .generation_deepseek_v4.cache_layers import HCA, SLIDING, compressed_len, needs_indexer, ring_size

LENGTH_BYTES = torch.long.itemsize


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
    return layers + (2 * batch_size + 1) * LENGTH_BYTES  # `lengths`, `high_water` and `seq_length`
