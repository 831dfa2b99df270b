"""The hooks into transformers: what `import dsv4_gen` changes, in one place.

    DeepseekV4Model.forward                                runs `model_forward`          if the cache is static
    DeepseekV4Attention.forward                            runs `attention_forward`      if its layer's state is static
    DeepseekV4ForCausalLM.prepare_inputs_for_generation    reserves room outside the graph, if the cache is static
    DeepseekV4ForCausalLM._prefill                         keeps all chunks to one size,    if the cache is static
    DeepseekV4ForCausalLM._prepare_static_cache            builds a `DeepseekV4StaticCache` for "static"
    DeepseekV4ForCausalLM.generate                         allows drafts (assisted decoding) if the cache can roll back

A call without a static cache goes to upstream's method with the arguments as they came.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

from ..conventions import CACHE_NAME, CACHE_NAMES
from .cache_layers import DeepseekV4SlidingStaticLayer
from .compiled import fill_up, run_in_chunks
from .forward import attention_forward, model_forward, reserve_call
from .static_cache import DeepseekV4StaticCache, new_token_mask

_replaced: dict[tuple[type, str], Callable | None] = {}


def register() -> None:
    """Install the hooks. Importing `dsv4_gen` does; a second time changes nothing."""
    if _replaced:
        return
    _replace(upstream.DeepseekV4Model, "forward", _model_hook)
    _replace(upstream.DeepseekV4Attention, "forward", _attention_hook)
    _replace(upstream.DeepseekV4ForCausalLM, "prepare_inputs_for_generation", _prepare_inputs_hook)
    _replace(upstream.DeepseekV4ForCausalLM, "_prefill", _prefill_hook)
    _replace(upstream.DeepseekV4ForCausalLM, "_prepare_static_cache", _static_cache_hook)
    _replace(upstream.DeepseekV4ForCausalLM, "generate", _generate_hook)


def unregister() -> None:
    """Take the hooks out: transformers is as it was. A second time changes nothing."""
    for (owner, name), own in _replaced.items():
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    _replaced.clear()


def _replace(owner: type, name: str, make_hook: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    _replaced[owner, name] = vars(owner).get(name)  # None: inherited
    setattr(owner, name, wraps(original)(make_hook(original)))


def _static_cache(args: tuple, kwargs: dict, kind: type = DeepseekV4StaticCache):
    """The static cache (or layer) that a call carries under either of its names or by position, if any."""
    candidates = (*args, *(kwargs.get(name) for name in CACHE_NAMES))
    return next((candidate for candidate in candidates if isinstance(candidate, kind)), None)


def _model_hook(original: Callable) -> Callable:
    def forward(self, *args, **kwargs):
        cache = _static_cache(args, kwargs)
        if cache is None:
            return original(self, *args, **kwargs)
        if any(argument is cache for argument in args):
            return model_forward(self, *args, **kwargs)
        others = {name: kwargs[name] for name in kwargs if name not in CACHE_NAMES}
        return model_forward(self, *args, cache=cache, **others)

    return forward


def _attention_hook(original: Callable) -> Callable:
    def forward(self, hidden_states, *args, **kwargs):
        state = _static_cache(args, kwargs, DeepseekV4SlidingStaticLayer)
        if state is None and "chunk" in kwargs:
            raise ValueError("Gradient checkpointing takes the cache away from the layers: call `model.eval()` first.")
        if state is None:
            return original(self, hidden_states, *args, **kwargs)
        output_attentions = kwargs.get("output_attentions")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        return attention_forward(
            self,
            hidden_states,
            kwargs["position_embeddings"],
            kwargs["chunk"],
            state,
            output_attentions,
            kwargs.get("attended_len"),
        )

    return forward


def _prepare_inputs_hook(original: Callable) -> Callable:
    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        cache = _static_cache(args, kwargs)
        if cache is None:
            return original(self, input_ids, *args, **kwargs)
        next_sequence_length = kwargs.get("next_sequence_length")
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"The cache has seen {cache.get_seq_length()} columns, no fewer than the {input_ids.shape[1]} of this "
                "text: there is nothing to continue. `reset()` the cache for another text."
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
            inputs[name] = tokens
        # Always a tensor of the call's own length, so that padded and unpadded prompts share one graph.
        inputs["token_mask"] = reserve_call(self, cache, tokens, attention_mask)
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
    """Padding between a call's tokens goes to their left; a row that ends with padding is left alone.

    A second turn looks so: the last token of the first answer, which no cache has seen yet, then padding, then the
    message. `generate` only reads the logits of the last column, so what stands where before that is free.
    """
    token_mask = new_token_mask(attention_mask, *tokens.shape[:2], tokens.device)
    order = (token_mask | ~token_mask[:, -1:]).long().argsort(dim=1, stable=True)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    return tokens[rows, order], token_mask[rows, order]


def _prefill_hook(original: Callable) -> Callable:
    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache = _static_cache((), model_kwargs)
        if cache is None or generation_config.prefill_chunk_size is None:
            return original(self, input_ids, generation_config, model_kwargs, is_first_iteration)
        # As upstream: ids as long as the mask are the whole text, of which the cache has seen a part.
        attention_mask = model_kwargs.get("attention_mask")
        all_columns = (
            getattr(generation_config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
        )
        whole = all_columns == input_ids.shape[1] or model_kwargs.get("inputs_embeds") is not None
        inputs = self.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=all_columns - cache.get_seq_length() if whole else None,
            is_first_iteration=is_first_iteration,
            **model_kwargs,
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
            return_dict=True,
            **rest,
        )

    return _prefill


def _generate_hook(original: Callable) -> Callable:
    def generate(self, *args, **kwargs):
        cache = _static_cache(args, kwargs)
        if cache is None or not cache.is_croppable:
            return original(self, *args, **kwargs)
        config = kwargs.get("generation_config")
        drafts = kwargs.get("prompt_lookup_num_tokens") or getattr(config, "prompt_lookup_num_tokens", None) or 0
        if drafts > cache.max_rollback:
            raise ValueError(
                f"The cache's `max_rollback` of {cache.max_rollback} is too small for "
                f"`prompt_lookup_num_tokens={drafts}`: all drafted tokens may have to be taken back."
            )
        if (drafts or kwargs.get("assistant_model") is not None) and cache.get_seq_length() > 0:
            raise ValueError(
                "Assisted decoding begins with an empty cache, since upstream hands over the whole text: `reset()` it."
            )
        # `_is_stateful` is how upstream says that a model's cache cannot go back, which refuses drafts. This one can.
        self._is_stateful = False
        try:
            return original(self, *args, **kwargs)
        finally:
            vars(self).pop("_is_stateful", None)

    return generate


def _static_cache_hook(original: Callable) -> Callable:
    def _prepare_static_cache(
        self, cache_implementation, batch_size, max_cache_len, prefill_chunk_size, model_kwargs
    ) -> DeepseekV4StaticCache:
        if cache_implementation != "static":
            raise ValueError(
                f"DeepSeek-V4 has no cache for `cache_implementation={cache_implementation!r}`. Use 'static', or leave "
                "it out for a dynamic cache."
            )
        # Never smaller than in earlier calls, so that they share their graphs.
        max_cache_len = max(max_cache_len, getattr(self, "_previous_max_cache_length", 0))
        self._previous_max_cache_length = max_cache_len
        cache = DeepseekV4StaticCache(self.config, max_cache_len=max_cache_len)
        shape = self._get_static_cache_init_shape() if prefill_chunk_size is not None else None
        if shape is not None:  # as upstream: ahead of a prefill that may be compiled, on a single device
            cache.early_initialization(batch_size, *shape, self.dtype, self.device)
        return cache

    return _prepare_static_cache
