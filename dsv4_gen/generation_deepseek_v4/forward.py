"""The forward with a static cache: upstream's model, weights and submodules, with the state addressed by position.

Only two pieces differ from upstream: the loop over the layers, which places the call's tokens and hands each layer its
own state, and the attention, which reads and writes that state.
"""

import torch
from einops import rearrange, repeat
from packaging.version import Version
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb
from transformers.utils.output_capturing import capture_outputs

from ..conventions import CACHE_NAME
from .attention import attend
from .cache_layers import DeepseekV4SlidingStaticLayer
from .compression import compress
from .positions import Chunk
from .selection import Queries, join, select_entries, window_keys
from .static_cache import DeepseekV4StaticCache

# Queries of a prefill that attend together: bounds the memory of scores and masks, which grows with the product of
# queries and keys.
QUERY_BLOCK = 128


def run_layer(layer: nn.Module, hidden_states: Tensor, **kwargs) -> Tensor:
    """One of upstream's `DeepseekV4DecoderLayer`s, with its own state among `kwargs`.

    A region of its own to the compiler, which therefore traces and compiles each kind of layer once, however many there
    are. A region may not change its inputs before torch 2.13; there the layers are compiled one by one.
    """
    return layer(hidden_states, **kwargs)


if Version(torch.__version__) >= Version("2.13"):
    # More kinds than any model has, each on many devices: torch raises where there are more.
    run_layer = torch.compiler.nested_compile_region(run_layer, max_reuse_entries=256)


@torch.no_grad()  # the state is changed in place, through which nothing can be differentiated
@capture_outputs
def model_forward(
    model: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: DeepseekV4StaticCache | None = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    token_mask: Tensor | None = None,
    **kwargs,
) -> MoeModelOutputWithPast:
    """`DeepseekV4Model.forward` with a static cache.

    Args:
        model: upstream's `DeepseekV4Model`.
        input_ids: `(batch, seq)`, or `inputs_embeds`: `(batch, seq, hidden_size)`.
        attention_mask: see `DeepseekV4StaticCache.reserve`.
        position_ids: not needed, since rows count their own tokens; checked where given.
        cache: the state, which is brought up to date.
        token_mask: what `cache.reserve` returned, where the caller has reserved already (`generate` and
            `compile_forward` do, outside of the graph); then no mask is needed.
        kwargs: what upstream's decoder layers take.

    Raises:
        ValueError: neither or both of `input_ids` and `inputs_embeds`, and what `reserve_call` raises.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
    if input_ids is None and "hash_moe" in model.config.mlp_layer_types:
        raise ValueError("This model routes tokens by their ids (`hash_moe`): give `input_ids`, not `inputs_embeds`.")
    if inputs_embeds is None:
        inputs_embeds = model.embed_tokens(input_ids)
    if token_mask is None:
        token_mask = reserve_call(model, cache, inputs_embeds, attention_mask, position_ids)
    chunk = cache.place(token_mask)

    position_ids = chunk.positions.clamp(min=0)  # padding is rotated like a first token; nobody sees it
    position_embeddings = {
        rope: model.rotary_emb(inputs_embeds, position_ids=position_ids, layer_type=rope)
        for rope in ("main", "compress")
    }
    hidden_states = repeat(inputs_embeds, "b s d -> b s streams d", streams=model.config.hc_mult).contiguous()
    cache.unfinished = True
    for layer, state in zip(model.layers, cache.layers):
        hidden_states = run_layer(
            layer,
            hidden_states,
            input_ids=input_ids,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            attention_mask=None,
            chunk=chunk,
            **{CACHE_NAME: state},
            **kwargs,
        )
    cache.advance(token_mask)
    return MoeModelOutputWithPast(last_hidden_state=model.norm(model.hc_head(hidden_states)), **{CACHE_NAME: cache})


def reserve_call(
    model: nn.Module,
    cache: DeepseekV4StaticCache,
    inputs: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Everything about a call that the host must settle before the graph runs: is it valid, and is there room?

    Args:
        model: upstream's `DeepseekV4ForCausalLM` or `DeepseekV4Model`.
        inputs: `(batch, seq, ...)`, ids or embeddings.
        attention_mask, position_ids: see `DeepseekV4StaticCache.reserve`.

    Returns:
        The mask of the call's own tokens, `(batch, seq)` bool.

    Raises:
        ValueError: a cache from another config, or what `reserve` raises.
    """
    (batch_size, seq), device = inputs.shape[:2], inputs.device
    cache.check_model(model.config, model.dtype)
    if torch.compiler.is_compiling():
        token_mask = cache.reserve_unseen(batch_size, seq, device, attention_mask)
    else:
        token_mask = cache.reserve(batch_size, seq, device, attention_mask, position_ids)
    if not cache.is_initialized and {parameter.device for parameter in model.parameters()} == {device}:
        # Ahead of the layers' regions. On several devices each layer allocates where its first keys turn up.
        cache.early_initialization(batch_size, 1, model.config.head_dim, model.dtype, device)
    return token_mask


