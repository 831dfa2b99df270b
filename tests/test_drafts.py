"""Drafts: whoever makes them, the answer is greedy decoding's."""

import pytest
import torch
from tiny import random_ids, tiny_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dsv4_gen import DeepseekV4StaticCache
from dsv4_gen.conventions import CACHE_NAME

MODEL = tiny_model()
GREEDY = {"max_new_tokens": 40, "do_sample": False}
STATIC = {"cache_implementation": "static"}
REPETITIVE, RANDOM = random_ids(1, 6).repeat(1, 8), random_ids(1, 34, seed=2)


@pytest.mark.parametrize("drafts", [1, 4, 10])
def test_prompt_lookup_needs_no_cache_of_ones_own(drafts):
    for prompt in (REPETITIVE, RANDOM):
        tokens = MODEL.generate(prompt, prompt_lookup_num_tokens=drafts, **GREEDY, **STATIC)
        assert torch.equal(tokens, MODEL.generate(prompt, **GREEDY))


@pytest.mark.parametrize("assistant", [MODEL, tiny_model(seed=1)], ids=["all drafts taken", "none"])
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_a_deepseek_v4_assistant_keeps_a_static_cache_of_its_own(assistant, schedule):
    before = assistant.generation_config.to_dict()
    assistant.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=0
    )
    try:
        tokens = MODEL.generate(RANDOM, assistant_model=assistant, **GREEDY, **STATIC)
    finally:
        assistant.generation_config = GenerationConfig.from_dict(before)
    assert torch.equal(tokens, MODEL.generate(RANDOM, **GREEDY))


def test_an_assistant_of_another_kind():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    assistant = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).eval()
    assistant.generation_config.update(eos_token_id=None, assistant_confidence_threshold=0)
    tokens = MODEL.generate(RANDOM, assistant_model=assistant, **GREEDY, **STATIC)
    assert torch.equal(tokens, MODEL.generate(RANDOM, **GREEDY))


def test_a_prompt_with_padding_and_scores_as_without_drafts():
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), REPETITIVE], dim=1)
    settings = GREEDY | {"attention_mask": (padded != 0).long(), "return_dict_in_generate": True, "output_logits": True}
    drafted = MODEL.generate(padded, prompt_lookup_num_tokens=4, **settings, **STATIC)
    plain = MODEL.generate(padded, **settings, **STATIC)
    assert torch.equal(drafted.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"assistant_early_exit": 1}, "`assistant_early_exit`"),
        ({"use_mtp": True}, "`use_mtp`"),
        ({"prompt_lookup_num_tokens": 0}, "`prompt_lookup_num_tokens` below 1"),
        ({"prompt_lookup_num_tokens": 90}, "`max_rollback` of 20 is too small for 90 drafts"),
        ({"prompt_lookup_num_tokens": 20, "max_new_tokens": 80}, "need room for 133 tokens"),
    ],
    ids=str,
)
def test_drafts_that_cannot_work_are_refused_before_anything_runs(way, message):
    cache, settings = DeepseekV4StaticCache(MODEL.config, 120, max_rollback=20), dict(vars(MODEL.config))
    with pytest.raises(ValueError, match=message):
        MODEL.generate(RANDOM, **GREEDY | way, **{CACHE_NAME: cache})
    assert vars(MODEL.config) == settings and cache.nbytes == 0 and MODEL._is_stateful
