"""From source tokens to entries: what DeepSeek-V4's compressors compute (paper sections 2.3.1 and 2.3.2).

The weights and the norms are those of the loaded model's compressor; the tokens and the entries live in a
`CompressorState` of the cache.
"""

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .compressor_state import CompressorState
from .positions import Chunk, touched_windows


def compress(compressor: nn.Module, hidden_states: Tensor, state: CompressorState, chunk: Chunk) -> None:
    """Store a call's source tokens and pool every window that they reach into, closed or still open.

    The open window's entry is a candidate: no query sees it until its window closes, and the next call pools it anew.
    So a decode step has no branch, and a chunk may start and end inside a window.

    Args:
        compressor: upstream's `DeepseekV4HCACompressor`, `DeepseekV4CSACompressor` or `DeepseekV4Indexer`, whose
            forward this is: what wraps the module (offloading, sharding, adapters) has its weights in place here.
        hidden_states: `(batch, seq, hidden_size)`, the attention's input.
        state: the `CompressorState` that is brought up to date.
        chunk: the tokens' positions.
    """
    rate, overlaps = state.sizes.rate, state.sizes.overlaps
    windows = touched_windows(chunk, rate)
    kv, gate = state.update_source(compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states), chunk)
    gate = gate + compressor.position_bias
    pooled = pool_with_overlap(kv, gate, windows) if overlaps else pool(kv, gate)

    entries = compressor.kv_norm(pooled)
    positions = windows.clamp(min=0) * rate
    cos, sin = compressor.rotary_emb(entries, position_ids=positions, layer_type=compressor.rope_layer_type)
    state.update_entries(apply_rotary_pos_emb(entries[:, None], cos, sin)[:, 0], windows)


def pool(kv: Tensor, gate: Tensor) -> Tensor:
    """One entry per window: for each channel, the average of `kv` under a softmax of `gate` (eqs. 20 to 23).

    Args:
        kv, gate: `(batch, windows, tokens, head_dim)`.

    Returns:
        `(batch, windows, head_dim)`, before norm and RoPE.
    """
    weights = gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)
    return reduce(kv * weights, "b w m d -> b w d", "sum")


def pool_with_overlap(kv: Tensor, gate: Tensor, windows: Tensor) -> Tensor:
    """One entry per window from two series: Ca of the window before and Cb of the window itself (eqs. 9 to 12).

    Args:
        kv, gate: `(batch, 1 + windows, rate, 2 * head_dim)`, Ca and Cb side by side. The first window is the one
            before `windows`: it is there for its Ca only.
        windows: `(batch, windows)`. Window 0 has none before it, so what stands there gets no weight.

    Returns:
        `(batch, windows, head_dim)`, before norm and RoPE.
    """
    (ca_kv, cb_kv), (ca_gate, cb_gate) = kv.chunk(2, dim=-1), gate.chunk(2, dim=-1)
    overlap_kv = ca_kv[:, :-1]
    overlap_gate = ca_gate[:, :-1].masked_fill(rearrange(windows == 0, "b w -> b w 1 1"), -torch.inf)
    return pool(
        torch.cat([overlap_kv, cb_kv[:, 1:]], dim=2),
        torch.cat([overlap_gate, cb_gate[:, 1:]], dim=2),
    )
