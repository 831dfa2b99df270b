"""The static cache: the layers of a model, and the one thing that changes, how many tokens each row holds."""

from collections import Counter

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .buffers import mark_static, static_zeros
from .cache_layers import DeepseekV4CSAStaticLayer, DeepseekV4HCAStaticLayer, DeepseekV4SlidingStaticLayer
from .host_count import HostCount
from .positions import count_true
from .sizes import SHORT_NAMES, STATE_FIELDS, cache_sizes, deepseek_v4_config

LAYER_CLASSES = {
    layer_class.kind: layer_class
    for layer_class in (DeepseekV4SlidingStaticLayer, DeepseekV4HCAStaticLayer, DeepseekV4CSAStaticLayer)
}

# What a cache counts per row. A batch of its own each, which exporters tell state by.
COUNTERS = ("lengths", "seq_length", "high_water")


class DeepseekV4StaticCache(Cache):
    """A static cache for DeepSeek-V4: everything is allocated once, and a model that uses it compiles to one graph.

    Give `max_cache_len`, or `max_new_tokens` and the prompt's length. Rows keep their own positions: padding takes no
    room and changes nothing. The state is allocated on first use (or by `early_initialization`), for the batch and
    dtype found there, each layer's on the device where the layer runs, and never moves after that.

    Args:
        config (`DeepseekV4Config`): the model's config.
        max_cache_len (`int`, *optional*): tokens that a row can hold.
        max_new_tokens (`int`, *optional*): instead of `max_cache_len`: `prompt_length + max_new_tokens`.
        prompt_length (`int`, *optional*, defaults to 0): tokens of the prompt, with `max_new_tokens`.
        max_compressed_len (`int` or `dict[str, int]`, *optional*): entries of the compressors, for both kinds or by
            layer kind. Defaults to what `max_cache_len` tokens need, `ceil(max_cache_len / rate)`.
        max_rollback (`int`, *optional*, defaults to 0): tokens that `crop` can take back. Drafts of assisted decoding
            need room too, beyond the last token: add `max_rollback` to the tokens then.

    Attributes:
        lengths: `(batch,)`, tokens that each row holds, padding not counted. None before the first use.
        seq_length: `(batch,)`, columns seen so far, padding counted and so the same in every row: `get_seq_length`.
        high_water: `(batch,)`, the most tokens that each row held since the reset, those taken back included; in a
            cache from a file `max_rollback` more, since what lies behind its tokens is not in the file.
        sizes: the `CacheSizes`, constants.
        state_fields: what the config says of the state, by `STATE_FIELDS`.
        host: what the host counts for itself (`HostCount`); no graph reads it.

    Raises:
        ValueError: sizes that are missing, negative or do not fit each other, or a config of another model.

    Example:
        >>> cache = DeepseekV4StaticCache(model.config, max_new_tokens=256, prompt_length=prompt.shape[1])
        >>> model.generate(prompt, max_new_tokens=256, cache=cache)
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        max_cache_len: int | None = None,
        *,
        max_new_tokens: int | None = None,
        prompt_length: int = 0,
        max_compressed_len: int | dict[str, int] | None = None,
        max_rollback: int = 0,
    ):
        config = deepseek_v4_config(config)
        self.state_fields = {name: getattr(config, name) for name in STATE_FIELDS}
        self.sizes = cache_sizes(config, max_cache_len, max_new_tokens, prompt_length, max_compressed_len, max_rollback)
        super().__init__(layers=[LAYER_CLASSES[kind](config, self.sizes) for kind in config.layer_types])
        self.lengths: Tensor | None = None
        self.seq_length: Tensor | None = None
        self.high_water: Tensor | None = None
        self.host = HostCount()

    # State

    def allocate_lengths(self, batch_size: int, device: torch.device) -> None:
        """Allocate what is counted per row, if it is not yet."""
        if self.lengths is None:
            for counter in COUNTERS:
                setattr(self, counter, static_zeros(batch_size, dtype=torch.long, device=device))

    def counters(self) -> dict[str, Tensor]:
        """What is counted per row, by name."""
        return {counter: getattr(self, counter) for counter in COUNTERS}

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, such as `lengths` or `layers.3.compressor.entries`; empty before the first use."""
        tensors = self.counters()
        for index, layer in enumerate(self.layers):
            tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def advance(self, token_mask: Tensor) -> None:
        """Count a call's tokens as held: from here on they are seen.

        Args:
            token_mask: `(batch, seq)` bool, False for padding.
        """
        self.lengths.add_(count_true(token_mask))
        self.high_water.copy_(torch.maximum(self.high_water, self.lengths))
        self.seq_length.add_(token_mask.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far; `dsv4_gen.plan_cache_memory` tells them in advance."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the state, None before the first use."""
        keys = self.layers[0].keys
        return None if keys is None else keys.dtype

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first use."""
        return -1 if self.lengths is None else self.lengths.shape[0]

    # transformers' interface

    def __repr__(self) -> str:
        kinds = Counter(SHORT_NAMES[layer.kind] for layer in self.layers)
        layers = " + ".join(f"{count} {name}" for name, count in kinds.items())
        if self.lengths is None:
            held = f"empty, room for {self.max_cache_len} tokens per row"
        else:
            held = f"{self.lengths.tolist()} of {self.max_cache_len} tokens held, {self.nbytes / 2**20:.2f} MiB"
        return f"{type(self).__name__}({layers} layers, {held})"

    @property
    def max_cache_len(self) -> int:
        """Tokens that a row can hold."""
        return self.sizes.max_cache_len

    @property
    def max_rollback(self) -> int:
        """Tokens that `crop` can take back."""
        return self.sizes.max_rollback

    @property
    def max_compressed_len(self) -> dict[str, int]:
        """Entries that fit, by layer kind."""
        return self.sizes.max_compressed_len

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back: whether there is `max_rollback`."""
        return self.max_rollback > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding counted, as `generate` slices its inputs by; see `lengths` for tokens."""
        return 0 if self.seq_length is None else int(self.seq_length[0])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that a row can hold."""
        return self.max_cache_len

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate everything ahead of the first use, as a compiled or exported prefill requires.

        Args:
            batch_size: rows.
            num_heads, head_dim: KV heads and their width, which the config fixes: 1 and `config.head_dim`.
            dtype, device: of the model.

        Raises:
            ValueError: a size that is not the config's, or rows that are not the cache's.
        """
        width = self.state_fields["head_dim"]
        for name, sizes, expected in (("num_heads", num_heads, 1), ("head_dim", head_dim, width)):
            if set(sizes if isinstance(sizes, list) else [sizes]) != {expected}:
                raise ValueError(f"`{name}` of this model's KV is {expected} in every layer, got {sizes}.")
        if self.batch_size not in (-1, batch_size):
            raise ValueError(f"The cache was initialized for {self.batch_size} rows already, not {batch_size}.")
        self.allocate_lengths(batch_size, device)
        super().early_initialization(batch_size, 1, width, dtype, device)

    def reset(self) -> None:
        """Forget all tokens, in place: the next request may come."""
        super().reset()
        if self.lengths is not None:
            for counter in self.counters().values():
                counter.zero_()
        self.host = HostCount()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row: the cache then gives what it would have given without them.

        Args:
            tokens_to_remove: how many, as a negative number (upstream's convention); 0 does nothing.

        Raises:
            ValueError: a positive number, more than `max_rollback` since the longest the rows have been, or more
                than a row holds. Nothing is changed then.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes a negative number of tokens to remove, got {tokens_to_remove}.")
        if tokens_to_remove == 0:
            return
        shortest = 0 if self.lengths is None else int(self.lengths.min())
        if -tokens_to_remove > shortest:
            raise ValueError(f"Cannot take back {-tokens_to_remove} tokens: the shortest row holds {shortest}.")
        taken_back = int((self.high_water - self.lengths).max()) - tokens_to_remove
        if taken_back > self.max_rollback:
            raise ValueError(
                f"Cannot take back {-tokens_to_remove} tokens: that is {taken_back} behind the longest a row has been, "
                f"and the cache was made with `max_rollback={self.max_rollback}`."
            )
        self.lengths.add_(tokens_to_remove)
        self.seq_length.add_(tokens_to_remove)
        self.host.longest = int(self.lengths.max())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row `i` take the state of row `beam_idx[i]`, in place (beam search)."""
        super().reorder_cache(beam_idx)
        if self.lengths is not None:
            for counter in self.counters().values():
                counter.copy_(counter.index_select(0, beam_idx.to(counter.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times. The batch changes, so the state moves to new tensors."""
        if self.lengths is not None:
            rows = torch.arange(self.batch_size, device=self.lengths.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`. The batch changes, so the state moves to new tensors."""
        super().batch_select_indices(indices)
        if self.lengths is not None:
            indices = indices.to(self.lengths.device)
            for name, counter in self.counters().items():
                setattr(self, name, mark_static(counter[indices]))
