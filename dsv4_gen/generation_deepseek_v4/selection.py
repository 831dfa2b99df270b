"""The keys that a block of queries attends to: its window, and the entries it sees or its indexer chooses."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .buffers import read, slots_of
from .cache_layers import DeepseekV4SlidingStaticLayer
from .compressor_state import CompressorState
from .positions import closed_windows, visible_in_window
from .sizes import compressed_len

# Where a prefill may choose among more entries than this many times `index_topk`, each of its queries gathers its own;
# else they share all entries and a mask, which one matrix product makes up for.
GATHER_RATIO = 4


class Queries(NamedTuple):
    """The queries of a call, or a block of them.

    Attributes:
        query: `(batch, heads, queries, head_dim)`.
        residual: `(batch, queries, q_lora_rank)`, which the indexer's queries are made from.
        hidden_states: `(batch, queries, hidden_size)`.
        cos, sin: `(batch, queries, rope_dim / 2)`.
        positions: `(batch, queries)`.
    """

    query: Tensor
    residual: Tensor
    hidden_states: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor

    def block(self, start: int, size: int) -> "Queries":
        """`size` of them from `start` on."""
        query, *others = self
        return Queries(query[:, :, start : start + size], *(other[:, start : start + size] for other in others))


class Keys(NamedTuple):
    """Some keys, which are values too, and who sees them.

    Attributes:
        kv: `(batch, keys, head_dim)`, or `(batch, queries, keys, head_dim)` where each query has its own.
        visible: `(batch, queries, keys)` bool.
    """

    kv: Tensor
    visible: Tensor


def join(keys: list[Keys]) -> Keys:
    """All of them side by side."""
    kv, visible = zip(*keys)
    return Keys(torch.cat(kv, dim=1), torch.cat(visible, dim=2))


def window_keys(
    window: Tensor, window_positions: Tensor, queries: Queries, start: int, state: DeepseekV4SlidingStaticLayer
) -> list[Keys]:
    """What `state.update` returned, less the tokens of the call that no query of the block at `start` can see."""
    size, ring, end = state.sizes.sliding_window, slots_of(state.keys), start + queries.positions.shape[1]
    parts = [slice(0, ring)]
    if window.shape[1] > ring:
        parts.append(slice(ring + max(0, start - size + 1), ring + end))
    return [
        Keys(window[:, part], visible_in_window(queries.positions, window_positions[:, part], size)) for part in parts
    ]


def entry_keys(state: CompressorState, query_positions: Tensor, attended_len: int | None = None) -> Keys:
    """All entries, of which a query sees those whose window has closed at its position.

    Args:
        attended_len: tokens that any row holds at most; the entries past them are left out. None for all.
    """
    entries = slots_of(state.entries)
    if attended_len is not None:
        entries = min(entries, compressed_len(attended_len, state.sizes.rate))
    numbers = torch.arange(entries, device=query_positions.device)
    closed = closed_windows(query_positions, state.sizes.rate)
    return Keys(state.entries[:, :entries], numbers < rearrange(closed, "b q -> b q 1"))


def choose_entries(indexer: nn.Module, candidates: Keys, queries: Queries) -> Tensor:
    """`(batch, queries, index_topk)`, the entries that score highest (paper section 2.3.1, eqs. 13 to 17).

    Args:
        indexer: upstream's `DeepseekV4Indexer`.
        candidates: the indexer's own entries, more than `index_topk`.
    """
    query = rearrange(indexer.q_b_proj(queries.residual), "b q (h d) -> b h q d", d=indexer.head_dim)
    query = rearrange(apply_rotary_pos_emb(query, queries.cos, queries.sin), "b h q d -> b q h d")
    scores = indexer.scorer(query, candidates.kv, queries.hidden_states)
    return scores.masked_fill(~candidates.visible, -torch.inf).topk(indexer.index_topk, dim=-1).indices


def gather_entries(entries: Keys, chosen: Tensor) -> Keys:
    """For each query its own entries only: `(batch, queries, topk, head_dim)` and `(batch, queries, topk)`."""
    kv = read(entries.kv, rearrange(chosen, "b q k -> b (q k)"))
    return Keys(rearrange(kv, "b (q k) d -> b q k d", k=chosen.shape[-1]), entries.visible.gather(-1, chosen))


def mask_entries(entries: Keys, chosen: Tensor) -> Keys:
    """All entries, of which each query sees those that were chosen for it."""
    return Keys(entries.kv, entries.visible & torch.zeros_like(entries.visible).scatter_(-1, chosen, True))


def select_entries(
    queries: Queries,
    state: DeepseekV4SlidingStaticLayer,
    indexer: nn.Module | None,
    attended_len: int | None,
    mask_only: bool,
) -> Keys:
    """The entries of an HCA or CSA layer for a block of queries.

    Args:
        indexer: upstream's `DeepseekV4Indexer` in a CSA layer.
        attended_len: see `entry_keys`.
        mask_only: whether all entries are wanted with a mask, never the chosen ones only.
    """
    entries = entry_keys(state.compressor, queries.positions, attended_len)
    count = entries.kv.shape[1]
    if indexer is None or count <= indexer.index_topk:
        return entries
    chosen = choose_entries(indexer, entry_keys(state.indexer, queries.positions, attended_len), queries)
    one_query = queries.positions.shape[1] == 1
    if mask_only or (not one_query and count <= GATHER_RATIO * indexer.index_topk):
        return mask_entries(entries, chosen)
    gathered = gather_entries(entries, chosen)
    return Keys(gathered.kv[:, 0], gathered.visible) if one_query else gathered
