"""One graph to decode, one more to prefill in chunks, and never one per prompt length."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from .admission import admit, check_use_cache
from .chunks import run_in_chunks
from .devices import why_eager
from .experts import experts_in_place
from .few_rows import FewRowProducts
from .forward import collects_outputs
from .graph_per_shape import GraphPerShape
from .static_cache import DeepseekV4StaticCache
from .static_shapes import static_shapes


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
            ValueError: see `admit`.
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
    more graph, in chunks: the first is filled up with padding on the left, which changes nothing. Another capacity or
    another batch has graphs of its own; several threads may run through one compiled forward, each with its cache.

    Args:
        model: the model.
        prefill_chunk_size: tokens per compiled chunk of a longer input.
        min_attended_len: where given, a step attends to no more entries than `min_attended_len` tokens make, or twice
            as many, or four times, whatever holds the rows by now. A cache with much room to spare then costs little,
            at one more graph for each doubling. By default a step looks at the whole capacity, in one graph.
        torch_compile_kwargs: for `torch.compile`; `fullgraph=True` unless they say otherwise, `dynamic=False` unless
            they say True (shapes are static), and, unless they choose a `backend`, a `mode` or `options`, inductor with
            `FewRowProducts`.

    Returns:
        A function with the arguments and the result of `DeepseekV4StaticForward.forward`, less `labels`. Hidden
        states, attentions and router logits are for eager calls: one that asks for them is not compiled.

    Raises:
        ValueError: a `prefill_chunk_size` below 2 or a `min_attended_len` below 1, or a model with hooks that cannot
            be compiled: accelerate's (remove them) or those of `fully_shard`. And in every call, before anything is
            written: `labels`, `use_cache=False`, and see `admit`.

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
    if reason := why_eager(model):
        raise ValueError(f"`compile_forward` cannot compile this model. {reason}")
    settings = {"fullgraph": True} | static_shapes(torch_compile_kwargs)
    if not settings.keys() & {"backend", "mode", "options"}:
        settings["options"] = {"post_grad_custom_pre_pass": FewRowProducts()}
    compiled = partial(GraphPerShape(settings), eager)

    def forward(input_ids=None, *, cache, attention_mask=None, inputs_embeds=None, position_ids=None, **kwargs):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if kwargs.get("labels") is not None:
            raise ValueError("A compiled forward has no loss. For one call the model itself, under `torch.no_grad()`.")
        check_use_cache(kwargs.get("use_cache"))
        name, inputs = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
        chunk_size = 1 if inputs.shape[1] == 1 else prefill_chunk_size
        is_eager = chunk_size is None or collects_outputs(model.config, kwargs)
        if is_eager or not isinstance(cache, DeepseekV4StaticCache):
            masks = {"attention_mask": attention_mask, "position_ids": position_ids}
            return eager(**{name: inputs}, cache=cache, **masks, **kwargs)
        token_mask = admit(model, cache, inputs, attention_mask, position_ids)
        inputs = inputs.to(token_mask.device)
        if min_attended_len is not None:
            kwargs["attended_len"] = cache.host.attended_len(min_attended_len, cache.max_cache_len)
        with experts_in_place(model, tokens=inputs.shape[0] * chunk_size):
            return run_in_chunks(compiled, name, inputs, token_mask, chunk_size, cache=cache, **kwargs)

    return forward
