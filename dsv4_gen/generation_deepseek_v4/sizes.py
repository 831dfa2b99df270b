"""How large a cache is. Every size follows from the model's config and a few numbers, and none changes after that."""

from dataclasses import dataclass, field
from math import ceil

from torch.utils._pytree import register_constant
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

SLIDING = "sliding_attention"
HCA = "heavily_compressed_attention"
CSA = "compressed_sparse_attention"
SHORT_NAMES = {SLIDING: "sliding", HCA: "HCA", CSA: "CSA"}

# What shapes the state or decides where it stands: caches of configs that agree here are interchangeable.
STATE_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "layer_types",
    "compress_rates",
    "head_dim",
    "sliding_window",
    "index_head_dim",
    "index_topk",
    "rope_parameters",
)


def constant(sizes_class: type) -> type:
    """Make a class of sizes one whose instances a compiler takes for constants.

    It then guards that an instance equals the one it has seen, where plain ints that differ between two caches would
    become symbols, which a nested region cannot take.
    """
    sizes_class = dataclass(unsafe_hash=True)(sizes_class)  # not frozen: Dynamo cannot take such an instance apart
    register_constant(sizes_class)
    return sizes_class


@constant
class CacheSizes:
    """Of a `DeepseekV4StaticCache`, as its arguments: `max_compressed_len` by layer kind."""

    max_cache_len: int
    max_rollback: int
    max_compressed_len: dict[str, int] = field(hash=False)


@constant
class LayerSizes:
    """Of a layer's sliding window: the width of a key, how many a query sees at most, and the whole cache's sizes."""

    head_dim: int
    sliding_window: int
    cache: CacheSizes

    @property
    def ring_size(self) -> int:
        """Keys that fit."""
        return ring_size(self.sliding_window, self.cache)


@constant
class CompressorSizes:
    """Of a `CompressorState`.

    Attributes:
        rate: source tokens per window.
        head_dim: width of an entry.
        overlaps: whether an entry also pools the window before its own (CSA): source tokens are twice as wide, Ca
            and Cb side by side, and the ring holds two windows.
        max_compressed_len: entries that fit.
        cache: the whole cache's sizes.
    """

    rate: int
    head_dim: int
    overlaps: bool
    max_compressed_len: int
    cache: CacheSizes

    @property
    def source_width(self) -> int:
        """Width of a source token."""
        return 2 * self.head_dim if self.overlaps else self.head_dim

    @property
    def source_tokens(self) -> int:
        """Source tokens that the open window's entry may need."""
        return 2 * self.rate if self.overlaps else self.rate

    @property
    def ring_size(self) -> int:
        """Source tokens that fit."""
        return ring_size(self.source_tokens, self.cache)


def ring_size(tokens: int, cache: CacheSizes) -> int:
    """Slots of a ring that must still hold `tokens` after `max_rollback` more were written and taken back."""
    return min(tokens + cache.max_rollback, cache.max_cache_len)


def compressed_len(max_cache_len: int, rate: int) -> int:
    """Entries that `max_cache_len` tokens can touch, the open window's candidate included."""
    return ceil(max_cache_len / rate)


def needs_indexer(config: DeepseekV4Config, max_compressed_len: int) -> bool:
    """Whether a query may have to choose: with `index_topk` entries or fewer, the choice is always all of them."""
    return max_compressed_len > config.index_topk


def deepseek_v4_config(config) -> DeepseekV4Config:
    """The config of a DeepSeek-V4 decoder, `config` itself or its text part.

    Raises:
        ValueError: a config of another model.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type != "deepseek_v4":
        raise ValueError(
            f"`DeepseekV4StaticCache` needs the config of a DeepSeek-V4 model, got one of `{config.model_type}`. For "
            "other models use transformers' `StaticCache`."
        )
    return config


def cache_sizes(
    config: DeepseekV4Config,
    max_cache_len: int | None,
    max_new_tokens: int | None,
    prompt_length: int,
    max_compressed_len: int | dict[str, int] | None,
    max_rollback: int,
) -> CacheSizes:
    """The sizes of a cache from the arguments of `DeepseekV4StaticCache`, which says what they are.

    Raises:
        ValueError: sizes that are missing, negative or do not fit each other.
    """
    if (max_cache_len is None) == (max_new_tokens is None):
        raise ValueError("Give either `max_cache_len`, or `max_new_tokens` and the prompt's length.")
    given = {"max_new_tokens": max_new_tokens or 0, "prompt_length": prompt_length, "max_rollback": max_rollback}
    for name, value in given.items():
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, got {value}.")
    if max_cache_len is not None and prompt_length:
        raise ValueError("`prompt_length` goes with `max_new_tokens`; `max_cache_len` counts the prompt already.")
    capacity = max_cache_len if max_cache_len is not None else prompt_length + max_new_tokens
    if capacity < 1:
        raise ValueError(f"The cache must hold at least one token, got a capacity of {capacity}.")
    return CacheSizes(capacity, max_rollback, _compressed_lengths(config, capacity, max_compressed_len))


def _compressed_lengths(
    config: DeepseekV4Config, max_cache_len: int, max_compressed_len: int | dict[str, int] | None
) -> dict[str, int]:
    needed = {
        kind: compressed_len(max_cache_len, config.compress_rates[kind])
        for kind in (CSA, HCA)
        if kind in config.layer_types
    }
    if max_compressed_len is None:
        return needed
    if isinstance(max_compressed_len, int):
        max_compressed_len = dict.fromkeys(needed, max_compressed_len)
    if unknown := set(max_compressed_len) - set(needed):
        raise ValueError(f"`max_compressed_len` has {sorted(unknown)}, but this model compresses {sorted(needed)}.")
    for kind, length in max_compressed_len.items():
        if length < needed[kind]:
            raise ValueError(
                f"`max_compressed_len` of {length} is too small for {kind}: `max_cache_len={max_cache_len}` needs "
                f"{needed[kind]} entries."
            )
    return needed | max_compressed_len
