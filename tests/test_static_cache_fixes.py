"""`static_cache_fixes`: fewer graphs, the same tokens, and nobody else touched."""

import copy

import pytest
import torch
from small_models import (
    FAMILIES,
    WINDOW,
    cache_of,
    count_graphs,
    generate,
    largest_difference,
    left_padded,
    random_ids,
    small_model,
)
from tiny import random_ids as tiny_ids
from tiny import tiny_model
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from dsv4_gen.conventions import CACHE_NAME
from dsv4_gen.static_cache_fixes import apply_static_cache_fixes, integration, needed, remove_static_cache_fixes
from dsv4_gen.static_cache_fixes.sliding_window import RingLayer, WholeWindowLayer
from dsv4_gen.static_cache_fixes.uniform_chunks import chunks_differ

SLIDING = ["mistral", "gemma2", "gemma3_text", "gpt_oss"]
# Logits of these models reach 1.5, those of the two caches differ by less than 1e-6.
TOLERANCE = 2e-5


def fixed(family: str):
    return apply_static_cache_fixes(small_model(family))


# Graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_all_decode_steps_share_one_graph_whatever_the_prompt(family):
    prompts = [random_ids(1, length) for length in (3, 14, 24, 40)]
    graphs, _ = count_graphs(fixed(family), prompts, (6, 6, 4, 4), max_cache_len=48)
    assert graphs == [1, 0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_chunks_share_one_graph_and_a_shorter_last_one_adds_one(family):
    prompts = [left_padded(8, 16), left_padded(32, 24), left_padded(11, 19), left_padded(27, 20)]
    graphs, _ = count_graphs(fixed(family), prompts, (3, 3, 3, 3), max_cache_len=40, prefill_chunk_size=8)
    assert graphs == [2, 0, 1, 0]


def test_one_graph_serves_a_cache_that_is_no_longer_than_the_window():
    prompts = [random_ids(1, length) for length in (3, 5, 7)]
    graphs, _ = count_graphs(fixed("mistral"), prompts, (6, 4, 2), max_cache_len=WINDOW - 4)
    assert graphs == [1, 0, 0]


def test_a_last_chunk_of_one_token_is_a_decode_step():
    graphs, _ = count_graphs(fixed("qwen3_next"), [random_ids(1, 17)], (3,), max_cache_len=24, prefill_chunk_size=8)
    assert graphs == [2]


# Numbers


@pytest.mark.parametrize("chunk", [None, 5, 8, WINDOW, WINDOW + 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dynamic_cache(family, chunk):
    model, reference = fixed(family), small_model(family)
    for longest in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3):
        ids = left_padded(longest, longest - 5)
        kwargs = dict(max_cache_len=64, prefill_chunk_size=chunk)
        assert largest_difference(model, reference, ids, WINDOW + 2, **kwargs) < TOLERANCE


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_both_kinds_of_mask_fit_the_ring(implementation):
    model, reference = fixed("gemma3_text"), small_model("gemma3_text")
    model.set_attn_implementation(implementation)
    assert largest_difference(model, reference, left_padded(1, 20), 20, prefill_chunk_size=6) < TOLERANCE


@pytest.mark.parametrize("family", SLIDING)
def test_a_chunk_longer_than_the_window_keeps_its_last_tokens(family):
    cache = cache_of(fixed(family), random_ids(1, 3 * WINDOW), prefill_chunk_size=2 * WINDOW)
    expected = cache_of(fixed(family), random_ids(1, 3 * WINDOW), prefill_chunk_size=4)
    torch.testing.assert_close(cache.layers[0].keys, expected.layers[0].keys, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_finds_the_beams_of_the_dynamic_cache(family):
    ids = left_padded(13, 19)
    kwargs = dict(num_beams=3)
    static = generate(fixed(family), ids, 8, cache_implementation="static", prefill_chunk_size=8, **kwargs)
    assert torch.equal(static, generate(small_model(family), ids, 8, **kwargs))


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_returned_cache_continues_in_a_direct_call(with_mask):
    model, ids = fixed("gemma2"), random_ids(1, 30)
    cache = cache_of(model, ids[:, :20], new_tokens=1, max_cache_len=32)
    mask = torch.ones_like(ids) if with_mask else None
    positions = torch.arange(20, 30)[None]
    continued = model(ids[:, 20:], attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache}).logits
    expected = small_model("gemma2")(ids).logits[:, 20:]
    torch.testing.assert_close(continued, expected, rtol=0, atol=TOLERANCE)


def test_a_returned_cache_continues_in_generate():
    model, ids = fixed("gemma2"), random_ids(1, 30)
    cache = cache_of(model, ids[:, :20], new_tokens=1, max_cache_len=48)
    continued = generate(model, ids, 8, **{CACHE_NAME: cache})
    assert torch.equal(continued, generate(small_model("gemma2"), ids, 8))


def test_a_reset_cache_starts_over():
    model, ids = fixed("mistral"), random_ids(1, 20)
    cache = cache_of(model, random_ids(1, 30, seed=1), max_cache_len=40)
    cache.reset()
    logits = model(ids, **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(logits, small_model("mistral")(ids).logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_the_token_that_initializes_layers_leaves_no_trace(family):
    model = fixed(family)
    cache = model._prepare_static_cache("static", 1, 24, prefill_chunk_size=8, model_kwargs={})
    for layer in cache.layers:
        states = [*vars(layer).get("conv_states", {}).values(), *vars(layer).get("recurrent_states", {}).values()]
        for state in states or [layer.keys, layer.values, layer.cumulative_length]:
            assert not state.any()


# The ring


def test_a_token_lives_in_the_slot_of_its_position():
    ring = RingLayer(max_cache_len=20, sliding_window=4)
    for position in range(10):
        state = torch.full((1, 1, 1, 1), float(position))
        ring.update(state, state)
    assert ring.keys.flatten().tolist() == [8, 9, 6, 7]


@pytest.mark.parametrize("seq", [1, 2, 4, 7])
def test_columns_are_the_positions_of_the_keys_that_update_returns(seq):
    ring = RingLayer(max_cache_len=40, sliding_window=4)
    for start in range(0, 3 * seq, seq):
        states = torch.arange(start, start + seq, dtype=torch.float).reshape(1, 1, seq, 1)
        columns = ring.columns(seq)
        keys, _ = ring.update(states, states)
        held = columns >= 0
        assert keys.flatten()[held].tolist() == columns[held].tolist()


def test_a_cache_no_longer_than_the_window_has_no_ring():
    assert type(cache_of(fixed("mistral"), random_ids(1, 8)).layers[0]) is WholeWindowLayer


# Who is touched


def test_another_model_of_the_class_is_untouched():
    fixed("mistral")
    other = small_model("mistral")
    assert type(cache_of(other, random_ids(1, 20)).layers[0]) is StaticSlidingWindowLayer
    assert not {"forward", "_prefill", "prepare_inputs_for_generation"} & set(vars(other))


def test_removal_leaves_no_trace():
    model, before = small_model("mistral"), set(vars(small_model("mistral")))
    remove_static_cache_fixes(apply_static_cache_fixes(model))
    assert set(vars(model)) == before
    assert type(cache_of(model, random_ids(1, 20)).layers[0]) is StaticSlidingWindowLayer


def test_removal_gives_back_a_forward_of_the_model_s_own():
    model = small_model("mistral")
    model.forward = own = model.forward
    remove_static_cache_fixes(apply_static_cache_fixes(model))
    assert vars(model)["forward"] is own


def test_applying_twice_is_applying_once():
    model = fixed("mistral")
    methods = dict(model._unfixed)
    assert apply_static_cache_fixes(model) is model
    assert model._unfixed == methods


def test_removing_without_fixes_does_nothing():
    model = small_model("llama")
    assert remove_static_cache_fixes(model) is model


def test_a_deep_copy_runs_its_own_weights():
    model = fixed("mistral")
    other = copy.deepcopy(model)
    other.lm_head.weight.zero_()
    assert generate(other, random_ids(1, 8), 1, cache_implementation="static")[0, -1] == 0
    assert model.lm_head.weight.any()


def test_finding_out_what_is_needed_draws_no_random_numbers():
    chunks_differ.cache_clear()
    before = torch.get_rng_state()
    needed()
    assert torch.equal(torch.get_rng_state(), before)


# Which fixes


def test_this_transformers_needs_all_fixes():
    assert needed() == ["sliding_window", "layer_initialization", "uniform_chunks"]


def test_a_layer_that_counts_in_tensors_needs_no_fix(monkeypatch):
    monkeypatch.setattr(StaticSlidingWindowLayer, "get_seq_length", StaticLayer.get_seq_length)
    assert "sliding_window" not in needed()


@pytest.mark.parametrize(
    ("family", "fix"),
    [("mistral", "sliding_window"), ("deepseek_v3", "layer_initialization"), ("llama", "uniform_chunks")],
)
def test_a_fix_that_is_not_needed_is_not_applied(monkeypatch, family, fix):
    monkeypatch.setattr(integration, "needed", lambda: [name for name in needed() if name != fix])
    prompts = [random_ids(1, length) for length in (16, 24)]
    graphs, _ = count_graphs(fixed(family), prompts, (2, 2), max_cache_len=32, prefill_chunk_size=8)
    assert sum(graphs) > 2  # what the fix is for


def test_flash_attention_keeps_the_layers_of_upstream():
    model = fixed("mistral")
    model.config._attn_implementation = "flash_attention_2"
    cache = model._prepare_static_cache("static", 1, 24, None, {})
    assert type(cache.layers[0]) is StaticSlidingWindowLayer


def test_an_encoder_decoder_model_is_refused():
    model = small_model("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="decoder models"):
        apply_static_cache_fixes(model)


def test_deepseek_v4_takes_the_fixes_and_keeps_its_cache():
    model, ids = apply_static_cache_fixes(tiny_model()), tiny_ids(1, 40)
    kwargs = dict(cache_implementation="static", prefill_chunk_size=8)
    expected = generate(tiny_model(), ids, 6)
    assert torch.equal(generate(model, ids, 6, **kwargs), expected)
