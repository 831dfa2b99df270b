"""Hooks of the model's forward: a call that carries static state runs here, every other one as upstream wrote it.

Each function takes upstream's method and returns the one to put in its place (see `integration.py`).
"""

from collections.abc import Callable

import torch

from ..conventions import CACHE_NAMES
from .cache_layers import DeepseekV4SlidingStaticLayer
from .compression import compress
from .devices import device_of
from .experts import experts_forward
from .forward import attention_forward, model_forward
from .static_cache import DeepseekV4StaticCache


def static_cache(args: tuple, kwargs: dict, kind: type = DeepseekV4StaticCache):
    """The static cache (or layer) that a call carries under either of its names or by position, if any."""
    candidates = (*args, *(kwargs.get(name) for name in CACHE_NAMES))
    return next((candidate for candidate in candidates if isinstance(candidate, kind)), None)


def causal_lm_hook(original: Callable) -> Callable:
    """For `DeepseekV4ForCausalLM.forward`: nothing records gradients, and the head may stand on a device of its own."""

    def forward(self, *args, **kwargs):
        if static_cache(args, kwargs) is None:
            return original(self, *args, **kwargs)
        if kwargs.get("labels") is not None and torch.is_grad_enabled():
            raise ValueError(
                "Gradients do not flow through a static cache. For training call the model without a cache "
                "(`use_cache=False`); for the loss alone call it under `torch.no_grad()`."
            )
        with torch.no_grad():
            return original(self, *args, output_device=device_of(self.lm_head, self), **kwargs)

    return forward


def model_hook(original: Callable) -> Callable:
    """For `DeepseekV4Model.forward`."""

    def forward(self, *args, **kwargs):
        cache = static_cache(args, kwargs)
        if cache is None:
            return original(self, *args, **kwargs)
        if any(argument is cache for argument in args):
            return model_forward(self, *args, **kwargs)
        others = {name: kwargs[name] for name in kwargs if name not in CACHE_NAMES}
        return model_forward(self, *args, cache=cache, **others)

    return forward


def attention_hook(original: Callable) -> Callable:
    """For `DeepseekV4Attention.forward`."""

    def forward(self, hidden_states, *args, **kwargs):
        state = static_cache(args, kwargs, DeepseekV4SlidingStaticLayer)
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


def compressor_hook(original: Callable) -> Callable:
    """For the forward of `DeepseekV4HCACompressor`, `DeepseekV4CSACompressor` and `DeepseekV4Indexer`."""

    def forward(self, hidden_states, *args, **kwargs):
        if "state" not in kwargs:
            return original(self, hidden_states, *args, **kwargs)
        return compress(self, hidden_states, **kwargs)

    return forward


def experts_hook(original: Callable) -> Callable:
    """For `DeepseekV4Experts.forward`."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return experts_forward(self, original, hidden_states, top_k_index, top_k_weights)

    return forward
