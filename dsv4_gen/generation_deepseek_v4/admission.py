"""What the host settles about a call before anything is written: is it valid, and is there room?

A graph cannot raise and must not wait for the host, so all of this runs outside of it. In a graph that the user
compiled nothing can be checked: a token that does not fit is dropped there, and the next call from the host says so.
"""

import torch
from torch import Tensor, nn

from ..conventions import is_traced, same_strides
from .devices import allocate, check_devices, counting_device
from .positions import count_true, place
from .static_cache import DeepseekV4StaticCache


def admit(
    model: nn.Module,
    cache: DeepseekV4StaticCache,
    inputs: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Check a call, see that the cache is allocated, and return the mask of the call's own tokens.

    Decode steps read nothing from the device here: the host counts along, and asks only when its count, an upper
    bound, says that the call might not fit.

    Args:
        model: upstream's `DeepseekV4ForCausalLM` or `DeepseekV4Model`.
        cache: the state; only its host's count changes, and what it allocates.
        inputs: `(batch, seq, ...)`, ids or embeddings, on any device.
        attention_mask: `(batch, seq)` or, as `generate` has it, `(batch, columns so far + seq)`; 0 is padding, which
            stands left of the tokens. None for no padding.
        position_ids: `(batch, seq)` or `(1, seq)`, compared with the rows' own positions.

    Returns:
        `(batch, seq)` bool, False for padding, on the device where the model begins.

    Raises:
        ValueError: a cache from another config or dtype, or on other devices; embeddings where ids are needed; a call
            before that failed half-way; no
            tokens, another batch than the cache's, a mask of another shape or not left-padded, positions that are not
            the rows' own, or no room. Nothing has changed then.
    """
    batch_size, seq = inputs.shape[:2]
    check_model(cache, model, inputs)
    token_mask = new_token_mask(attention_mask, batch_size, seq, counting_device(model, cache))
    if is_traced():
        cache.host.lose_count()
    else:
        if not cache.host.longest:  # empty, or from elsewhere
            check_devices(model, cache)
        check_rows(cache, batch_size, seq)
        if attention_mask is not None and seq > 1 and (token_mask[:, :-1] & ~token_mask[:, 1:]).any():
            raise ValueError(
                "The attention mask is not left-padded: a 0 follows a 1. Pad on the left, as the tokenizer does with "
                "`padding_side='left'`."
            )
        if position_ids is not None:
            check_positions(cache, token_mask, position_ids.to(token_mask.device))
        count_tokens(cache, token_mask, has_padding=attention_mask is not None)
    allocate(model, cache, batch_size)
    return token_mask


def check_use_cache(use_cache: bool | None) -> None:
    """Raise `ValueError` for a call that brings a cache and says not to use it."""
    if use_cache is False:
        raise ValueError("`use_cache=False` contradicts the static cache of this call: leave out one of the two.")


def check_model(cache: DeepseekV4StaticCache, model: nn.Module, inputs: Tensor) -> None:
    """Raise `ValueError` if `model` keeps another state than the cache, or cannot do with `inputs` (see `admit`)."""
    if inputs.is_floating_point() and "hash_moe" in model.config.mlp_layer_types:
        raise ValueError("This model routes tokens by their ids (`hash_moe`): give `input_ids`, not `inputs_embeds`.")
    dtype = cache.dtype
    if dtype is not None and dtype != model.dtype:
        raise ValueError(f"The cache holds {dtype}, but the model is in {model.dtype}. Use a new cache.")
    for field, mine in cache.state_fields.items():
        theirs = getattr(model.config, field, None)
        if mine != theirs:
            raise ValueError(
                f"The cache was made for a config with `{field}={mine}`, but the model has `{theirs}`. Make the cache "
                "from `model.config`."
            )


def check_rows(cache: DeepseekV4StaticCache, batch_size: int, seq: int) -> None:
    """Raise `ValueError` for a call that the cache's rows cannot take as they are."""
    if cache.host.unfinished:
        raise ValueError("The call before failed half-way, and the cache holds parts of it: `reset()` the cache.")
    if seq == 0:
        raise ValueError(f"The call has no new tokens; the cache has seen {cache.get_seq_length()} columns already.")
    if cache.batch_size not in (-1, batch_size):
        raise ValueError(
            f"The cache holds {cache.batch_size} rows, but the call has {batch_size}. Use a new cache, or change this "
            "one with `batch_repeat_interleave` or `batch_select_indices`."
        )


def check_positions(cache: DeepseekV4StaticCache, token_mask: Tensor, position_ids: Tensor) -> None:
    """Raise `ValueError` if `position_ids` are not those that the rows count for themselves."""
    if position_ids.shape[-1] != token_mask.shape[1]:
        raise ValueError(
            f"`position_ids` has {position_ids.shape[-1]} columns, but the call has {token_mask.shape[1]}."
        )
    positions = place(held(cache, token_mask), token_mask, cache.max_cache_len).positions
    if ((positions != position_ids) & token_mask).any():
        raise ValueError(
            "`position_ids` differ from the positions that the rows are at. Leave them out: rows count their own "
            "tokens, from 0, and skip padding."
        )


def count_tokens(cache: DeepseekV4StaticCache, token_mask: Tensor, has_padding: bool) -> None:
    """Count a call's tokens on the host, having asked the device where there might be no room for them."""
    seq = token_mask.shape[1]
    new_tokens = int(count_true(token_mask).max()) if has_padding and seq > 1 else seq
    if cache.host.longest is None or cache.host.longest + new_tokens > cache.max_cache_len:
        check_room(cache, token_mask)
        cache.host.longest = int(held(cache, token_mask).max())
    cache.host.longest += new_tokens


def check_room(cache: DeepseekV4StaticCache, token_mask: Tensor, new_tokens: int = 0) -> None:
    """Raise `ValueError` if a call's tokens and `new_tokens` after them do not fit in every row."""
    lengths = held(cache, token_mask)
    needed = int((lengths + count_true(token_mask)).max()) + new_tokens
    if needed > cache.max_cache_len:
        answer = f" and the {new_tokens} tokens after it need" if new_tokens else " needs"
        fewer = ", fewer new tokens" if new_tokens else ""
        raise ValueError(
            f"The call{answer} room for {needed} tokens in a row, which holds {int(lengths.max())} by now, but the "
            f"cache has `max_cache_len={cache.max_cache_len}`. Use a larger cache{fewer}, or `reset()` this one."
        )


def held(cache: DeepseekV4StaticCache, token_mask: Tensor) -> Tensor:
    """`(batch,)`, tokens that each row holds, before the first use too."""
    return torch.zeros_like(token_mask[:, 0], dtype=torch.long) if cache.lengths is None else cache.lengths


def new_token_mask(attention_mask: Tensor | None, batch_size: int, seq: int, device: torch.device) -> Tensor:
    """`(batch, seq)` bool, the part of `attention_mask` that is about a call's own tokens.

    Raises:
        ValueError: a mask that is not 2D, or of another shape.
    """
    if attention_mask is None:
        return torch.ones(batch_size, seq, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        found = f"it is a {type(attention_mask).__name__}"
        if isinstance(attention_mask, Tensor):
            found = f"its shape is {tuple(attention_mask.shape)}"
        raise ValueError(
            f"The attention mask must be the tokenizer's, `(batch, columns)` with 0 for padding, but {found}. What "
            "each query sees follows from positions: give the 2D mask, not masks that were made of it."
        )
    if attention_mask.shape[0] != batch_size or attention_mask.shape[1] < seq:
        raise ValueError(
            f"The attention mask must have {batch_size} rows, and a column for each of the {seq} new tokens (and, if "
            f"you like, of those before), but its shape is {tuple(attention_mask.shape)}."
        )
    return same_strides(attention_mask[:, -seq:]).to(device=device, dtype=torch.bool)
