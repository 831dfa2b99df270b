"""General static-cache fixes, for any decoder model of transformers.

A static cache exists so that every prefill chunk and every decode step run from a fixed graph, whatever the prompt's
length. Three things in transformers still stand in the way, and each has its fix here:

| fix | what goes wrong without it | upstream | where |
| --- | --- | --- | --- |
| `sliding_window` | sliding-window layers compile a graph for every token | issue 44609 | `RingLayer` |
| `layer_initialization` | the first chunk of a prefill has a graph of its own | issue 46421 | `initialize_layers` |
| `uniform_chunks` | chunked prefill compiles for every prompt length | issue 46421 | `make_chunk_uniform` |

`apply_static_cache_fixes(model)` changes that instance alone, and `remove_static_cache_fixes(model)` undoes it:

    apply_static_cache_fixes(model)
    model.generate(ids, cache_implementation="static", max_cache_len=4096, prefill_chunk_size=256)
"""

import functools
from collections.abc import Callable
from types import MethodType

import torch
from einops import repeat
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_masks_for_generate,
)

from .conventions import CACHE_NAME, same_strides

# By layer kind: the masks that a ring's columns are picked from, and those that are `(batch, seq)`, 0 for padding.
WINDOWED_KINDS = ("sliding_attention", "chunked_attention")
RECURRENT_KINDS = ("linear_attention", "conv")


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


def call_shape(inputs: dict) -> tuple[int, int]:
    """Batch and sequence length of a forward with these keywords."""
    embeds = inputs.get("inputs_embeds")
    return inputs["input_ids"].shape[:2] if embeds is None else embeds.shape[:2]


# Fix `sliding_window`


class RingLayer(StaticSlidingWindowLayer):
    """A static sliding-window layer as a ring: the token at position `p` lives in slot `p % window`.

    What goes wrong: upstream's layer counts its tokens in a Python int, which `update` reads. With `dynamic=False` that
    is a graph for every token until the window is full, and for every length that a chunk starts from.
    Since: before 5.17, the oldest release that this package supports.
    Upstream report: huggingface/transformers issue 44609.
    Can go: when upstream's layer counts in tensors alone, as `needed()` finds out.

    The ring reads the tensor `cumulative_length` only, and a decode step moves no token but its own. Masks stay
    upstream's, padding and windows and all: they are made over all positions of the cache, and `fit_masks_to_rings`
    picks the columns of the positions that `update` returns.

    Args:
        max_cache_len: positions that the whole cache has, more than the window.
        sliding_window: slots of the ring.
    """

    def __init__(self, max_cache_len: int, sliding_window: int):
        super().__init__(max_cache_len, sliding_window)
        self.slots, self.positions = sliding_window, max_cache_len

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store `(batch, heads, seq, head_dim)` keys and values; return those at the positions `columns(seq)`."""
        seq = key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            seen = key_states, value_states
        elif seq == 1:
            seen = self.keys, self.values
        else:
            # The chunk's first tokens see what its last ones overwrite.
            seen = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
        positions = self.cumulative_length + torch.arange(seq, device=self.device)
        kept = positions[-self.slots :] % self.slots
        self.keys.index_copy_(2, kept, key_states[:, :, -self.slots :])
        self.values.index_copy_(2, kept, value_states[:, :, -self.slots :])
        self.cumulative_length.add_(seq)
        return seen

    def columns(self, seq: int) -> Tensor:
        """`(keys,)` positions of the keys that an `update` with `seq` tokens will return, negative for none yet."""
        chunk = self.cumulative_length + torch.arange(seq, device=self.cumulative_length.device)
        if not self.is_initialized:
            return chunk
        # A single token is read from the ring it was written to; a chunk stands beside the ring as it was before.
        last = chunk[0] if seq == 1 else chunk[0] - 1
        ring = last - (last - torch.arange(self.slots, device=last.device)) % self.slots
        return ring if seq == 1 else torch.cat([ring, chunk])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and first position of the mask that `ring_mask` picks from: all positions of the cache."""
        return self.positions, 0

    def get_seq_length(self) -> int | Tensor:
        """Tokens seen so far."""
        return self.cumulative_length if self.is_initialized else 0


