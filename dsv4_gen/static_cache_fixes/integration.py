"""Which fixes a model gets, and the methods that bring them in: `generate` calls these on the model."""

from types import MethodType

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from .layer_initialization import initialize_layers, leaves_layers_to_the_first_chunk
from .sliding_window import (
    can_have_rings,
    forward_with_rings,
    replace_sliding_layers,
    sliding_layer_counts_on_the_host,
)
from .uniform_chunks import chunks_differ, make_chunk_uniform


def apply_static_cache_fixes(model: PreTrainedModel) -> PreTrainedModel:
    """Give one model the fixes that the installed transformers needs. Does nothing the second time.

    Args:
        model: any decoder model. Others, of the same class too, stay as they are.

    Returns:
        The model. It can be copied, compiled and saved as before; take the fixes out before pickling it whole.

    Raises:
        ValueError: an encoder-decoder model.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"The static-cache fixes are for decoder models, but `{type(model).__name__}` has an encoder too. Use it "
            "as it is."
        )
    if "_static_cache_fixes" in vars(model):
        return model
    model._static_cache_fixes = needed()
    model._prefills_in_chunks = False
    methods = [_prepare_static_cache, _prefill, prepare_inputs_for_generation]
    if "sliding_window" in model._static_cache_fixes and can_have_rings(model):
        methods.append(forward_with_rings(type(model)))
    names = [method.__name__ for method in methods]
    # Methods are kept bound to the model, so that those of a deep copy are bound to the copy.
    model._own_methods = {name: vars(model)[name] for name in names if name in vars(model)}
    model._unfixed = {name: getattr(model, name) for name in names}
    for method in methods:
        setattr(model, method.__name__, MethodType(method, model))
    return model


def remove_static_cache_fixes(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `apply_static_cache_fixes`, and return the model. Does nothing to a model without fixes.

    A cache that `generate` returned meanwhile has rings, which the model no longer understands: let it go.
    """
    if "_static_cache_fixes" not in vars(model):
        return model
    for name in model._unfixed:
        delattr(model, name)
    for name, method in model._own_methods.items():
        setattr(model, name, method)
    del model._static_cache_fixes, model._prefills_in_chunks, model._unfixed, model._own_methods
    return model


def needed() -> list[str]:
    """Names of the fixes that the installed transformers needs, each found out by trying, not by version."""
    probes = {
        "sliding_window": sliding_layer_counts_on_the_host,
        "layer_initialization": leaves_layers_to_the_first_chunk,
        "uniform_chunks": chunks_differ,
    }
    return [name for name, is_needed in probes.items() if is_needed()]


# What `generate` calls on a model: upstream's own, with the fixes around it.


def _prepare_static_cache(
    self,
    cache_implementation: str,
    batch_size: int,
    max_cache_len: int,
    prefill_chunk_size: int | None,
    model_kwargs: dict,
) -> Cache:
    """The cache that upstream builds for `generate`, with rings, and ready for a chunked prefill."""
    cache = self._unfixed["_prepare_static_cache"](
        cache_implementation=cache_implementation,
        batch_size=batch_size,
        max_cache_len=max_cache_len,
        prefill_chunk_size=prefill_chunk_size,
        model_kwargs=model_kwargs,
    )
    if type(cache) is not StaticCache:
        return cache
    if "forward" in self._unfixed and can_have_rings(self):
        # Upstream remembers how long the cache became, which is the longest that was ever asked for.
        replace_sliding_layers(cache, self._previous_max_cache_length)
    if "layer_initialization" in self._static_cache_fixes and prefill_chunk_size is not None:
        initialize_layers(self, cache, batch_size)
    return cache


def _prefill(self, input_ids: Tensor, generation_config: GenerationConfig, *args, **kwargs):
    """Upstream's prefill, telling `prepare_inputs_for_generation` whether it is for chunks, which are compiled."""
    self._prefills_in_chunks = generation_config.prefill_chunk_size is not None
    try:
        return self._unfixed["_prefill"](input_ids, generation_config, *args, **kwargs)
    finally:
        self._prefills_in_chunks = False


def prepare_inputs_for_generation(self, *args, **kwargs) -> dict:
    """Keywords for the model's forward as upstream prepares them, those of chunks made uniform."""
    inputs = self._unfixed["prepare_inputs_for_generation"](*args, **kwargs)
    if self._prefills_in_chunks and "uniform_chunks" in self._static_cache_fixes:
        inputs = make_chunk_uniform(self, inputs, token_mask=kwargs.get("attention_mask"))
    return inputs
