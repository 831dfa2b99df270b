"""Fix `layer_initialization`: every layer is there before the first chunk of a prefill."""

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticCache

from ..conventions import CACHE_NAME


def initialize_layers(model: PreTrainedModel, cache: StaticCache, batch_size: int) -> None:
    """Initialize all layers of an empty cache, so that the first chunk finds what the next chunks find.

    What goes wrong: a layer is allocated inside the first chunk's graph, which then fits no other chunk. Upstream
    initializes attention layers ahead, except in MLA models and on several devices, and no recurrent layers.
    Since: 5.13 for these; before, no layer was initialized.
    Upstream report: huggingface/transformers issue 46421.
    Can go: when upstream initializes recurrent layers too, as `needed()` finds out, and those of MLA models.

    A token that goes through the model and is forgotten finds out every layer's shape and device, whatever the model.
    It leaves zeros, which is what each layer starts from: a recurrent layer then has a previous state, all zero.
    """
    recurrent = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if cache.is_initialized and not recurrent:
        return
    token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **{CACHE_NAME: cache})
    cache.reset()
    for layer in recurrent:
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def leaves_layers_to_the_first_chunk() -> bool:
    """Whether upstream leaves recurrent layers uninitialized ahead of a chunked prefill, see `initialize_layers`."""
    return not LinearAttentionCacheLayerMixin.supports_early_init
