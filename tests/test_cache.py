"""The cache as an object: sizes, bytes, transformers' interface, and what it refuses."""

import copy

import pytest
import torch
from hypothesis import given, settings
from test_exact import static_logits
from tiny import CACHE_SIZES, CSA, HCA, SLIDING, allocated_cache, random_ids, tiny_config, tiny_model
from torch.utils._pytree import tree_map
from transformers import DeepseekV4Config, DynamicCache, LlamaConfig

from dsv4_gen import DeepseekV4StaticCache
from dsv4_gen.conventions import CACHE_NAME
from dsv4_gen.memory import cache_nbytes

MODEL = tiny_model()


def new_cache(**sizes):
    return DeepseekV4StaticCache(MODEL.config, **({"max_cache_len": 64} | sizes))


def test_the_compressed_length_defaults_to_the_tokens_over_the_rate():
    cache = DeepseekV4StaticCache(DeepseekV4Config(), max_new_tokens=100)
    assert cache.max_compressed_len == {CSA: 25, HCA: 1}
    assert new_cache(max_cache_len=None, max_new_tokens=100, prompt_length=3).max_compressed_len == {CSA: 26, HCA: 7}
    assert new_cache(max_compressed_len={CSA: 30}).max_compressed_len == {CSA: 30, HCA: 4}
    assert new_cache(max_compressed_len=40).max_compressed_len == {CSA: 40, HCA: 40}


def test_each_layer_keeps_what_its_kind_needs():
    cache = new_cache()
    MODEL(random_ids(2, 3), cache=cache)
    shapes = {name: tuple(tensor.shape) for name, tensor in cache.tensors().items()}
    assert {name: shape for name, shape in shapes.items() if "layers.0" in name} == {"layers.0.keys": (2, 1, 33, 32)}
    assert {name: shape for name, shape in shapes.items() if "layers.2" in name} == {
        "layers.2.keys": (2, 1, 33, 32),
        "layers.2.compressor.source_kv": (2, 17, 32),
        "layers.2.compressor.source_gate": (2, 17, 32),
        "layers.2.compressor.entries": (2, 5, 32),
    }
    assert shapes["layers.1.compressor.source_kv"] == (2, 9, 64)  # two windows of Ca and Cb
    assert shapes["layers.1.indexer.entries"] == (2, 17, 16)


def test_there_is_no_indexer_when_all_entries_would_be_chosen():
    assert new_cache(max_cache_len=32).layers[1].indexer is None  # 8 entries, index_topk 8
    assert new_cache(max_cache_len=33).layers[1].indexer is not None


@settings(max_examples=60)
@given(**CACHE_SIZES)
def test_the_formula_predicts_the_bytes(layer_types, max_cache_len, batch_size, dtype, max_rollback):
    config = tiny_config(layer_types=layer_types)
    cache = allocated_cache(config, max_cache_len, batch_size, dtype, max_rollback=max_rollback)
    sizes = {"batch_size": batch_size, "dtype": dtype, "max_rollback": max_rollback}
    assert (
        cache.nbytes == cache_nbytes(config, max_cache_len, **sizes) == sum(t.nbytes for t in cache.tensors().values())
    )


@pytest.mark.parametrize(
    ("kinds", "sizes", "gib"),
    [
        ({SLIDING: 2, CSA: 21, HCA: 20}, {"index_topk": 512}, 6.73),
        ({SLIDING: 0, CSA: 30, HCA: 31}, {"index_topk": 1024}, 9.63),
    ],
    ids=["V4-Flash", "V4-Pro"],
)
def test_bytes_of_the_public_models_at_a_million_tokens(kinds, sizes, gib):
    layer_types = [kind for kind, count in kinds.items() for _ in range(count)]
    config = DeepseekV4Config(num_hidden_layers=len(layer_types), layer_types=layer_types, **sizes)
    assert round(cache_nbytes(config, 1_048_576) / 2**30, 2) == gib


def test_the_interface_of_a_transformers_cache():
    cache = new_cache()
    assert (len(cache), cache.batch_size, cache.get_seq_length(), cache.is_initialized) == (4, -1, 0, False)
    assert (cache.get_max_length(), cache.max_cache_len, cache.is_compileable) == (64, 64, True)
    assert cache.nbytes == 0
    MODEL(random_ids(2, 5), attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), cache=cache)
    assert (cache.batch_size, cache.get_seq_length(), cache.is_initialized) == (2, 5, True)
    assert cache.lengths.tolist() == [3, 5]
    assert cache.get_mask_sizes(1, 0) == (32, 0) and cache.get_mask_sizes(7, 0) == (39, 0)
    text = repr(cache)
    assert "1 sliding + 2 CSA + 1 HCA" in text and "[3, 5] of 64 tokens" in text and "MiB" in text


