"""Hooks of `generate`: with a static cache it builds, checks, prefills and compiles here, otherwise as upstream does.

Each function takes upstream's method and returns the one to put in its place (see `integration.py`).
"""

import warnings
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS, GenerationMode

from ..conventions import CACHE_NAME, CACHE_NAMES
from .admission import admit, check_room, check_rows, check_use_cache, new_token_mask
from .chunks import fill_up, run_in_chunks
from .devices import counting_device, why_eager
from .drafts import check_drafts
from .forward import collects_outputs
from .graph_per_shape import GraphPerShape
from .model_hooks import static_cache
from .static_cache import DeepseekV4StaticCache
from .static_shapes import static_shapes

# What `generate` compiles of each model, as long as there is the model.
_graphs: WeakKeyDictionary[PreTrainedModel, GraphPerShape] = WeakKeyDictionary()


def prepare_cache_hook(original: Callable) -> Callable:
    """For `_prepare_cache_for_generation`: builds the cache for "static", and checks one that the caller brings."""

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        cache, is_drafting = static_cache((), model_kwargs), generation_mode == GenerationMode.ASSISTED_GENERATION
        drafts = generation_config._drafts_per_step if is_drafting else 0
        check_settings(generation_config, cache)
        builds = generation_config.cache_implementation == "static" and generation_config.use_cache
        if builds or cache is not None:
            check_prompt_tuning(self)
        if builds:
            max_cache_len = max(max_cache_length, generation_config.max_cache_len or 0) + drafts
            cache = model_kwargs[CACHE_NAME] = new_cache(self, max_cache_len, drafts)
        else:
            original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        if is_drafting:
            check_drafts(cache, drafts, max_cache_length, model_kwargs.get("attention_mask"))

    return _prepare_cache_for_generation