def attention_forward(
    attention: nn.Module,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    chunk: Chunk,
    state: DeepseekV4SlidingStaticLayer,
    output_attentions: bool,
    attended_len: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`DeepseekV4Attention.forward` with the state of a static cache.

    Args:
        attention: upstream's `DeepseekV4Attention`.
        hidden_states: `(batch, seq, hidden_size)`.
        position_embeddings: cos and sin, `(batch, seq, rope_dim / 2)` each, by rope type.
        chunk: the tokens' positions.
        state: this layer's state, which is brought up to date.
        output_attentions: whether the weights are wanted.
        attended_len: tokens that any row holds at most, for which fewer entries are attended to; None for all.

    Returns:
        `(batch, seq, hidden_size)`, and the weights, `(batch, heads, seq, keys)`, or None. The keys are the ring's
        slots, then, if the call has more than one token, the call's tokens, then the entries by number; what a query
        does not see has weight 0.
    """
    cos, sin = position_embeddings[attention.rope_layer_type]
    query_residual = attention.q_a_norm(attention.q_a_proj(hidden_states))
    query = rearrange(attention.q_b_proj(query_residual), "b s (h d) -> b h s d", d=attention.head_dim)
    query = apply_rotary_pos_emb(attention.q_b_norm(query), cos, sin)
    kv = rearrange(attention.kv_norm(attention.kv_proj(hidden_states)), "b s d -> b 1 s d")
    kv = apply_rotary_pos_emb(kv, cos, sin)

    window, window_positions = state.update(kv, kv, chunk)
    if state.compressor is not None:
        compress(attention.compressor, hidden_states, state.compressor, chunk)
    if state.indexer is not None:
        compress(attention.compressor.indexer, hidden_states, state.indexer, chunk)

    queries = Queries(query, query_residual, hidden_states, cos, sin, chunk.positions)
    indexer = attention.compressor.indexer if state.indexer is not None else None
    outputs, weights = [], []
    # The weights of all queries stand beside each other, so they must be over the same keys: one block.
    block_size = query.shape[2] if output_attentions else QUERY_BLOCK
    for start in range(0, query.shape[2], block_size):
        block = queries.block(start, block_size)
        shared, own = window_keys(window, window_positions, block, start, state), ()
        if state.compressor is not None:
            entries = select_entries(block, state, indexer, attended_len, mask_only=output_attentions)
            if entries.kv.dim() == 4:
                own = entries
            else:
                shared.append(entries)
        output, weight = attend(block.query, *join(shared), attention.sinks, attention.scaling, *own)
        outputs.append(output)
        weights.append(weight)

    # Values carry RoPE, since they are keys; the rotation back at the query leaves the distance between the two.
    output = apply_rotary_pos_emb(torch.cat(outputs, dim=2), cos, -sin)
    groups = rearrange(output, "b (g h) s d -> b s g (h d)", g=attention.config.o_groups)
    output = attention.o_b_proj(rearrange(attention.o_a_proj(groups), "b s g r -> b s (g r)"))
    return output, weights[0] if output_attentions else None
