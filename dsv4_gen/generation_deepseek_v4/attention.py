"""Attention for a model with one KV head, whose values are its keys, and with a sink per head."""

import torch
from einops import rearrange
from torch import Tensor


def attend(
    query: Tensor,
    kv: Tensor,
    visible: Tensor,
    sinks: Tensor,
    scaling: float,
    own_kv: Tensor | None = None,
    own_visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with a sink: a score that takes weight and gives nothing.

    There is one KV head, so the heads are rows of one matrix product: K and V are never expanded to all heads. Scores
    are rounded to the query's dtype, the softmax runs in float32 and its weights are rounded, as upstream does with
    its sinks in float32 (`eager_attention_forward`).

    Args:
        query: `(batch, heads, queries, head_dim)`.
        kv: `(batch, keys, head_dim)`, keys and values in one.
        visible: `(batch, queries, keys)` bool, who sees whom.
        sinks: `(heads,)`.
        scaling: factor of the scores.
        own_kv, own_visible: `(batch, queries, own, head_dim)` and `(batch, queries, own)`, further keys that every
            query has for itself.

    Returns:
        The output, `(batch, heads, queries, head_dim)`, and the keys' weights, `(batch, heads, queries, keys + own)`.
    """
    rows = rearrange(query, "b h q d -> b (h q) d") @ rearrange(kv, "b k d -> b d k")
    scores = rearrange(rows, "b (h q) k -> b h q k", q=query.shape[2])
    if own_kv is not None:
        own_scores = rearrange(query, "b h q d -> b q h d") @ rearrange(own_kv, "b q k d -> b q d k")
        scores = torch.cat([scores, rearrange(own_scores, "b q h k -> b h q k")], dim=-1)
        visible = torch.cat([visible, own_visible], dim=-1)
    scores = (scores * scaling).float().masked_fill(~rearrange(visible, "b q k -> b 1 q k"), -torch.inf)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].to(query.dtype)

    output = rearrange(weights[..., : kv.shape[1]], "b h q k -> b (h q) k") @ kv
    output = rearrange(output, "b (h q) d -> b h q d", q=query.shape[2])
    if own_kv is not None:
        own_output = rearrange(weights[..., kv.shape[1] :], "b h q k -> b q h k") @ own_kv
        output = output + rearrange(own_output, "b q h d -> b h q d")
    return output, weights