def check_settings(generation_config: GenerationConfig, cache: DeepseekV4StaticCache | None) -> None:
    """Raise `ValueError` for settings of `generate` that cannot work with this model's static cache."""
    implementation, chunk_size = generation_config.cache_implementation, generation_config.prefill_chunk_size
    if cache is not None:
        check_use_cache(generation_config.use_cache)
    if cache is not None and implementation is not None:
        raise ValueError("Give `cache_implementation`, or a cache of your own, but not both.")
    if implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS and implementation != "static":
        raise ValueError(
            f"DeepSeek-V4 has no cache for `cache_implementation={implementation!r}`. Use 'static', or leave it out "
            "for a dynamic cache."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`prefill_chunk_size` must be at least 1, got {chunk_size}.")


def check_prompt_tuning(model: PreTrainedModel) -> None:
    """Raise `ValueError` if peft puts a learned prompt before the text, of which the static cache would not know."""
    preparing = getattr(model.prepare_inputs_for_generation, "__self__", None)  # peft puts its own in place meanwhile
    adapter = getattr(preparing, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"The static cache does not work with prompt tuning (peft's {type(adapter).__name__}), which puts a "
            "learned prompt before the text. Use an adapter that changes the weights, as LoRA does, or leave the cache "
            "out and generate with `use_cache=False`."
        )


def new_cache(model: PreTrainedModel, max_cache_len: int, max_rollback: int) -> DeepseekV4StaticCache:
    """The cache for `cache_implementation="static"`, never smaller than in earlier calls: they share their graphs."""
    max_cache_len = max(max_cache_len, getattr(model, "_previous_max_cache_length", 0))
    model._previous_max_cache_length = max_cache_len
    return DeepseekV4StaticCache(model.config, max_cache_len=max_cache_len, max_rollback=max_rollback)


def prefill_hook(original: Callable) -> Callable:
    """For `_prefill`: sees that the whole answer has room, and keeps all chunks to one size."""

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache = static_cache((), model_kwargs)
        if cache is None:
            return original(self, input_ids, generation_config, model_kwargs, is_first_iteration)
        # As upstream: ids as long as the mask are the whole text, of which the cache has seen a part.
        attention_mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
        whole = getattr(generation_config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
        is_whole = whole == input_ids.shape[1] or embeds is not None
        unseen = whole - cache.get_seq_length() if is_whole else None
        prompt = input_ids if embeds is None else embeds
        columns = prompt.shape[1] if unseen is None else unseen
        if columns > 0:
            check_rows(cache, len(prompt), columns)
            token_mask = new_token_mask(attention_mask, len(prompt), columns, counting_device(self, cache))
            # The last new token is not run through the model.
            check_room(cache, token_mask, new_tokens=generation_config.max_length - input_ids.shape[1] - 1)
        if generation_config.prefill_chunk_size is None:
            return original(self, input_ids, generation_config, model_kwargs, is_first_iteration)

        inputs = self.prepare_inputs_for_generation(
            input_ids, next_sequence_length=unseen, is_first_iteration=is_first_iteration, **model_kwargs
        )
        compiles = self._valid_auto_compile_criteria(model_kwargs, generation_config)
        run = self.get_compiled_call(generation_config.compile_config) if compiles else self.__call__
        name = "input_ids" if inputs.get("inputs_embeds") is None else "inputs_embeds"
        rest = {key: inputs[key] for key in inputs if key not in ("input_ids", "inputs_embeds", CACHE_NAME)}
        return run_in_chunks(
            run,
            name,
            inputs[name],
            chunk_size=generation_config.prefill_chunk_size,
            cache=cache,
            **rest,
        )

    return _prefill


def compiled_call_hook(original: Callable) -> Callable:
    """For `get_compiled_call`: a static cache means static shapes, and a graph for each that turns up."""

    def get_compiled_call(self, compile_config):
        settings = static_shapes((compile_config or self._default_compile_config()).to_dict())
        if self not in _graphs or _graphs[self].settings != settings:
            _graphs[self] = GraphPerShape(settings)
        graphs, reason = _graphs[self], why_eager(self)
        if reason is not None and compile_config is not None:
            warnings.warn(f"`generate` leaves this model uncompiled: {reason}", stacklevel=2)

        def run(*args, **kwargs):
            if static_cache(args, kwargs) is None:
                return original(self, compile_config)(*args, **kwargs)
            if reason is not None or collects_outputs(self.config, kwargs):
                return self(*args, **kwargs)
            return graphs(self, **kwargs)

        return run

    return get_compiled_call


def prepare_inputs_hook(original: Callable) -> Callable:
    """For `prepare_inputs_for_generation`: settles, outside of the graph, what the host must (`admit`)."""

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        cache = static_cache(args, kwargs)
        if cache is None:
            return original(self, input_ids, *args, **kwargs)
        next_sequence_length = kwargs.get("next_sequence_length")
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"The cache has seen {cache.get_seq_length()} columns, no fewer than the {input_ids.shape[1]} of this "
                "text: there is nothing to continue. Give the whole text so far, or `reset()` the cache for another."
            )
        # Without the cache and the mask, of which upstream would make masks that are not needed here.
        others = {name: kwargs[name] for name in kwargs if name not in (*CACHE_NAMES, "attention_mask")}
        inputs = original(self, input_ids, *args, **others) | {CACHE_NAME: cache}
        inputs.pop("position_ids", None)
        attention_mask = kwargs.get("attention_mask")
        name = "input_ids" if inputs.get("inputs_embeds") is None else "inputs_embeds"
        tokens = inputs[name]
        if attention_mask is not None and tokens.shape[1] > 1:
            tokens, attention_mask = move_padding_left(tokens, attention_mask)
        # Always a tensor of the call's own length, so that padded and unpadded prompts share one graph.
        inputs["token_mask"] = admit(self, cache, tokens, attention_mask)
        inputs[name] = tokens = tokens.to(inputs["token_mask"].device)
        drafted = tokens.shape[1] - 1
        if 0 < drafted <= cache.max_rollback and not kwargs.get("is_first_iteration"):
            # One graph verifies drafts of any length. As many logits as there are columns; the caller takes the last.
            padding = cache.max_rollback - drafted
            inputs["input_ids"], inputs["token_mask"] = fill_up(tokens, inputs["token_mask"], padding)
            cache.seq_length.sub_(padding)  # columns that `generate` does not know of
            inputs.pop("logits_to_keep", None)
        return inputs

    return prepare_inputs_for_generation


def move_padding_left(tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Padding between and after a call's tokens goes to their left.

    A second turn has it between them: the last token of the first answer, which no cache has seen yet, then padding,
    then the message. A prompt that was padded on the right has it after them. `generate` only reads the logits of the
    last column, so what stands where before that is free.
    """
    token_mask = new_token_mask(attention_mask, *tokens.shape[:2], tokens.device)
    order = token_mask.long().argsort(dim=1, stable=True)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    return tokens[rows, order], token_mask[rows, order]