class WholeWindowLayer(StaticLayer):
    """A sliding-window layer of a cache that is no longer than the window: there is nothing to overwrite."""

    is_sliding = True


def replace_sliding_layers(cache: StaticCache, max_cache_len: int) -> None:
    """Put a `RingLayer` or a `WholeWindowLayer` in the place of every sliding-window layer of an empty cache."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not StaticSlidingWindowLayer:
            continue
        window = layer.max_cache_len
        fixed = RingLayer(max_cache_len, window) if window < max_cache_len else WholeWindowLayer(max_cache_len)
        if layer.is_initialized:
            fixed.lazy_initialization(layer.keys, layer.values)
        cache.layers[index] = fixed


def can_have_rings(model: PreTrainedModel) -> bool:
    """Whether a model has sliding windows, and all its masks are 4D tensors that upstream makes.

    They are not for flash and flex attention, nor for layer kinds whose masks are the model's own business.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(get_layer_types_and_kwargs(config)[0])
    return (
        not kinds.isdisjoint(WINDOWED_KINDS)
        and kinds <= set(LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING) | {"dummy"}
        and config._attn_implementation in ("sdpa", "eager")
    )


def forward_with_rings(model_class: type[PreTrainedModel]) -> Callable:
    """A forward for models of a class, with its signature, that gives rings the columns of the masks that they hold."""

    @functools.wraps(model_class.forward)
    def forward(self, *args, **kwargs):
        return self._unfixed["forward"](*args, **fit_masks_to_rings(self, args, kwargs))

    return forward


def fit_masks_to_rings(model: PreTrainedModel, args: tuple, kwargs: dict) -> dict:
    """Keywords of a forward whose masks have the columns that the cache's rings hold.

    `generate` makes all masks ahead. For those who call the model themselves, with the cache that `generate` returned,
    they are made here, since the model would make them where nobody can pick columns any more.

    This is in the graph, where picking columns costs next to nothing.
    """
    cache = kwargs.get(CACHE_NAME)
    ring = next((layer for layer in getattr(cache, "layers", []) if isinstance(layer, RingLayer)), None)
    if ring is None:
        return kwargs
    masks = kwargs.get("attention_mask")
    batch, seq = call_shape({"input_ids": args[0] if args else None} | kwargs)
    if masks is None or (isinstance(masks, Tensor) and masks.dim() == 2):
        masks = getattr(model, "create_masks_for_generate", create_masks_for_generate)(
            config=model.config,
            # Upstream reads shape, dtype and device of it only.
            inputs_embeds=torch.empty(batch, seq, 0, dtype=model.dtype, device=model.device),
            attention_mask=masks,
            position_ids=kwargs.get("position_ids"),
            **{CACHE_NAME: cache},
        )
    columns = ring.columns(seq)
    if isinstance(masks, dict):
        masks = {kind: ring_mask(mask, columns) if kind in WINDOWED_KINDS else mask for kind, mask in masks.items()}
    else:
        masks = ring_mask(masks, columns)
    return kwargs | {"attention_mask": masks}


def ring_mask(mask: Tensor, columns: Tensor) -> Tensor:
    """Pick the columns of a mask that belong to the keys a ring returns.

    Args:
        mask: `(batch, 1, seq, positions)`, bool where True is seen, or float to be added to the scores.
        columns: `(keys,)`, positions, or negative for an empty slot, which nobody sees.

    Returns:
        `(batch, 1, seq, keys)`.
    """
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    columns = columns.to(mask.device)
    return mask.index_select(-1, columns.clamp(min=0)).masked_fill(columns < 0, hidden)


def sliding_layer_counts_on_the_host() -> bool:
    """Whether upstream's sliding-window layer counts its tokens in a Python int, see `RingLayer`."""
    layer = StaticSlidingWindowLayer(max_cache_len=4, sliding_window=2)
    layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    return isinstance(layer.get_seq_length(), int)


# Fix `layer_initialization`


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


# Fix `uniform_chunks`


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