def test_no_state_tensor_ever_moves():
    cache, ids = new_cache(max_cache_len=301), random_ids(2, 301)
    MODEL(ids[:, :1], cache=cache)
    addresses = {name: tensor.data_ptr() for name, tensor in cache.tensors().items()}
    for i in range(1, 301):
        MODEL(ids[:, i : i + 1], cache=cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.reset()
    MODEL(ids[:, :50], cache=cache)
    assert {name: tensor.data_ptr() for name, tensor in cache.tensors().items()} == addresses


def test_reset_forgets_everything_even_a_nan():
    cache, row = new_cache(), random_ids(50)
    fresh = static_logits(MODEL, [row], [[20], [1], [29]], new_cache())[0]
    static_logits(MODEL, [random_ids(60, seed=1)], [[60]], cache)
    for tensor in cache.tensors().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 9)
    cache.reset()
    assert torch.equal(static_logits(MODEL, [row], [[20], [1], [29]], cache)[0], fresh)


@pytest.mark.parametrize("prompt", [3, 4, 5, 16, 18, 33, 47])
def test_rows_can_be_reordered_repeated_and_selected_at_any_phase_of_a_window(prompt):
    rows = [random_ids(60, seed=s) for s in range(3)]
    cache = new_cache()
    before = static_logits(MODEL, rows, [[prompt, prompt - 1, prompt - 2]], cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    cache.batch_repeat_interleave(2)
    held = [prompt - 2, prompt - 2, prompt, prompt]
    assert cache.lengths.tolist() == held
    rest = [row[n:] for row, n in zip([rows[2], rows[2], rows[0], rows[0]], held)]
    after = static_logits(MODEL, rest, [[1] * 4, [9] * 4], cache)
    for source, row in ((2, 0), (2, 1), (0, 2), (0, 3)):
        expected = MODEL(rows[source][None, : held[row] + 10], use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat([before[source], after[row]]), expected, atol=2e-5, rtol=0)


def test_a_deep_copy_is_independent():
    cache, row = new_cache(), random_ids(40)
    static_logits(MODEL, [row], [[20]], cache)
    copied = copy.deepcopy(cache)
    expected = static_logits(MODEL, [row[20:]], [[1], [19]], cache)[0]
    assert copied.lengths.tolist() == [20]
    assert torch.equal(static_logits(MODEL, [row[20:]], [[1], [19]], copied)[0], expected)


def test_layers_are_trees_of_their_tensors():
    cache, row = new_cache(), random_ids(40)
    static_logits(MODEL, [row], [[20]], cache)
    copied = copy.deepcopy(cache)
    copied.layers = tree_map(torch.clone, cache.layers)
    expected = static_logits(MODEL, [row[20:]], [[1], [19]], cache)[0]
    assert torch.equal(static_logits(MODEL, [row[20:]], [[1], [19]], copied)[0], expected)


@pytest.mark.parametrize("length", [7, 8, 9, 11, 40])
def test_the_overlap_is_found_by_upstreams_name(length):
    ids, static, dynamic = random_ids(1, length), new_cache(), DynamicCache(config=MODEL.config)
    MODEL(ids, cache=static)
    MODEL(ids, **{CACHE_NAME: dynamic})
    compressor = static.layers[1].compressor
    expected = dynamic.layers[1].overlap_kv["compressor"]
    torch.testing.assert_close(compressor.overlap_kv(static.lengths), expected, atol=1e-5, rtol=0)
    bias = MODEL.model.layers[1].self_attn.compressor.position_bias[:, : compressor.head_dim]
    expected = dynamic.layers[1].overlap_gate["compressor"]
    torch.testing.assert_close(compressor.overlap_gate(static.lengths) + bias, expected, atol=1e-5, rtol=0)


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either `max_cache_len`"),
        ({"max_cache_len": 8, "max_new_tokens": 8}, "either `max_cache_len`"),
        ({"max_cache_len": 8, "prompt_length": 8}, "goes with `max_new_tokens`"),
        ({"max_cache_len": 0}, "at least one token"),
        ({"max_cache_len": -3}, "at least one token"),
        ({"max_new_tokens": -3}, "`max_new_tokens` must not be negative"),
        ({"max_new_tokens": 3, "prompt_length": -1}, "`prompt_length` must not be negative"),
        ({"max_cache_len": 8, "max_rollback": -1}, "`max_rollback` must not be negative"),
        ({"max_cache_len": 64, "max_compressed_len": 15}, "needs 16 entries"),
        ({"max_cache_len": 64, "max_compressed_len": {HCA: 3}}, "needs 4 entries"),
        ({"max_cache_len": 64, "max_compressed_len": {"full_attention": 3}}, "this model compresses"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV4StaticCache(MODEL.config, **arguments)


def test_the_config_of_another_model():
    with pytest.raises(ValueError, match=r"needs the config of a DeepSeek-V4 model, got one of `llama`"):
        DeepseekV4StaticCache(LlamaConfig(), max_cache_len=8)


def test_a_cache_from_another_config():
    cache = DeepseekV4StaticCache(tiny_config(sliding_window=16), max_cache_len=64)
    with pytest.raises(ValueError, match="sliding_window=16"):
        MODEL(random_ids(1, 4), cache=cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": random_ids(2, 25)}, "needs room for 65 tokens in a row, which holds 40 by now"),
        ({"input_ids": random_ids(3, 2)}, "holds 2 rows, but the call has 3"),
        ({"input_ids": random_ids(2, 3), "attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "not left-padded"),
        ({"input_ids": random_ids(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, "not left-padded"),
        ({"input_ids": random_ids(2, 3), "attention_mask": torch.ones(2, 2)}, "a column for each of the 3 new tokens"),
        ({"input_ids": random_ids(2, 3), "attention_mask": torch.ones(2, 1, 3, 3)}, "its shape is"),
        ({"input_ids": random_ids(2, 3), "position_ids": torch.arange(3)[None]}, "`position_ids` differ"),
        ({"input_ids": random_ids(2, 3), "position_ids": torch.arange(5)[None]}, "has 5 columns, but the call has 3"),
        ({"input_ids": random_ids(2, 3), "inputs_embeds": torch.zeros(2, 3, 64)}, "one of `?input_ids"),
        ({"inputs_embeds": torch.zeros(2, 3, 64)}, "routes tokens by their ids"),
        ({"input_ids": random_ids(2, 0)}, "no new tokens; the cache has seen 40 columns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_call_changes_nothing_and_the_cache_goes_on_working(call, message):
    rows, cache = [random_ids(64), random_ids(64, seed=1)], new_cache()
    first = static_logits(MODEL, rows, [[40, 40]], cache)
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    with pytest.raises(ValueError, match=message):
        MODEL(**call, cache=cache)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.tensors().items())
    rest = static_logits(MODEL, [row[40:] for row in rows], [[24, 24]], cache)  # to the last token that fits
    expected = MODEL(torch.stack(rows), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat([first[0], rest[0]]), expected, atol=2e-5, rtol=0)


def test_after_a_call_that_failed_half_way_a_cache_asks_for_a_reset():
    cache, ids = new_cache(), random_ids(1, 30)
    MODEL(ids[:, :10], cache=cache)
    hook = MODEL.model.layers[2].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        MODEL(ids[:, 10:20], cache=cache)
    hook.remove()
    with pytest.raises(ValueError, match="failed half-way"):
        MODEL(ids[:, 10:20], cache=cache)
    cache.reset()
    expected = MODEL(ids, use_cache=False).logits
    torch.testing.assert_close(MODEL(ids, cache=cache).logits, expected, atol=2e-5, rtol=0)


def test_a_cache_of_another_dtype_and_a_text_that_is_not_longer():
    cache, ids = new_cache(), random_ids(1, 10)
    cache.early_initialization(1, 1, 32, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=r"holds torch.bfloat16, but the model is in torch.float32"):
        MODEL(ids, cache=cache)
    cache = new_cache()
    MODEL(ids, cache=cache)
    with pytest.raises(ValueError, match="there is nothing to continue"):
        MODEL.generate(ids, max_new_tokens=3, **{CACHE_NAME: cache})


def test_padding_takes_no_room():
    cache = new_cache(max_cache_len=6)
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    MODEL(random_ids(2, 4), attention_mask=mask, cache=cache)
    MODEL(random_ids(2, 4), attention_mask=mask, cache=cache)
    assert cache.lengths.tolist() == [4, 6] and cache.get_seq_length() == 8
    with pytest.raises(ValueError, match="room for 7 tokens"):
        MODEL(random_ids(2, 1), cache=cache)


def test_early_initialization_takes_upstreams_arguments_and_checks_them():
    cache = new_cache()
    with pytest.raises(ValueError, match="`head_dim` of this model's KV is 32"):
        cache.early_initialization(2, 1, 64, torch.float32, "cpu")
    cache.early_initialization(2, [1] * 4, [32] * 4, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.batch_size == 2
    with pytest.raises(ValueError, match="initialized for 2 rows"):
        cache.early_initialization(3, 1, 32, torch.float32, "cpu")
