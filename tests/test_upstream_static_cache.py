"""What transformers' static cache has since 5.13, pinned so that we notice if it breaks; our cache passes it too."""

import pytest
import torch
from small_models import WINDOW, cache_of, count_graphs, generate, left_padded, random_ids, small_model
from tiny import tiny_model
from transformers import GenerationConfig
from transformers.cache_utils import LinearAttentionLayer, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_masks_for_generate

import dsv4_gen  # noqa: F401  for `cache_implementation="static"` of DeepSeek-V4
from dsv4_gen.conventions import CACHE_NAME

MODELS = {
    "llama": lambda: small_model("llama"),
    "mistral": lambda: small_model("mistral"),
    "gpt_oss": lambda: small_model("gpt_oss"),
    "qwen3_next": lambda: small_model("qwen3_next"),
    "deepseek_v3": lambda: small_model("deepseek_v3"),
    "deepseek_v4": tiny_model,
}
INITIALIZED_AHEAD = ["llama", "mistral", "gpt_oss", "qwen3_next"]


def prepared_cache(model, prefill_chunk_size: int | None = 8, max_cache_len: int = 24):
    """The cache that `generate` makes for one row, before anything went through the model."""
    config = GenerationConfig(
        cache_implementation="static",
        use_cache=True,
        prefill_chunk_size=prefill_chunk_size,
        num_beams=1,
        num_return_sequences=1,
    )
    prepared = {}
    model._prepare_cache_for_generation(config, prepared, GenerationMode.GREEDY_SEARCH, 1, max_cache_len)
    return prepared[CACHE_NAME]


# `max_cache_len` of the generation config sizes the cache once


@pytest.mark.parametrize("name", MODELS)
def test_max_cache_len_sizes_the_cache_of_every_call_up_to_it(name):
    model = MODELS[name]()
    lengths = [cache_of(model, random_ids(1, prompt), max_cache_len=48).get_max_length() for prompt in (5, 20, 40)]
    # All layers of Mistral hold a window.
    assert lengths == [WINDOW if name == "mistral" else 48] * 3


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v3", "deepseek_v4"])
def test_calls_up_to_max_cache_len_share_the_decode_graph(name):
    prompts = [random_ids(1, length) for length in (9, 20, 33)]
    graphs, _ = count_graphs(MODELS[name](), prompts, (3, 3, 3), max_cache_len=40)
    assert graphs == [1, 0, 0]


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_never_shrinks_from_call_to_call(name):
    model = MODELS[name]()
    longer = cache_of(model, random_ids(1, 20)).get_max_length()
    assert cache_of(model, random_ids(1, 5)).get_max_length() == longer


# The cache is initialized ahead of a chunked prefill


@pytest.mark.parametrize("name", INITIALIZED_AHEAD)
def test_a_chunked_prefill_finds_the_cache_initialized(name):
    model = MODELS[name]()
    assert prepared_cache(model).is_initialized
    assert not prepared_cache(model, prefill_chunk_size=None).is_initialized


@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_tokens_of_a_prefill_in_one_go(name):
    model, ids = MODELS[name](), random_ids(1, 37)
    expected = generate(model, ids, 6, cache_implementation="static")
    assert torch.equal(generate(model, ids, 6, cache_implementation="static", prefill_chunk_size=8), expected)


def test_the_cache_of_deepseek_v4_can_be_initialized_ahead():
    model = tiny_model()
    cache = prepared_cache(model)
    cache.early_initialization(1, num_heads=1, head_dim=model.config.head_dim, dtype=model.dtype, device=model.device)
    assert cache.is_initialized


# Recurrent layers have no length, and are not initialized ahead


def test_recurrent_layers_are_left_out_of_initialization():
    cache = prepared_cache(small_model("qwen3_next"))
    recurrent = next(layer for layer in cache.layers if type(layer) is LinearAttentionLayer)
    assert not recurrent.supports_early_init
    assert recurrent.conv_states[0] is None
    assert cache.is_initialized


def test_recurrent_layers_are_left_out_of_the_maximum_length():
    cache = prepared_cache(small_model("qwen3_next"))
    assert [layer.get_max_length() for layer in cache.layers] == [-1, 24]
    assert cache.get_max_length() == 24


def test_a_left_padded_recurrent_row_is_its_unpadded_run():
    model, ids = small_model("qwen3_next"), left_padded(7, 20)
    padded = generate(model, ids, 6, cache_implementation="static")[0, -6:]
    alone = generate(model, ids[:1, 13:], 6, cache_implementation="static")[0, -6:]
    assert torch.equal(padded, alone)


# Masks of models with their own layer kinds


def test_masks_of_unknown_layer_kinds_are_left_to_the_model():
    model = small_model("mistral")
    model.config.layer_types = ["a_kind_of_its_own", "full_attention"]
    mask = torch.ones(1, 6, dtype=torch.long)
    embeds = torch.empty(1, 6, 0)
    cache = StaticCache(small_model("llama").config, max_cache_len=8)
    assert create_masks_for_generate(model.config, embeds, mask, **{CACHE_NAME: cache}) is mask


def test_deepseek_v4_generates_with_layer_kinds_of_its_own():
    model, ids = tiny_model(), random_ids(1, 37)
    assert torch.equal(generate(model, ids, 6, cache_implementation="static"), generate(model, ids, 6))


# Who is not initialized ahead


def test_no_initialization_ahead_on_several_devices():
    model = small_model("llama")
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "meta"}
    assert not prepared_cache(model).is_initialized


@pytest.mark.parametrize(("ranks", "is_initialized"), [(2, True), (3, False)])
def test_initialization_ahead_only_where_ranks_divide_the_heads(ranks, is_initialized):
    model = small_model("llama")
    model._tp_size = ranks
    cache = prepared_cache(model)
    assert cache.is_initialized == is_initialized
    if is_initialized:
        assert cache.layers[0].keys.shape[1] == model.config.num_key_value_heads // ranks


def test_no_initialization_ahead_for_mla():
    assert not prepared_cache(small_model("deepseek_v3")).is_initialized
