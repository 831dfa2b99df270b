"""The hooks into transformers: what they bring, and that they leave everything else alone."""

import pytest
import torch
from test_exact import dynamic_logits
from tiny import CSA, HCA, SLIDING, random_ids, tiny_model
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

import dsv4_gen
from dsv4_gen import DeepseekV4StaticCache, DeepseekV4StaticForward
from dsv4_gen.conventions import CACHE_NAME

MODEL = tiny_model()
HOOKED = [
    (upstream.DeepseekV4Model, "forward"),
    (upstream.DeepseekV4Attention, "forward"),
    (upstream.DeepseekV4ForCausalLM, "prepare_inputs_for_generation"),
    (upstream.DeepseekV4ForCausalLM, "_prefill"),
    (upstream.DeepseekV4ForCausalLM, "_prepare_static_cache"),
    (upstream.DeepseekV4ForCausalLM, "generate"),
]


def static(ids, **arguments):
    return MODEL(ids, cache=DeepseekV4StaticCache(MODEL.config, max_cache_len=64), **arguments)


@pytest.fixture
def restored():
    yield
    dsv4_gen.register()


def test_unregister_leaves_transformers_as_it_was_and_both_ways_are_idempotent(restored):
    hooked = [getattr(owner, name) for owner, name in HOOKED]
    dsv4_gen.register()
    assert [getattr(owner, name) for owner, name in HOOKED] == hooked
    for _ in range(2):
        dsv4_gen.unregister()
    own = [getattr(owner, name) for owner, name in HOOKED]
    assert not any(function.__module__.startswith("dsv4_gen") or function in hooked for function in own)
    assert "_prepare_static_cache" not in vars(upstream.DeepseekV4ForCausalLM)  # inherited again


def test_without_the_hooks_a_static_cache_says_what_to_do(restored):
    dsv4_gen.unregister()
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=8)
    with pytest.raises(RuntimeError, match=r"Call `dsv4_gen\.register\(\)`"):
        MODEL(random_ids(1, 3), **{CACHE_NAME: cache})


def test_calls_without_a_static_cache_are_upstreams_bit_for_bit(restored):
    ids, settings = random_ids(2, 40), {"max_new_tokens": 8, "do_sample": False}

    def results():
        dynamic = {CACHE_NAME: DynamicCache(config=MODEL.config)}
        return MODEL(ids).logits, MODEL.generate(ids, **settings), MODEL(ids, **dynamic).logits

    with_hooks = results()
    dsv4_gen.unregister()
    without = results()
    assert all(torch.equal(ours, upstreams) for ours, upstreams in zip(with_hooks, without))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_either_name_and_is_returned_under_upstreams(name):
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=64)
    assert MODEL(random_ids(1, 5), **{name: cache})[CACHE_NAME] is cache
    assert cache.get_seq_length() == 5


def test_hidden_states_router_logits_and_logits_to_keep_are_those_of_the_dynamic_cache():
    ids = random_ids(2, 40)
    asked = {"output_hidden_states": True, "output_router_logits": True, "logits_to_keep": 3}
    ours, upstreams = static(ids, **asked), MODEL(ids, **asked)
    for name in ("hidden_states", "router_logits"):
        assert len(ours[name]) == len(upstreams[name]) > 0
        for mine, theirs in zip(ours[name], upstreams[name]):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)
    assert ours.logits.shape == (2, 3, 128)
    torch.testing.assert_close(ours.logits, upstreams.logits, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours.aux_loss, upstreams.aux_loss)


@pytest.mark.parametrize("calls", [[40], [30, 10], [39, 1]], ids=str)
def test_attentions_are_over_window_slots_and_entries(calls):
    ids, cache = random_ids(1, 40), DeepseekV4StaticCache(MODEL.config, max_cache_len=64)
    chunks = ids.split(calls, dim=1)
    for chunk in chunks:
        ours = MODEL(chunk, cache=cache, output_attentions=True).attentions
    upstreams = MODEL(ids, output_attentions=True, use_cache=False).attentions
    seq, entries = chunks[-1].shape[1], {SLIDING: 0, CSA: 16, HCA: 4}
    for kind, mine, theirs in zip(MODEL.config.layer_types, ours, upstreams):
        window = 32 if seq == 1 else 32 + seq
        assert mine.shape == (1, 4, seq, window + entries[kind])
        theirs = theirs[:, :, -seq:]
        # The entries stand in upstream's order, behind upstream's 40 tokens; the window's slots are in ring order.
        closed = theirs.shape[-1] - 40
        torch.testing.assert_close(mine[..., window : window + closed], theirs[..., 40:], atol=1e-5, rtol=0)
        assert (mine[..., window + closed :] == 0).all()
        mass = theirs[..., :40].sum(-1)
        torch.testing.assert_close(mine[..., :window].sum(-1), mass, atol=1e-5, rtol=0)


def test_inputs_embeds_in_a_model_without_hash_routing():
    model, ids = tiny_model(mlp_layer_types=["moe"] * 4), random_ids(1, 40)
    embeds = model.get_input_embeddings()(ids)
    cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
    first = model(inputs_embeds=embeds[:, :30], cache=cache).logits
    rest = model(inputs_embeds=embeds[:, 30:], cache=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], 1)[0], dynamic_logits(model, ids[0]), atol=2e-5, rtol=0)


def test_positions_that_are_the_rows_own_are_accepted():
    positions = torch.tensor([[0, 0, 0, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert static(random_ids(1, 5), attention_mask=mask, position_ids=positions).logits.shape == (1, 5, 128)


def test_generate_builds_the_cache_and_never_a_smaller_one_later():
    model, ids, settings = tiny_model(), random_ids(1, 6), {"do_sample": False, "return_dict_in_generate": True}
    static = settings | {"cache_implementation": "static"}
    cache = model.generate(ids, max_new_tokens=10, max_cache_len=50, **static)[CACHE_NAME]
    assert isinstance(cache, DeepseekV4StaticCache) and cache.max_cache_len == 50
    shorter = model.generate(ids, max_new_tokens=4, **static)
    assert shorter[CACHE_NAME].max_cache_len == 50
    assert torch.equal(shorter.sequences, model.generate(ids, max_new_tokens=4, **settings).sequences)
    with pytest.raises(ValueError, match="no cache for `cache_implementation='offloaded_static'`"):
        model.generate(ids, max_new_tokens=4, cache_implementation="offloaded_static")


def test_generate_with_a_cache_of_ones_own_and_again_after_a_reset():
    ids, cache = random_ids(1, 6), DeepseekV4StaticCache(MODEL.config, max_new_tokens=10, prompt_length=6)
    expected = MODEL.generate(ids, max_new_tokens=10, do_sample=False)
    for _ in range(2):
        assert torch.equal(MODEL.generate(ids, max_new_tokens=10, do_sample=False, **{CACHE_NAME: cache}), expected)
        cache.reset()
    with pytest.raises(ValueError, match="room for 17 tokens"):
        MODEL.generate(random_ids(1, 17), max_new_tokens=1, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 0


def test_the_static_forward_refuses_what_it_cannot_serve():
    with pytest.raises(TypeError, match="needs a DeepseekV4ForCausalLM, got a Linear"):
        DeepseekV4StaticForward(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="must be a DeepseekV4StaticCache, got a DynamicCache"):
        DeepseekV4StaticForward(MODEL)(random_ids(1, 3), cache=DynamicCache())
