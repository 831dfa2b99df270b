"""Fix `sliding_window`: sliding-window layers that are rings, and the masks that fit them."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_masks_for_generate

from ..conventions import CACHE_NAME, call_shape

# Kinds of layers whose masks a ring's columns are picked from.
WINDOWED_KINDS = ("sliding_attention", "chunked_attention")


class RingLayer(StaticSlidingWindowLayer):
    """A static sliding-window layer as a ring: the token at position `p` lives in slot `p % window`.

    What goes wrong: upstream's layer counts its tokens in a Python int, which `update` reads. With `dynamic=False` that
    is a graph for every token until the window is full, and for every length that a chunk starts from.
    Since: before 5.17, the oldest release that this package supports.
    Upstream report: huggingface/transformers issue 44609.
    Can go: when upstream's layer counts in tensors alone, as `needed()` finds out.

    The ring reads the tensor `cumulative_length` only, and a decode step moves no token but its own. Masks stay
    upstream's, padding and windows and all: they are made over all positions of the cache, and `fit_masks_to_rings`
    picks the columns of the positions that `update` returns.

    Args:
        max_cache_len: positions that the whole cache has, more than the window.
        sliding_window: slots of the ring.
    """

    def __init__(self, max_cache_len: int, sliding_window: int):
        super().__init__(max_cache_len, sliding_window)
        self.slots, self.positions = sliding_window, max_cache_len

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store `(batch, heads, seq, head_dim)` keys and values; return those at the positions `columns(seq)`."""
        seq = key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            seen = key_states, value_states
        elif seq == 1:
            seen = self.keys, self.values
        else:
            # The chunk's first tokens see what its last ones overwrite.
            seen = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
        positions = self.cumulative_length + torch.arange(seq, device=self.device)
        kept = positions[-self.slots :] % self.slots
        self.keys.index_copy_(2, kept, key_states[:, :, -self.slots :])
        self.values.index_copy_(2, kept, value_states[:, :, -self.slots :])
        self.cumulative_length.add_(seq)
        return seen

    def columns(self, seq: int) -> Tensor:
        """`(keys,)` positions of the keys that an `update` with `seq` tokens will return, negative for none yet."""
        chunk = self.cumulative_length + torch.arange(seq, device=self.cumulative_length.device)
        if not self.is_initialized:
            return chunk
        # A single token is read from the ring it was written to; a chunk stands beside the ring as it was before.
        last = chunk[0] if seq == 1 else chunk[0] - 1
        ring = last - (last - torch.arange(self.slots, device=last.device)) % self.slots
        return ring if seq == 1 else torch.cat([ring, chunk])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and first position of the mask that `ring_mask` picks from: all positions of the cache."""
        return self.positions, 0

    def get_seq_length(self) -> int | Tensor:
        """Tokens seen so far."""
        return self.cumulative_length if self.is_initialized else 0


class WholeWindowLayer(StaticLayer):
    """A sliding-window layer of a cache that is no longer than the window: there is nothing to overwrite."""

    is_sliding = True


def replace_sliding_layers(cache: StaticCache, max_cache_len: int) -> None:
    """Put a `RingLayer` or a `WholeWindowLayer` in the place of every sliding-window layer of an empty cache."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not StaticSlidingWindowLayer:
            continue
        window = layer.max_cache_len
        fixed = RingLayer(max_cache_len, window) if window < max_cache_len else WholeWindowLayer(max_cache_len)
        if layer.is_initialized:
            fixed.lazy_initialization(layer.keys, layer.values)
        cache.layers[index] = fixed


def can_have_rings(model: PreTrainedModel) -> bool:
    """Whether a model has sliding windows, and all its masks are 4D tensors that upstream makes.

    They are not for flash and flex attention, nor for layer kinds whose masks are the model's own business.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(get_layer_types_and_kwargs(config)[0])
    return (
        not kinds.isdisjoint(WINDOWED_KINDS)
        and kinds <= set(LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING) | {"dummy"}
        and config._attn_implementation in ("sdpa", "eager")
    )


def forward_with_rings(model_class: type[PreTrainedModel]) -> Callable:
    """A forward for models of a class, with its signature, that gives rings the columns of the masks that they hold."""

    @functools.wraps(model_class.forward)
    def forward(self, *args, **kwargs):
        return self._unfixed["forward"](*args, **fit_masks_to_rings(self, args, kwargs))

    return forward


def fit_masks_to_rings(model: PreTrainedModel, args: tuple, kwargs: dict) -> dict:
    """Keywords of a forward whose masks have the columns that the cache's rings hold.

    `generate` makes all masks ahead. For those who call the model themselves, with the cache that `generate` returned,
    they are made here, since the model would make them where nobody can pick columns any more.

    This is in the graph, where picking columns costs next to nothing.
    """
    cache = kwargs.get(CACHE_NAME)
    ring = next((layer for layer in getattr(cache, "layers", []) if isinstance(layer, RingLayer)), None)
    if ring is None:
        return kwargs
    masks = kwargs.get("attention_mask")
    batch, seq = call_shape({"input_ids": args[0] if args else None} | kwargs)
    if masks is None or (isinstance(masks, Tensor) and masks.dim() == 2):
        masks = getattr(model, "create_masks_for_generate", create_masks_for_generate)(
            config=model.config,
            # Upstream reads shape, dtype and device of it only.
            inputs_embeds=torch.empty(batch, seq, 0, dtype=model.dtype, device=model.device),
            attention_mask=masks,
            position_ids=kwargs.get("position_ids"),
            **{CACHE_NAME: cache},
        )
    columns = ring.columns(seq)
    if isinstance(masks, dict):
        masks = {kind: ring_mask(mask, columns) if kind in WINDOWED_KINDS else mask for kind, mask in masks.items()}
    else:
        masks = ring_mask(masks, columns)
    return kwargs | {"attention_mask": masks}


def ring_mask(mask: Tensor, columns: Tensor) -> Tensor:
    """Pick the columns of a mask that belong to the keys a ring returns.

    Args:
        mask: `(batch, 1, seq, positions)`, bool where True is seen, or float to be added to the scores.
        columns: `(keys,)`, positions, or negative for an empty slot, which nobody sees.

    Returns:
        `(batch, 1, seq, keys)`.
    """
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    columns = columns.to(mask.device)
    return mask.index_select(-1, columns.clamp(min=0)).masked_fill(columns < 0, hidden)


def sliding_layer_counts_on_the_host() -> bool:
    """Whether upstream's sliding-window layer counts its tokens in a Python int, see `RingLayer`."""
    layer = StaticSlidingWindowLayer(max_cache_len=4, sliding_window=2)
    layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    return isinstance(layer.get_seq_length(), int)
