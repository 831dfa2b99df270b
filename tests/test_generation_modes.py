"""Every way people generate: the tokens of the dynamic cache, row by row and unpadded."""

import time

import pytest
import torch
from test_exact import dynamic_logits, static_logits
from tiny import CSA, HCA, SLIDING, random_ids, tiny_config, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._dynamo.utils import counters
from transformers import (
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextStreamer,
    pipeline,
)

from dsv4_gen import DeepseekV4StaticCache, compile_forward
from dsv4_gen.conventions import CACHE_NAME

MODEL = tiny_model()
STATIC = {"cache_implementation": "static"}


def left_padded(rows):
    """Rows of different lengths as one batch of ids and its mask."""
    seq = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), seq, dtype=torch.long), torch.zeros(len(rows), seq, dtype=torch.long)
    for r, row in enumerate(rows):
        ids[r, seq - len(row) :], mask[r, seq - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def compiled(**settings):
    """Settings for `generate` to compile on a CPU, to one full graph per shape, whose number `counters` has."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    counters.clear()
    return {"compile_config": config, "max_cache_len": 256, **STATIC, **settings}


def graphs():
    return counters["stats"]["unique_graphs"]


def continued(model, row, **settings):
    """What the dynamic cache adds to a row."""
    return model.generate(row[None], **settings)[0, len(row) :]


@pytest.mark.parametrize("lengths", [(1, 40), (33, 5, 16, 4), (7, 7, 3)], ids=str)
def test_each_row_of_a_left_padded_batch_gets_its_own_tokens(lengths):
    rows = [random_ids(length, seed=length + i) for i, length in enumerate(lengths)]
    settings = {"max_new_tokens": 30, "do_sample": False}
    batch = left_padded(rows)
    tokens = MODEL.generate(**batch, **settings, **STATIC)[:, batch["input_ids"].shape[1] :]
    for row, new in zip(rows, tokens):
        assert torch.equal(new, continued(MODEL, row, **settings))


def test_rows_that_end_at_different_times_are_filled_with_padding():
    rows = [random_ids(9), random_ids(30, seed=1), random_ids(21, seed=2)]
    free = [continued(MODEL, row, max_new_tokens=30, do_sample=False) for row in rows]
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [free[0][4].item(), free[1][11].item()]}
    tokens = MODEL.generate(**left_padded(rows), **settings, **STATIC)[:, 30:]
    ends = []
    for row, new in zip(rows, tokens):
        expected = continued(MODEL, row, **settings)
        ends.append(len(expected))
        assert torch.equal(new[: len(expected)], expected) and (new[len(expected) :] == 0).all()
    assert len(set(ends)) > 1


def test_chunked_prefill_through_generate_has_two_graphs_for_all_prompts():
    settings = compiled(prefill_chunk_size=8)
    for length, padding in [(5, 0), (24, 0), (37, 9), (61, 0), (200, 150)]:
        rows = [random_ids(length - padding), random_ids(length, seed=1)]
        new = {"max_new_tokens": 12, "do_sample": False}
        tokens = MODEL.generate(**left_padded(rows), **new, **settings)[:, length:]
        for row, row_tokens in zip(rows, tokens):
            assert torch.equal(row_tokens, continued(MODEL, row, **new))
        assert graphs() == 2


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 8}], ids=["one shot", "chunks"])
def test_turns_of_a_conversation_continue_on_one_cache(chunks):
    texts = [random_ids(11), random_ids(4, seed=1)]
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=120)
    settings = {"max_new_tokens": 10, "do_sample": False}
    batch = left_padded(texts)
    for turn, lengths in enumerate([(9, 17), (20, 1)]):
        tokens = MODEL.generate(**batch, **settings, **chunks, **{CACHE_NAME: cache})
        new = tokens[:, batch["input_ids"].shape[1] :]
        for r in range(2):
            assert torch.equal(new[r], continued(MODEL, texts[r], **settings))
        # The next messages, again of different lengths: the padding between turns stays in the mask.
        messages = [random_ids(length, seed=7 + turn + r) for r, length in enumerate(lengths)]
        texts = [torch.cat([text, answer, message]) for text, answer, message in zip(texts, new, messages)]
        message_batch = left_padded(messages)
        batch = {
            "input_ids": torch.cat([tokens, message_batch["input_ids"]], dim=1),
            "attention_mask": torch.cat(
                [batch["attention_mask"], torch.ones_like(new), message_batch["attention_mask"]], dim=1
            ),
        }


def test_sampling_draws_the_same_tokens():
    rows, settings = [random_ids(12)], {"max_new_tokens": 30, "do_sample": True, "top_k": 20, "temperature": 1.5}
    torch.manual_seed(3)
    expected = continued(MODEL, rows[0], **settings)
    torch.manual_seed(3)
    assert torch.equal(MODEL.generate(**left_padded(rows), **settings, **STATIC)[0, 12:], expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.3},
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [9, 3]]},
        {"min_new_tokens": 5, "eos_token_id": 3, "suppress_tokens": [1, 2]},
    ],
    ids=str,
)
def test_options_of_generate_give_the_tokens_of_the_dynamic_cache(settings):
    settings = {"max_new_tokens": 25, "do_sample": False} | settings
    for length in (5, 38):
        results = []
        for static in ({}, STATIC):
            torch.manual_seed(0)
            results.append(MODEL.generate(random_ids(2, length), **settings, **static))
        assert torch.equal(*results)


def test_beams_in_a_padded_batch():
    rows, settings = [random_ids(9), random_ids(35, seed=1)], {"max_new_tokens": 25, "do_sample": False, "num_beams": 4}
    tokens = MODEL.generate(**left_padded(rows), **settings, **STATIC)[:, 35:]
    for row, new in zip(rows, tokens):
        assert torch.equal(new, continued(MODEL, row, **settings))


def test_scores_hidden_states_and_attentions_of_generate():
    asked = {"output_scores": True, "output_hidden_states": True, "output_attentions": True}
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True} | asked
    static, dynamic = (MODEL.generate(random_ids(1, 20), **settings, **kind) for kind in (STATIC, {}))
    assert torch.equal(static.sequences, dynamic.sequences)
    for name in ("scores", "hidden_states"):
        for ours, upstreams in zip(static[name], dynamic[name]):
            ours, upstreams = (x if isinstance(x, tuple) else (x,) for x in (ours, upstreams))
            for mine, theirs in zip(ours, upstreams):
                torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)
    assert [len(step) for step in static.attentions] == [4] * 6


def test_streamers_stopping_criteria_and_max_time():
    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 25)

    class Collect:
        def __init__(self):
            self.tokens = []

        def put(self, tokens):
            self.tokens += tokens.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    row, streamer = random_ids(20), Collect()
    tokens = MODEL.generate(
        row[None], max_new_tokens=40, do_sample=False, stopping_criteria=[AfterFive()], streamer=streamer, **STATIC
    )[0]
    assert torch.equal(tokens[20:], continued(MODEL, row, max_new_tokens=5, do_sample=False))
    assert streamer.tokens == [*tokens.tolist(), "end"]
    start = time.perf_counter()
    tokens = MODEL.generate(row[None], max_new_tokens=4000, max_time=0.2, do_sample=False, **STATIC)
    assert time.perf_counter() - start < 20 and tokens.shape[1] < 4000


def test_the_text_generation_pipeline():
    vocabulary = {f"w{i}": i for i in range(128)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    generate = pipeline("text-generation", model=MODEL, tokenizer=tokenizer)
    texts = ["w5 w9 w77", "w8 w3 w12 w90 w41 w2 w7"]
    settings = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    batched = generate(texts, batch_size=2, **settings, **STATIC)
    for text, (result,) in zip(texts, batched):
        assert result == generate(text, **settings)[0]
    TextStreamer(tokenizer)


@pytest.mark.parametrize("drafts", [3, 10])
def test_prompt_lookup_gives_greedys_tokens_with_a_fixed_number_of_graphs(drafts):
    prompt = random_ids(6).repeat(8)
    settings = {"max_new_tokens": 60, "do_sample": False}
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=256, max_rollback=drafts)
    options = compiled()
    del options["cache_implementation"], options["max_cache_len"]
    for row in (prompt, random_ids(20, seed=2)):  # drafts that are taken, and drafts that are not
        cache.reset()
        tokens = MODEL.generate(
            row[None], prompt_lookup_num_tokens=drafts, **settings, **options, **{CACHE_NAME: cache}
        )
        assert torch.equal(tokens[0, len(row) :], continued(MODEL, row, **settings))
    assert graphs() <= 2  # one token, and one for drafts of any length


def test_an_assistant_model_gives_greedys_tokens():
    assistant = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    assistant.generation_config.update(eos_token_id=None, num_assistant_tokens=7, assistant_confidence_threshold=0)
    settings = {"max_new_tokens": 40, "do_sample": False}
    for length in (5, 34):
        row, cache = random_ids(length), DeepseekV4StaticCache(MODEL.config, max_cache_len=100, max_rollback=10)
        tokens = MODEL.generate(row[None], assistant_model=assistant, **settings, **{CACHE_NAME: cache})
        assert torch.equal(tokens[0, length:], continued(MODEL, row, **settings))


def test_drafts_are_refused_where_the_cache_cannot_go_back():
    settings = {"max_new_tokens": 5, "prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match=r"not supported with stateful models.* add `cache_implementation='static'`"):
        MODEL.generate(random_ids(1, 9), **settings)
    short = {CACHE_NAME: DeepseekV4StaticCache(MODEL.config, max_cache_len=100, max_rollback=2)}
    with pytest.raises(ValueError, match="`max_rollback` of 2 is too small"):
        MODEL.generate(random_ids(1, 9), **settings, **short)
    in_config = GenerationConfig(**settings, pad_token_id=0)
    with pytest.raises(ValueError, match="`max_rollback` of 2 is too small"):
        MODEL.generate(random_ids(1, 9), generation_config=in_config, **short)
    held = DeepseekV4StaticCache(MODEL.config, max_cache_len=100, max_rollback=3)
    MODEL(random_ids(1, 5), cache=held)
    with pytest.raises(ValueError, match="begins with an empty cache"):
        MODEL.generate(random_ids(1, 9), **settings, **{CACHE_NAME: held})
    assert MODEL._is_stateful


def test_two_caches_and_two_models_take_turns_on_one_graph_each():
    counters.clear()
    other = tiny_model(seed=1)
    rows = [random_ids(40, seed=s) for s in range(2)]
    runs = []
    for model in (MODEL, other):
        forward = compile_forward(model, backend="eager")
        caches = [DeepseekV4StaticCache(model.config, max_cache_len=48) for _ in rows]
        runs += [(model, forward, row, cache, []) for row, cache in zip(rows, caches)]
    for i in range(40):
        for _, forward, row, cache, logits in runs:
            logits.append(forward(row[None, i : i + 1], cache=cache).logits[0])
    for model, _, row, _, logits in runs:
        torch.testing.assert_close(torch.cat(logits), dynamic_logits(model, row), atol=2e-5, rtol=0)
    assert graphs() <= 2


def test_a_cache_smaller_than_one_window_of_any_kind():
    row, cache = random_ids(3), DeepseekV4StaticCache(MODEL.config, max_cache_len=3)
    (logits,) = static_logits(MODEL, [row], [[1], [2]], cache)
    torch.testing.assert_close(logits, dynamic_logits(MODEL, row), atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_inference_mode_no_grad_and_neither(mode):
    model, row = tiny_model(), random_ids(40)
    cache = DeepseekV4StaticCache(model.config, max_cache_len=40)
    expected = dynamic_logits(model, row)
    model.requires_grad_(True)
    with mode():
        (first,) = static_logits(model, [row], [[20], [1]], cache)
    (rest,) = static_logits(model, [row[21:]], [[18], [1]], cache)  # and on, outside of it
    torch.testing.assert_close(torch.cat([first, rest]), expected, atol=2e-5, rtol=0)
    assert not any(tensor.requires_grad for tensor in cache.tensors().values())


def test_the_state_of_a_layer_lives_where_its_keys_are_computed():
    config = tiny_config(layer_types=[SLIDING, CSA, HCA])
    cache = DeepseekV4StaticCache(config, max_cache_len=64)
    for layer, device in zip(cache.layers, ("cpu", "meta", "cpu")):
        keys = torch.zeros(2, 1, 0, config.head_dim, device=device)
        layer.lazy_initialization(keys, keys)
        assert {tensor.device.type for tensor in layer.tensors().values()} == {device}
