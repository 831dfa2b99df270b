"""The static cache: the layers of a model, and the one thing that changes, how many tokens each row holds."""

from collections import Counter

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from ..conventions import same_strides
from .cache_layers import (
    CSA,
    HCA,
    SLIDING,
    DeepseekV4CSAStaticLayer,
    DeepseekV4HCAStaticLayer,
    DeepseekV4SlidingStaticLayer,
    compressed_len,
    mark_static,
    static_zeros,
)
from .positions import Chunk, place

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


class DeepseekV4StaticCache(Cache):
    """A static cache for DeepSeek-V4: everything is allocated once, and a model that uses it compiles to one graph.

    Give `max_cache_len`, or `max_new_tokens` and the prompt's length. Rows keep their own positions: padding takes no
    room and changes nothing. The state is allocated on first use (or by `early_initialization`), for the batch, dtype
    and device found there, and never moves after that.

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
        seq_length: `()`, columns seen so far, padding counted: what `get_seq_length` returns.
        high_water: `(batch,)`, the most tokens that each row held since the reset, those taken back included; in a
            cache from a file `max_rollback` more, since what lies behind its tokens is not in the file.

    Raises:
        ValueError: sizes that are missing, negative or do not fit each other, or a config of another model.

    Example:
        >>> cache = DeepseekV4StaticCache(model.config, max_new_tokens=256, prompt_length=prompt.shape[1])
        >>> model.generate(prompt, max_new_tokens=256, cache=cache)
    """

    max_cache_len: int = 0  # an attribute; up to transformers 5.17 `Cache` has a deprecated property of this name

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
        self.config = _deepseek_v4_config(config)
        self.max_cache_len = _capacity(max_cache_len, max_new_tokens, prompt_length)
        self.max_compressed_len = _compressed_lengths(self.config, self.max_cache_len, max_compressed_len)
        if max_rollback < 0:
            raise ValueError(f"`max_rollback` must not be negative, got {max_rollback}.")
        self.max_rollback = max_rollback
        super().__init__(layers=[self._new_layer(kind) for kind in self.config.layer_types])

        self.lengths: Tensor | None = None
        self.seq_length: Tensor | None = None
        self.high_water: Tensor | None = None
        # The longest row as far as the host knows, an upper bound; None when only the device knows (see `reserve`).
        self._longest: int | None = 0
        # Whether a call has begun to write and has not come to its end.
        self.unfinished = False

    def _new_layer(self, kind: str) -> DeepseekV4SlidingStaticLayer:
        if kind == SLIDING:
            return DeepseekV4SlidingStaticLayer(self.config, self.max_cache_len, self.max_rollback)
        layer_class = DeepseekV4CSAStaticLayer if kind == CSA else DeepseekV4HCAStaticLayer
        return layer_class(self.config, self.max_cache_len, self.max_rollback, self.max_compressed_len[kind])

    # One call: the host reserves room and the graph places the tokens, runs the layers, and advances.

    def reserve(
        self,
        batch_size: int,
        seq: int,
        device: torch.device,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Check on the host, before anything is written, that a call fits; return the mask of its own tokens.

        Decode steps read nothing from the device here: the host counts along, and asks only when its count, an upper
        bound, says that the call might not fit.

        Args:
            batch_size, seq: rows and columns of the call.
            device: where the lengths live, from the first call on.
            attention_mask: `(batch, seq)` or, as `generate` has it, `(batch, columns so far + seq)`; 0 is padding,
                which stands left of the tokens. None for no padding.
            position_ids: `(batch, seq)` or `(1, seq)`, compared with the rows' own positions.

        Returns:
            `(batch, seq)` bool, False for padding.

        Raises:
            ValueError: a call before that failed half-way, no tokens, another batch than the cache's, a mask of another
                shape or not left-padded, positions that are not the rows' own, or no room.
        """
        if self.unfinished:
            raise ValueError("The call before failed half-way, and the cache holds parts of it: `reset()` the cache.")
        if seq == 0:
            raise ValueError(f"The call has no new tokens; the cache has seen {self.get_seq_length()} columns already.")
        if self.lengths is not None and batch_size != self.batch_size:
            raise ValueError(
                f"The cache holds {self.batch_size} rows, but the call has {batch_size}. Use a new cache, or change "
                "this one with `batch_repeat_interleave` or `batch_select_indices`."
            )
        token_mask = new_token_mask(attention_mask, batch_size, seq, device)
        lengths = torch.zeros(batch_size, dtype=torch.long, device=device) if self.lengths is None else self.lengths
        new_tokens = seq
        if attention_mask is not None and seq > 1:
            if (token_mask[:, :-1] & ~token_mask[:, 1:]).any():
                raise ValueError(
                    "The attention mask is not left-padded: a 0 follows a 1. Pad on the left, as the tokenizer does "
                    "with `padding_side='left'`."
                )
            new_tokens = int(token_mask.sum(dim=1).max())
        if self._longest is None or self._longest + new_tokens > self.max_cache_len:
            self._longest = int(lengths.max())
            needed = int((lengths + token_mask.sum(dim=1)).max())
            if needed > self.max_cache_len:
                raise ValueError(
                    f"The call needs room for {needed} tokens in a row, which holds {self._longest} by now, but the "
                    f"cache has `max_cache_len={self.max_cache_len}`. Use a larger cache, or `reset()` this one."
                )
        if position_ids is not None:
            if position_ids.shape[-1] != seq:
                raise ValueError(f"`position_ids` has {position_ids.shape[-1]} columns, but the call has {seq}.")
            positions = place(lengths, token_mask, self.max_cache_len).positions
            if ((positions != position_ids.to(device)) & token_mask).any():
                raise ValueError(
                    "`position_ids` differ from the positions that the rows are at. Leave them out: rows count their "
                    "own tokens, from 0, and skip padding."
                )
        self._longest += new_tokens
        self.allocate_lengths(batch_size, device)
        return token_mask

    def reserve_unseen(self, batch_size: int, seq: int, device: torch.device, attention_mask: Tensor | None) -> Tensor:
        """`reserve` for a graph that the user compiled: nothing can be checked, so the host loses count.

        A token that does not fit is dropped there, and the next `reserve` finds out.
        """
        self.recount()
        self.allocate_lengths(batch_size, device)
        return new_token_mask(attention_mask, batch_size, seq, device)

    def place(self, token_mask: Tensor) -> Chunk:
        """Positions of a call's tokens, from its `token_mask` as `reserve` returns it."""
        return place(self.lengths, token_mask, self.max_cache_len)

    def recount(self) -> None:
        """To be called by whoever wrote `lengths` itself: the host asks the device at the next call."""
        self._longest = None

    def attended_len(self, smallest: int) -> int:
        """The first of `smallest`, twice that, and so on, that holds the longest row, as `reserve` counted it."""
        length = smallest
        while length < self._longest:
            length *= 2
        return min(length, self.max_cache_len)

    def advance(self, token_mask: Tensor) -> None:
        """Count a call's tokens as held: from here on they are seen."""
        self.lengths.add_(token_mask.sum(dim=1))
        self.high_water.copy_(torch.maximum(self.high_water, self.lengths))
        self.seq_length.add_(token_mask.shape[1])
        self.unfinished = False

    # Allocation

    def allocate_lengths(self, batch_size: int, device: torch.device) -> None:
        """Allocate what is counted per row, if it is not yet."""
        if self.lengths is None:
            self.lengths = static_zeros(batch_size, dtype=torch.long, device=device)
            self.high_water = static_zeros(batch_size, dtype=torch.long, device=device)
            self.seq_length = static_zeros(dtype=torch.long, device=device)

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
        for name, sizes, expected in (("num_heads", num_heads, 1), ("head_dim", head_dim, self.config.head_dim)):
            if set(sizes if isinstance(sizes, list) else [sizes]) != {expected}:
                raise ValueError(f"`{name}` of this model's KV is {expected} in every layer, got {sizes}.")
        if self.lengths is not None and batch_size != self.batch_size:
            raise ValueError(f"The cache was initialized for {self.batch_size} rows already, not {batch_size}.")
        self.allocate_lengths(batch_size, device)
        super().early_initialization(batch_size, 1, self.config.head_dim, dtype, device)

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, such as `lengths` or `layers.3.compressor.entries`; empty before the first use."""
        tensors = {"lengths": self.lengths, "high_water": self.high_water, "seq_length": self.seq_length}
        for index, layer in enumerate(self.layers):
            tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far; `dsv4_gen.memory.cache_nbytes` predicts them."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

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
    def batch_size(self) -> int:
        """Rows, -1 before the first use."""
        return -1 if self.lengths is None else self.lengths.shape[0]

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back: whether there is `max_rollback`."""
        return self.max_rollback > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding counted, as `generate` slices its inputs by; see `lengths` for tokens."""
        return 0 if self.seq_length is None else int(self.seq_length)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that a row can hold."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forget all tokens, in place: the next request may come."""
        super().reset()
        if self.lengths is not None:
            for counter in (self.lengths, self.high_water, self.seq_length):
                counter.zero_()
        self._longest = 0
        self.unfinished = False

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
        self._longest = int(self.lengths.max())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row `i` take the state of row `beam_idx[i]`, in place (beam search)."""
        super().reorder_cache(beam_idx)
        if self.lengths is not None:
            for counter in (self.lengths, self.high_water):
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
            self.lengths = mark_static(self.lengths[indices])
            self.high_water = mark_static(self.high_water[indices])

    def check_model(self, config: DeepseekV4Config, dtype: torch.dtype) -> None:
        """Raise `ValueError` if a model with `config` and `dtype` keeps another state than this cache."""
        if self.is_initialized and dtype != self.layers[0].dtype:
            raise ValueError(f"The cache holds {self.layers[0].dtype}, but the model is in {dtype}. Use a new cache.")
        if config is self.config:
            return
        for field in STATE_FIELDS:
            mine, theirs = getattr(self.config, field, None), getattr(config, field, None)
            if mine != theirs:
                raise ValueError(
                    f"The cache was made for a config with `{field}={mine}`, but the model has `{theirs}`. Make the "
                    "cache from `model.config`."
                )


def new_token_mask(attention_mask: Tensor | None, batch_size: int, seq: int, device: torch.device) -> Tensor:
    """`(batch, seq)` bool, the part of `attention_mask` that is about a call's own tokens.

    Raises:
        ValueError: a mask of another shape.
    """
    if attention_mask is None:
        return torch.ones(batch_size, seq, dtype=torch.bool, device=device)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or attention_mask.shape[1] < seq:
        raise ValueError(
            f"The attention mask must have {batch_size} rows, and a column for each of the {seq} new tokens (and, if "
            f"you like, of those before), but its shape is {tuple(attention_mask.shape)}."
        )
    return same_strides(attention_mask[:, -seq:]).to(device=device, dtype=torch.bool)


def _deepseek_v4_config(config) -> DeepseekV4Config:
    config = config.get_text_config(decoder=True)
    if config.model_type != "deepseek_v4":
        raise ValueError(
            f"`DeepseekV4StaticCache` needs the config of a DeepSeek-V4 model, got one of `{config.model_type}`. For "
            "other models use transformers' `StaticCache`."
        )
    return config


def _capacity(max_cache_len: int | None, max_new_tokens: int | None, prompt_length: int) -> int:
    if (max_cache_len is None) == (max_new_tokens is None):
        raise ValueError("Give either `max_cache_len`, or `max_new_tokens` and the prompt's length.")
    for name, value in (("max_new_tokens", max_new_tokens or 0), ("prompt_length", prompt_length)):
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, got {value}.")
    if max_cache_len is not None and prompt_length:
        raise ValueError("`prompt_length` goes with `max_new_tokens`; `max_cache_len` counts the prompt already.")
    capacity = max_cache_len if max_cache_len is not None else prompt_length + max_new_tokens
    if capacity < 1:
        raise ValueError(f"The cache must hold at least one token, got a capacity of {capacity}.")
    return capacity


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
