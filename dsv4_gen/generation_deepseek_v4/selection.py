"""The keys that a block of queries attends to: its window, and the entries it sees or its indexer chooses."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .cache_layers import CompressorState, read
from .positions import closed_windows, visible_in_window


class Keys(NamedTuple):
    """Some keys, which are values too, and who sees them.

    Attributes:
        kv: `(batch, keys, head_dim)`.
        visible: `(batch, queries, keys)` bool.
    """

    kv: Tensor
    visible: Tensor


def join(keys: list[Keys]) -> Keys:
    """All of them side by side."""
    kv, visible = zip(*keys)
    return Keys(torch.cat(kv, dim=1), torch.cat(visible, dim=2))


def window_keys(kv: Tensor, key_positions: Tensor, query_positions: Tensor, sliding_window: int) -> Keys:
    """The sliding window's keys, `kv`: `(batch, keys, head_dim)` at `key_positions`: `(batch, keys)`."""
    return Keys(kv, visible_in_window(query_positions, key_positions, sliding_window))


def entry_keys(state: CompressorState, query_positions: Tensor) -> Keys:
    """All entries, of which a query sees those whose window has closed at its position."""
    numbers = torch.arange(state.max_compressed_len, device=query_positions.device)
    closed = closed_windows(query_positions, state.rate)
    return Keys(state.entries[:, :-1], numbers < rearrange(closed, "b q -> b q 1"))


def chosen_entry_keys(
    state: CompressorState,
    indexer_state: CompressorState,
    indexer: nn.Module,
    query_residual: Tensor,
    hidden_states: Tensor,
    rotary: tuple[Tensor, Tensor],
    query_positions: Tensor,
    gather: bool,
) -> Keys:
    """The `index_topk` entries that the indexer scores highest for each query (paper section 2.3.1, eqs. 13 to 17).

    Args:
        state: the entries that are attended to.
        indexer_state: the entries that are scored.
        indexer: upstream's `DeepseekV4Indexer`.
        query_residual: `(batch, queries, q_lora_rank)`.
        hidden_states: `(batch, queries, hidden_size)`.
        rotary: cos and sin at the queries, `(batch, queries, rope_dim / 2)` each.
        query_positions: `(batch, queries)`.
        gather: whether to hand out the chosen entries only (one query per row), or all, with a mask.
    """
    query = rearrange(indexer.q_b_proj(query_residual), "b q (h d) -> b h q d", d=indexer.head_dim)
    query = rearrange(apply_rotary_pos_emb(query, *rotary), "b h q d -> b q h d")
    candidates, visible = entry_keys(indexer_state, query_positions)
    scores = indexer.scorer(query, candidates, hidden_states).masked_fill(~visible, -torch.inf)
    chosen = scores.topk(indexer.index_topk, dim=-1).indices
    if gather:
        return Keys(read(state.entries, chosen[:, 0]), visible.gather(-1, chosen))
    return Keys(state.entries[:, :-1], visible & torch.zeros_like(visible).scatter_(-1, chosen, True))
