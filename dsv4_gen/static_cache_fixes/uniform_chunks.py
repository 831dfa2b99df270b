"""Fix `uniform_chunks`: a chunk's inputs differ from another's in values only."""

import functools

import torch
from einops import repeat
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer

from ..conventions import CACHE_NAME, call_shape, same_strides

# Kinds of layers whose masks are `(batch, seq)`, 0 for padding.
RECURRENT_KINDS = ("linear_attention", "conv")


def make_chunk_uniform(model: PreTrainedModel, inputs: dict, token_mask: Tensor | None) -> dict:
    """A chunk's inputs, differing from those of other chunks and of other prompts in nothing but values.

    What goes wrong: position ids are a slice of the prompt's, so their strides follow the prompt's length, and the
    compiler guards strides. Masks that hide nothing are left out, which is another keyword and another graph.
    Since: before 5.17, the oldest release that this package supports.
    Upstream report: what is left of huggingface/transformers issue 46421.
    Can go: when upstream's chunks look alike, as `needed()` finds out.

    Args:
        model: whose forward is called.
        inputs: keywords for it.
        token_mask: `(batch, columns so far)`, 0 for padding; None for no padding.

    Returns:
        The keywords.
    """
    batch, seq = call_shape(inputs)
    masks, cache = inputs.get("attention_mask"), inputs[CACHE_NAME]
    # A last chunk of one token is a decode step, whose masks upstream makes or leaves out always.
    if seq > 1 and cache.is_compileable and (masks is None or isinstance(masks, dict)):
        dtype = torch.long if token_mask is None else token_mask.dtype
        recurrent = torch.ones(batch, seq, dtype=dtype, device=model.device)
        is_left_out = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
        causal = first_chunk_mask(batch, seq, cache, model.device) if is_left_out else None
        if isinstance(masks, dict):
            full = {kind: recurrent if kind in RECURRENT_KINDS else causal for kind in masks}
            inputs["attention_mask"] = {kind: full[kind] if mask is None else mask for kind, mask in masks.items()}
        elif causal is not None:
            inputs["attention_mask"] = causal
    return {name: same_strides(value) for name, value in inputs.items()}


def first_chunk_mask(batch: int, seq: int, cache: StaticCache, device: torch.device) -> Tensor:
    """`(batch, 1, seq, positions)` bool, the mask of a first chunk without padding: the only one to be left out.

    It is over all positions of the cache. `cache.get_max_length()` does not know them where a layer is an attention and
    a recurrent layer in one.
    """
    positions = max(layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer))
    causal = torch.ones(seq, positions, dtype=torch.bool, device=device).tril()
    return repeat(causal, "seq positions -> batch 1 seq positions", batch=batch)


@functools.cache
def chunks_differ() -> bool:
    """Whether upstream prepares a first chunk unlike the first chunk of another prompt, see `make_chunk_uniform`."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).eval()
    seen = []

    def look(model, args, kwargs):
        seen.append({name: value.stride() for name, value in kwargs.items() if isinstance(value, Tensor)})

    model.register_forward_pre_hook(look, with_kwargs=True)
    for prompt_length in (4, 6):
        ids = torch.ones(1, prompt_length, dtype=torch.long)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache_implementation="static",
            max_new_tokens=1,
            max_cache_len=8,
            prefill_chunk_size=2,
            do_sample=False,
            disable_compile=True,
        )
    return any(chunk != seen[0] for chunk in seen)
