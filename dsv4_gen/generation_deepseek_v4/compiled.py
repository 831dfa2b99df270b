"""One graph to decode, one more to prefill in chunks, and never one per prompt length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from ..conventions import same_strides
from .few_rows import FewRowProducts
from .forward import reserve_call
from .static_cache import DeepseekV4StaticCache

# Outputs that upstream collects with hooks, which cannot be compiled into one graph.
EAGER_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


class DeepseekV4StaticForward(nn.Module):
    """A DeepSeek-V4 model that runs with a static cache: eager as it is, and one full graph when compiled.

    Args:
        model (`DeepseekV4ForCausalLM`): the model; nothing of it is copied.

    Example:
        >>> forward = DeepseekV4StaticForward(model)
        >>> logits = forward(input_ids=prompt, cache=DeepseekV4StaticCache(model.config, max_cache_len=512)).logits
    """

    def __init__(self, model: DeepseekV4ForCausalLM):
        super().__init__()
        if not isinstance(model, DeepseekV4ForCausalLM):
            raise TypeError(f"`DeepseekV4StaticForward` needs a DeepseekV4ForCausalLM, got a {type(model).__name__}.")
        self.model = model

    def forward(
        self, input_ids: Tensor | None = None, *, cache: DeepseekV4StaticCache, **kwargs
    ) -> MoeCausalLMOutputWithPast:
        """Run a call's tokens through the model and bring `cache` up to date.

        Args:
            input_ids: `(batch, seq)`, or `inputs_embeds`: `(batch, seq, hidden_size)` among the keywords.
            cache: the state.
            kwargs: `attention_mask`, `logits_to_keep` and whatever else the model's forward takes.

        Raises:
            TypeError: `cache` is not a `DeepseekV4StaticCache`.
            ValueError: see `DeepseekV4StaticCache.reserve`.
        """
        if not isinstance(cache, DeepseekV4StaticCache):
            raise TypeError(f"`cache` must be a DeepseekV4StaticCache, got a {type(cache).__name__}.")
        return self.model(input_ids=input_ids, cache=cache, **kwargs)


def compile_forward(
    model: DeepseekV4ForCausalLM,
    *,
    prefill_chunk_size: int | None = None,
    min_attended_len: int | None = None,
    **torch_compile_kwargs,
) -> Callable[..., MoeCausalLMOutputWithPast]:
    """Compile a model's forward with a static cache: a fixed number of graphs, whatever the prompts.

    Single tokens run through one compiled graph. Longer inputs run eagerly or, with `prefill_chunk_size`, through one
    more graph, in chunks: the first is filled up with padding on the left, which changes nothing.

    Args:
        model: the model.
        prefill_chunk_size: tokens per compiled chunk of a longer input.
        min_attended_len: where given, a step attends to no more entries than `min_attended_len` tokens make, or twice
            as many, or four times, whatever holds the rows by now. A cache with much room to spare then costs little,
            at one more graph for each doubling. By default a step looks at the whole capacity, in one graph.
        torch_compile_kwargs: for `torch.compile`; `fullgraph=True` and `dynamic=False` unless they say otherwise, and,
            unless they choose a `backend`, a `mode` or `options`, inductor with `FewRowProducts`.

    Returns:
        A function with the arguments and the result of `DeepseekV4StaticForward.forward`, less `labels`. Hidden
        states, attentions and router logits are for eager calls: one that asks for them is not compiled.

    Raises:
        ValueError: a `prefill_chunk_size` below 2 or a `min_attended_len` below 1. And in every call, before anything
            is written: see `DeepseekV4StaticCache.reserve`.

    Example:
        >>> forward = compile_forward(model, prefill_chunk_size=256)
        >>> logits = forward(input_ids=prompt, cache=cache, logits_to_keep=1).logits
        >>> logits = forward(input_ids=logits.argmax(-1), cache=cache).logits
    """
    if prefill_chunk_size is not None and prefill_chunk_size < 2:
        raise ValueError(f"`prefill_chunk_size` must be at least 2, got {prefill_chunk_size}.")
    if min_attended_len is not None and min_attended_len < 1:
        raise ValueError(f"`min_attended_len` must be at least 1, got {min_attended_len}.")
    eager = DeepseekV4StaticForward(model)
    settings = {"fullgraph": True, "dynamic": False} | torch_compile_kwargs
    if not settings.keys() & {"backend", "mode", "options"}:
        settings["options"] = {"post_grad_custom_pre_pass": FewRowProducts()}
    compiled = torch.compile(eager, **settings)

    def forward(input_ids=None, *, cache, attention_mask=None, inputs_embeds=None, position_ids=None, **kwargs):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        name, inputs = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
        wants_outputs = any(kwargs.get(output, getattr(model.config, output, False)) for output in EAGER_OUTPUTS)
        chunk_size = 1 if inputs.shape[1] == 1 else prefill_chunk_size
        if chunk_size is None or wants_outputs or not isinstance(cache, DeepseekV4StaticCache):
            masks = {"attention_mask": attention_mask, "position_ids": position_ids}
            return eager(**{name: inputs}, cache=cache, **masks, **kwargs)
        token_mask = reserve_call(model, cache, inputs, attention_mask, position_ids)
        if min_attended_len is not None:
            kwargs["attended_len"] = cache.attended_len(min_attended_len)
        with experts_in_place(model, tokens=inputs.shape[0] * chunk_size):
            return run_in_chunks(compiled, name, inputs, token_mask, chunk_size, cache=cache, **kwargs)

    return forward


@contextmanager
def experts_in_place(model: DeepseekV4ForCausalLM, tokens: int) -> Iterator[None]:
    """For a few tokens, let each read its own experts' weights, which costs less than sorting tokens by expert.

    That is upstream's `batched_mm` in place of its `grouped_mm`, as `generate` has it on accelerators.
    """
    config, grouped = model.config, model.config._experts_implementation
    few = tokens * config.num_experts_per_tok <= config.n_routed_experts
    if few and grouped == "grouped_mm":
        config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        config._experts_implementation = grouped


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
        token_mask: `(batch, seq)`, from `reserve_call`.
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
            **kwargs,
        )
        logits.append(output.logits)
        if from_last_chunk:
            del logits[:-1]
    cache.seq_length.sub_(padding)  # columns that the caller does not know of
    wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    output.logits = logits[0] if from_last_chunk else torch.cat(logits, dim=1)[:, padding:][:, wanted]
    return output


def fill_up(inputs: Tensor, token_mask: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Put `padding` columns on the left of a call that has been reserved, so that it has a size that a graph has."""
    if padding == 0:
        return inputs, token_mask
    filler = inputs[:, :1].expand(-1, padding, *inputs.shape[2:])
    return torch.cat([filler, inputs], dim=1), pad(token_mask, (padding, 0), value=False)
