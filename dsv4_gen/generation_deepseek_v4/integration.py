"""The hooks into transformers: what `import dsv4_gen` changes, in one place.

    DeepseekV4Model.forward                                runs `model_forward`          if the cache is static
    DeepseekV4Attention.forward                            runs `attention_forward`      if its layer's state is static
    DeepseekV4ForCausalLM.prepare_inputs_for_generation    reserves room outside the graph, if the cache is static
    DeepseekV4ForCausalLM._prepare_static_cache            builds a `DeepseekV4StaticCache` for "static"

A call without a static cache goes to upstream's method with the arguments as they came.
"""

from collections.abc import Callable
from functools import wraps

from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

from .cache_layers import DeepseekV4SlidingStaticLayer
from .forward import attention_forward, model_forward, reserve_call
from .static_cache import DeepseekV4StaticCache

_replaced: dict[tuple[type, str], Callable | None] = {}


def register() -> None:
    """Install the hooks. Importing `dsv4_gen` does; a second time changes nothing."""
    if _replaced:
        return
    _replace(upstream.DeepseekV4Model, "forward", _model_hook)
    _replace(upstream.DeepseekV4Attention, "forward", _attention_hook)
    _replace(upstream.DeepseekV4ForCausalLM, "prepare_inputs_for_generation", _prepare_inputs_hook)
    _replace(upstream.DeepseekV4ForCausalLM, "_prepare_static_cache", _static_cache_hook)


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
    candidates = (*args, kwargs.get("cache"), kwargs.get("past_key_values"))
    return next((candidate for candidate in candidates if isinstance(candidate, kind)), None)


def _model_hook(original: Callable) -> Callable:
    def forward(self, *args, **kwargs):
        cache = _static_cache(args, kwargs)
        if cache is None:
            return original(self, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("cache", "past_key_values")}
        return model_forward(self, *args, cache=cache, **kwargs)

    return forward


def _attention_hook(original: Callable) -> Callable:
    def forward(self, hidden_states, *args, **kwargs):
        state = _static_cache(args, kwargs, DeepseekV4SlidingStaticLayer)
        if state is None:
            return original(self, hidden_states, *args, **kwargs)
        output_attentions = kwargs.get("output_attentions")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        return attention_forward(
            self, hidden_states, kwargs["position_embeddings"], kwargs["chunk"], state, output_attentions
        )

    return forward


def _prepare_inputs_hook(original: Callable) -> Callable:
    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        cache = _static_cache(args, kwargs)
        if cache is None:
            return original(self, input_ids, *args, **kwargs)
        attention_mask = kwargs.pop("attention_mask", None)
        inputs = original(self, input_ids, *args, **kwargs)
        for name in ("attention_mask", "position_ids"):
            inputs.pop(name, None)
        tokens = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        # Always a tensor of the call's own length, so that padded and unpadded prompts share one graph.
        return inputs | {"token_mask": reserve_call(self, cache, tokens, attention_mask)}

    return prepare_inputs_for_generation


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
        return DeepseekV4StaticCache(self.config, max_cache_len=max_cache_len)

    return _prepare_static_cache
