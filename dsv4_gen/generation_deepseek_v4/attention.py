"""Attention over several sets of keys at once, for a model with one KV head and a sink per head."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor


class Keys(NamedTuple):
    """A set of keys, which are the values too, and who sees them.

    Attributes:
        kv: `(batch, keys, head_dim)`, or `(batch, queries, keys, head_dim)` where each query has its own.
        visible: `(batch, queries, keys)` bool.
    """

    kv: Tensor
    visible: Tensor


def attend(query: Tensor, keys: list[Keys], sinks: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over all sets of keys together, with a sink: a score that takes weight and gives nothing.

    There is one KV head, so the heads are rows of one matrix product per set: K and V are never expanded to all
    heads. Scores are rounded to the query's dtype and the softmax runs in float32, as upstream does with sinks in
    float32 (`eager_attention_forward`).

    Args:
        query: `(batch, heads, queries, head_dim)`.
        keys: what the queries may see.
        sinks: `(heads,)`.
        scaling: factor of the scores.

    Returns:
        The output, `(batch, heads, queries, head_dim)`, and the weights of all keys in their order, without the
        sink's, `(batch, heads, queries, sum of keys)`.
    """
    scores = [_scores(query, kv) * scaling for kv, _ in keys]
    scores = [
        score.float().masked_fill(~rearrange(visible, "b q k -> b 1 q k"), -torch.inf)
        for score, (_, visible) in zip(scores, keys)
    ]
    sink = sinks.float()[:, None, None].expand(*query.shape[:3], 1)
    weights = torch.cat([*scores, sink], dim=-1).softmax(dim=-1)[..., :-1].to(query.dtype)
    parts = weights.split([kv.shape[-2] for kv, _ in keys], dim=-1)
    return sum(_weighted_sum(part, kv) for part, (kv, _) in zip(parts, keys)), weights


def _scores(query: Tensor, kv: Tensor) -> Tensor:
    """`(batch, heads, queries, keys)`, unscaled."""
    if kv.dim() == 4:  # each query has its own keys
        return torch.einsum("b h q d, b q k d -> b h q k", query, kv)
    rows = rearrange(query, "b h q d -> b (h q) d") @ rearrange(kv, "b k d -> b d k")
    return rearrange(rows, "b (h q) k -> b h q k", q=query.shape[2])


def _weighted_sum(weights: Tensor, kv: Tensor) -> Tensor:
    """`(batch, heads, queries, head_dim)`."""
    if kv.dim() == 4:
        return torch.einsum("b h q k, b q k d -> b h q d", weights, kv)
    rows = rearrange(weights, "b h q k -> b (h q) k") @ kv
    return rearrange(rows, "b (h q) d -> b h q d", q=weights.shape[2])
