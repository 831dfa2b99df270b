"""A call in chunks of one size, so that prompts of every length run through one graph."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from ..conventions import same_strides
from .static_cache import DeepseekV4StaticCache


def run_in_chunks(
    run: Callable[..., MoeCausalLMOutputWithPast],
    name: str,
    inputs: Tensor,
    token_mask: Tensor,
    chunk_size: int,
    *,
    cache: DeepseekV4StaticCache,
    logits_to_keep: int | Tensor = 0,
    **kwargs,
) -> MoeCausalLMOutputWithPast:
    """Run a call in chunks of one size, the first filled up with padding on the left.

    Args:
        run: the forward, compiled or not.
        name: `input_ids` or `inputs_embeds`, which `inputs` are: `(batch, seq, ...)`.
        token_mask: `(batch, seq)`, from `admit`.
        chunk_size: columns per chunk.
        cache, logits_to_keep, kwargs: as for the model's forward.

    Returns:
        The last chunk's output, with the logits of all that are wanted.
    """
    padding = -inputs.shape[1] % chunk_size
    if isinstance(logits_to_keep, int):
        logits_to_keep = min(logits_to_keep, inputs.shape[1])
    inputs, token_mask = fill_up(inputs, token_mask, padding)
    # If all logits that are wanted come from the last chunk, every chunk makes no more than that many.
    from_last_chunk = isinstance(logits_to_keep, int) and 0 < logits_to_keep < chunk_size
    logits = []
    for chunk, mask in zip(inputs.split(chunk_size, dim=1), token_mask.split(chunk_size, dim=1)):
        output = run(
            **{name: same_strides(chunk)},
            cache=cache,
            token_mask=same_strides(mask),
            logits_to_keep=logits_to_keep if from_last_chunk else 0,
            **kwargs | {"return_dict": True},
        )
        logits.append(output.logits)
        if from_last_chunk:
            del logits[:-1]
    cache.seq_length.sub_(padding)  # columns that the caller does not know of
    wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    output.logits = logits[0] if from_last_chunk else torch.cat(logits, dim=1)[:, padding:][:, wanted]
    return output


def fill_up(inputs: Tensor, token_mask: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Put `padding` columns on the left of a call that has been admitted, so that it has a size that a graph has."""
    if padding == 0:
        return inputs, token_mask
    filler = inputs[:, :1].expand(-1, padding, *inputs.shape[2:])
    return torch.cat([filler, inputs], dim=1), pad(token_mask, (padding, 0), value=False)
