"""What people do by mistake: it works, or is a ValueError that says what to do, before anything changes."""

import pytest
import torch
from tiny import random_ids, tiny_model
from transformers.masking_utils import create_masks_for_generate

from dsv4_gen import DeepseekV4StaticCache, compile_forward
from dsv4_gen.conventions import CACHE_NAME

MODEL = tiny_model()
IDS = random_ids(1, 9)
GREEDY = {"max_new_tokens": 8, "do_sample": False}
STATIC = {"cache_implementation": "static"}


def new_cache(max_cache_len=64):
    return DeepseekV4StaticCache(MODEL.config, max_cache_len=max_cache_len)


def masks_of_upstream():
    embeds = MODEL.get_input_embeddings()(IDS)
    masks = {"attention_mask": torch.ones_like(IDS), "position_ids": torch.arange(9)[None], CACHE_NAME: None}
    return create_masks_for_generate(MODEL.config, inputs_embeds=embeds, **masks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attention_mask": masks_of_upstream()}, r"\(batch, columns\).* but it is a dict"),
        ({"attention_mask": torch.ones(1, 1, 9, 9)}, r"\(batch, columns\).* but its shape is \(1, 1, 9, 9\)"),
        ({"use_cache": False}, "`use_cache=False` contradicts"),
        ({"labels": IDS}, "Gradients do not flow through a static cache"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_call_that_cannot_be_meant_changes_nothing(call, message):
    cache = new_cache()
    with pytest.raises(ValueError, match=message), torch.enable_grad():
        MODEL(IDS, cache=cache, **call)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_cache": False}, "`use_cache=False` contradicts"),
        ({"prefill_chunk_size": 0}, "`prefill_chunk_size` must be at least 1, got 0"),
        ({"max_new_tokens": 57}, "and the 56 tokens after it need room for 65 tokens in a row.* `max_cache_len=64`"),
        (STATIC, "`cache_implementation`, or a cache of your own"),
    ],
    ids=str,
)
def test_settings_of_generate_that_cannot_work_are_refused_before_the_first_token(settings, message):
    cache = new_cache()
    with pytest.raises(ValueError, match=message):
        MODEL.generate(IDS, **{CACHE_NAME: cache}, **GREEDY | settings)
    assert cache.get_seq_length() == 0


def test_an_answer_that_just_fits():
    expected = MODEL.generate(IDS, max_new_tokens=56, do_sample=False)
    assert torch.equal(MODEL.generate(IDS, max_new_tokens=56, do_sample=False, **{CACHE_NAME: new_cache()}), expected)


def test_the_loss_without_gradients_is_the_dynamic_one():
    with torch.no_grad():
        torch.testing.assert_close(MODEL(IDS, labels=IDS, cache=new_cache()).loss, MODEL(IDS, labels=IDS).loss)
    with pytest.raises(ValueError, match="A compiled forward has no loss"):
        compile_forward(MODEL, backend="eager")(IDS, labels=IDS, cache=new_cache())


@pytest.mark.parametrize("given", [True, False], ids=["mask given", "mask inferred"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_prompt_that_is_padded_on_the_right_or_in_between_gives_its_own_answer(given, chunk):
    rows = torch.stack([random_ids(12), random_ids(12, seed=1)])
    rows[0, 9:] = rows[1, :2] = rows[1, 5:6] = 0
    mask = {"attention_mask": (rows != 0).long()} if given else {}
    tokens = MODEL.generate(rows, **mask, **GREEDY, **STATIC, prefill_chunk_size=chunk)[:, 12:]
    for row, new in zip(rows, tokens):
        alone = row[row != 0][None]
        assert torch.equal(new, MODEL.generate(alone, **GREEDY)[0, alone.shape[1] :])


def test_a_cache_that_still_has_beams_says_so():
    cache = new_cache()
    MODEL.generate(IDS, num_beams=3, **GREEDY, **{CACHE_NAME: cache})
    cache.reset()
    with pytest.raises(ValueError, match=r"holds 3 rows, but the call has 1\. Use a new cache, or change this one"):
        MODEL.generate(IDS, **GREEDY, **{CACHE_NAME: cache})
    cache.batch_select_indices(torch.tensor([0]))
    assert torch.equal(MODEL.generate(IDS, **GREEDY, **{CACHE_NAME: cache}), MODEL.generate(IDS, **GREEDY))


def test_prompt_tuning_is_refused_by_name_and_lora_works():
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match=r"does not work with prompt tuning \(peft's PromptTuningConfig\)"):
        tuned.generate(input_ids=IDS, **GREEDY, **STATIC)
    config = peft.LoraConfig(target_modules=["q_a_proj", "kv_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(tiny_model(), config).eval()
    assert torch.equal(adapted.generate(input_ids=IDS, **GREEDY, **STATIC), adapted.generate(input_ids=IDS, **GREEDY))
