"""The forward with a static cache: upstream's model, weights and submodules, with the state addressed by position.

Only two pieces differ from upstream: the loop over the layers, which places the call's tokens and hands each layer its
own state, and the attention, which reads and writes that state.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb
from transformers.utils.output_capturing import capture_outputs

from ..conventions import CACHE_NAME
from .admission import admit, check_use_cache
from .attention import attend
from .cache_layers import DeepseekV4SlidingStaticLayer
from .devices import device_of, to_device
from .positions import Chunk, place
from .region import region_kinds, run_layer
from .selection import Queries, join, select_entries, window_keys
from .static_cache import DeepseekV4StaticCache
from .static_shapes import fix_shapes

# Queries of a prefill that attend together: bounds the memory of scores and masks, which grows with the product of
# queries and keys.
QUERY_BLOCK = 128

# Outputs that upstream collects with hooks, which cannot be compiled into one graph.
COLLECTED_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def collects_outputs(config: DeepseekV4Config, kwargs: dict) -> bool:
    """Whether a call with these keywords wants outputs that upstream's hooks collect."""
    asked = (kwargs.get(name) for name in COLLECTED_OUTPUTS)
    defaults = (getattr(config, name, False) for name in COLLECTED_OUTPUTS)
    return any(default if wanted is None else wanted for wanted, default in zip(asked, defaults))


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
    output_device: torch.device | None = None,
    **kwargs,
) -> MoeModelOutputWithPast:
    """`DeepseekV4Model.forward` with a static cache.

    Args:
        model: upstream's `DeepseekV4Model`.
        input_ids: `(batch, seq)`, or `inputs_embeds`: `(batch, seq, hidden_size)`.
        attention_mask: see `admit`.
        position_ids: not needed, since rows count their own tokens; checked where given.
        cache: the state, which is brought up to date.
        use_cache: not False.
        token_mask: what `admit` returned, where the caller has asked already (`generate` and `compile_forward` do,
            outside of the graph); then no mask is needed.
        output_device: where the hidden states are wanted, that of the head. Defaults to where they end up.
        kwargs: what upstream's decoder layers take.

    Raises:
        ValueError: neither or both of `input_ids` and `inputs_embeds`, `use_cache=False`, and what `admit` raises.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
    check_use_cache(use_cache)
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    fix_shapes(cache, inputs)
    if token_mask is None:
        token_mask = admit(model, cache, inputs, attention_mask, position_ids)
    input_ids, inputs_embeds, token_mask = to_device((input_ids, inputs_embeds, token_mask), cache.lengths.device)
    if inputs_embeds is None:
        inputs_embeds = model.embed_tokens(input_ids)
    chunk = place(cache.lengths, token_mask, cache.max_cache_len)

    position_ids = chunk.positions.clamp(min=0)  # padding is rotated like a first token; nobody sees it
    position_embeddings = {
        rope: model.rotary_emb(inputs_embeds, position_ids=position_ids, layer_type=rope)
        for rope in ("main", "compress")
    }
    position_embeddings = to_device(position_embeddings, inputs_embeds.device)
    hidden_states = repeat(inputs_embeds, "b s d -> b s streams d", streams=model.config.hc_mult).contiguous()
    of_all_layers = {
        "input_ids": input_ids,
        "position_embeddings": position_embeddings,
        "position_ids": position_ids,
        "chunk": chunk,
    }
    cache.host.unfinished = True
    kinds = region_kinds(model.layers, wanted=not collects_outputs(model.config, kwargs))
    for layer, state, kind in zip(model.layers, cache.layers, kinds):
        if hidden_states.device != state.keys.device:  # the state is where the layer runs
            hidden_states, of_all_layers = to_device((hidden_states, of_all_layers), state.keys.device)
        hidden_states = run_layer(
            layer,
            hidden_states,
            kind,
            attention_mask=None,
            **of_all_layers,
            **{CACHE_NAME: state},
            **kwargs,
        )
    cache.advance(token_mask)
    cache.host.unfinished = False
    for module in (model.hc_head, model.norm):
        hidden_states = module(hidden_states.to(device_of(module)))
    hidden_states = hidden_states.to(output_device or hidden_states.device)
    return MoeModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE_NAME: cache})


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
    kv = attention.kv_norm(attention.kv_proj(hidden_states))
    kv = rearrange(apply_rotary_pos_emb(rearrange(kv, "b s d -> b 1 s d"), cos, sin), "b 1 s d -> b s d")

    window, window_positions = state.update(kv, chunk=chunk)
    if state.compressor is not None:
        attention.compressor(hidden_states, state=state.compressor, chunk=chunk)
    if state.indexer is not None:
        attention.compressor.indexer(hidden_states, state=state.indexer, chunk=chunk)

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
