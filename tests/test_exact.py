"""The numbers: whatever the chunks and the padding, each row gives what one dynamic pass over it alone gives."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import CSA, HCA, SLIDING, random_ids, tiny_model

from dsv4_gen import DeepseekV4StaticCache

TOLERANCE = 2e-5  # float32, on logits of scale 2 to 3
MODEL = tiny_model()


def static_logits(model, rows, calls, cache):
    """Feed `rows` (a list of 1D ids) in `calls`: each a list with the number of tokens every row brings.

    Rows that bring fewer than the others are padded on the left. Returns each row's logits, padding left out.
    """
    done, logits = [0] * len(rows), [[] for _ in rows]
    for counts in calls:
        seq = max(counts)
        ids, mask = torch.zeros(len(rows), seq, dtype=torch.long), torch.zeros(len(rows), seq, dtype=torch.long)
        for r, count in enumerate(counts):
            ids[r, seq - count :], mask[r, seq - count :] = rows[r][done[r] : done[r] + count], 1
            done[r] += count
        output = model(input_ids=ids, attention_mask=mask, cache=cache).logits
        for r, count in enumerate(counts):
            logits[r].append(output[r, seq - count :])
    return [torch.cat(row) for row in logits]


def dynamic_logits(model, row):
    return model(row[None], use_cache=False).logits[0]


def indexers_are_decided(model, row, margin=2e-6):
    """Whether no query of `row` has two entries tied, to float32's last digits, for the last place among its best.

    Where it has, upstream itself chooses by rounding: its one-shot and its chunked prefill may then disagree.
    """
    topk, closed = model.config.index_topk, (torch.arange(len(row)) + 1) // model.config.compress_rates[CSA]
    gaps = []

    def record(scorer, args, scores):
        scores = scores[0].masked_fill(torch.arange(scores.shape[-1]) >= closed[:, None], -torch.inf)
        if (closed > topk).any():
            best = scores[closed > topk].topk(topk + 1).values
            gaps.append(best[:, -2] - best[:, -1])

    scorers = [layer.self_attn.compressor.indexer.scorer for layer in model.model.layers[1::2]]
    hooks = [scorer.register_forward_hook(record) for scorer in scorers]
    model(row[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return all((gap > margin).all() for gap in gaps)


@st.composite
def ragged_calls(draw):
    """Up to 200 tokens per row of 1 to 4 rows, in calls of random sizes: single steps, and chunks beyond every ring."""
    batch = draw(st.integers(1, 4))
    size = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 120))
    calls, left = [], [200] * batch
    for longest in draw(st.lists(size, min_size=1, max_size=12)):
        counts = [min(draw(st.integers(0, longest)), left[r]) for r in range(batch)]
        counts[draw(st.integers(0, batch - 1))] = longest
        counts = [min(count, left[r]) for r, count in enumerate(counts)]
        if max(counts):
            calls.append(counts)
        left = [tokens - count for tokens, count in zip(left, counts)]
    return calls


@settings(max_examples=300)
@given(ragged_calls(), st.integers(0, 1000))
def test_any_split_and_any_left_padding_gives_the_logits_of_the_unpadded_row(calls, seed):
    lengths = [sum(counts) for counts in zip(*calls)]
    rows = [random_ids(length, seed=seed + r) for r, length in enumerate(lengths)]
    assume(all(indexers_are_decided(MODEL, row) for row in rows if len(row)))
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=200)
    for row, logits in zip(rows, static_logits(MODEL, rows, calls, cache)):
        if len(row):
            torch.testing.assert_close(logits, dynamic_logits(MODEL, row), atol=TOLERANCE, rtol=0)
    assert cache.lengths.tolist() == lengths


@pytest.mark.parametrize("prompt", range(1, 34))
def test_every_prompt_length_up_to_two_windows_of_the_coarser_kind_then_single_steps(prompt):
    row = random_ids(prompt + 20)
    cache = DeepseekV4StaticCache(MODEL.config, max_new_tokens=20, prompt_length=prompt)
    (logits,) = static_logits(MODEL, [row], [[prompt]] + [[1]] * 20, cache)
    torch.testing.assert_close(logits, dynamic_logits(MODEL, row), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [SLIDING, SLIDING]},
        {"layer_types": [HCA, HCA]},
        {"layer_types": [CSA, CSA]},
        {"sliding_window": 500},
        {"sliding_window": 1},
        {"index_topk": 1},
        {"index_topk": 1000},
        {"compress_rates": {CSA: 1, HCA: 2}},
        {"compress_rates": {CSA: 3, HCA: 7}, "sliding_window": 5},
        {"compress_rates": {CSA: 4, HCA: 128}},
    ],
    ids=str,
)
def test_models_of_other_shapes(changes):
    model, rows = tiny_model(**changes), [random_ids(77), random_ids(75, seed=1)]
    cache = DeepseekV4StaticCache(model.config, max_cache_len=77)
    for row, logits in zip(
        rows, static_logits(model, rows, [[30, 28], [1, 1], [2, 2], [40, 40]] + [[1, 1]] * 4, cache)
    ):
        torch.testing.assert_close(logits, dynamic_logits(model, row), atol=TOLERANCE, rtol=0)


def test_a_prefill_in_several_query_blocks_gives_the_logits_of_one(monkeypatch):
    row = random_ids(150)
    monkeypatch.setattr("dsv4_gen.generation_deepseek_v4.forward.QUERY_BLOCK", 16)
    (logits,) = static_logits(MODEL, [row], [[40], [110]], DeepseekV4StaticCache(MODEL.config, max_cache_len=150))
    torch.testing.assert_close(logits, dynamic_logits(MODEL, row), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("ratio", [0, 1000], ids=["gathered", "masked"])
def test_chosen_entries_count_the_same_gathered_or_masked(monkeypatch, ratio):
    row = random_ids(150)
    monkeypatch.setattr("dsv4_gen.generation_deepseek_v4.selection.GATHER_RATIO", ratio)
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=150)
    (logits,) = static_logits(MODEL, [row], [[70], [1], [79]], cache)
    torch.testing.assert_close(logits, dynamic_logits(MODEL, row), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_the_dynamic_cache_is(dtype):
    model, ids = tiny_model(dtype=dtype), random_ids(16, 100)
    if dtype == torch.float16:
        model.half()  # upstream keeps some projections in float32 and cannot run with the mix
    cache = DeepseekV4StaticCache(model.config, max_cache_len=100)
    static, dynamic = model(ids, cache=cache).logits, model(ids, use_cache=False).logits
    exact = model.float()(ids, use_cache=False).logits
    assert {tensor.dtype for name, tensor in cache.tensors().items() if "." in name} == {dtype}
    assert (static - exact).abs().mean() < 1.2 * (dynamic - exact).abs().mean()
