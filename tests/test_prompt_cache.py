"""A prompt cache on disk: what is loaded goes on as what was saved, and what does not belong is refused.

Where the sizes are those of the saved cache, equality is to the last bit. Another `max_cache_len` or `max_rollback`
changes the order of sums, so there the logits are held to the tolerance of `test_exact.py`.
"""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_exact import TOLERANCE, dynamic_logits, static_logits
from tiny import CSA, HCA, SLIDING, random_ids, tiny_config, tiny_model

from dsv4_gen import DeepseekV4SlidingStaticLayer, DeepseekV4StaticCache
from dsv4_gen.cli import main
from dsv4_gen.prompt_cache import (
    load_prompt_cache,
    prompt_cache_info,
    save_and_load,
    save_prompt_cache,
    weights_fingerprint,
)
from dsv4_gen.prompt_cache.file_format import HEADER

MODEL = tiny_model()
CONFIG = MODEL.config
ROWS = [random_ids(160, seed=s) for s in range(3)]  # without ties in the indexer, see `indexers_are_decided`


def filled(lengths, model=MODEL, max_cache_len=160, **sizes):
    """A cache that holds the first `lengths` tokens of `ROWS`, padded on the left."""
    cache = DeepseekV4StaticCache(model.config, max_cache_len, **sizes)
    static_logits(model, ROWS[: len(lengths)], [lengths], cache)
    return cache


def continued(cache, calls=((1,) * 3, (1,) * 3, (7,) * 3, (1,) * 3), model=MODEL):
    """The logits of each row's next tokens."""
    lengths = cache.lengths.tolist()
    calls = [list(counts[: len(lengths)]) for counts in calls]
    return static_logits(model, [row[length:] for row, length in zip(ROWS, lengths)], calls, cache)


def assert_same(ours, expected):
    assert len(ours) == len(expected) and all(torch.equal(a, b) for a, b in zip(ours, expected))


def assert_exact(logits, lengths, new=10):
    for row, length, ours in zip(ROWS, lengths, logits):
        expected = dynamic_logits(MODEL, row[: length + new])[length:]
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


@pytest.fixture
def saved(path):
    save_prompt_cache(path, filled([40, 33, 21]), model=MODEL)
    return path


# Round trips


@pytest.mark.parametrize("length", range(1, 67))
def test_it_goes_on_to_the_last_bit_at_every_phase_of_every_window(length, path):
    cache = filled([length, max(length - 3, 1)])
    save_prompt_cache(path, cache)
    assert_same(continued(load_prompt_cache(path, CONFIG)), continued(cache))


row_lengths = st.lists(st.integers(0, 140), min_size=1, max_size=3).filter(any)


@settings(max_examples=80)
@given(row_lengths, st.integers(0, 20), st.integers(0, 20))
def test_any_padded_batch_with_any_rollback_goes_on_to_the_last_bit(path_factory, lengths, max_rollback, taken_back):
    cache, path = filled(lengths, max_rollback=max_rollback), path_factory()
    cache.crop(-min(taken_back, max_rollback, *lengths))
    if cache.lengths.any():
        save_prompt_cache(path, cache)
        assert_same(continued(load_prompt_cache(path, CONFIG, max_rollback=max_rollback)), continued(cache))


@settings(max_examples=80)
@given(row_lengths, st.integers(0, 60), st.integers(0, 60), st.integers(0, 40), st.integers(0, 40))
def test_any_other_size_goes_on_like_the_unpadded_row(
    path_factory, lengths, room, other_room, rollback, other_rollback
):
    sizes = max(lengths) + 10 + room, max(lengths) + 10 + other_room
    path = path_factory()
    cache = filled(lengths, max_cache_len=max(sizes[0], 33), max_rollback=rollback)  # from 33 on with indexer
    save_prompt_cache(path, cache)
    loaded = load_prompt_cache(path, CONFIG, max_cache_len=sizes[1], max_rollback=other_rollback)
    assert (loaded.max_cache_len, loaded.max_rollback) == (sizes[1], other_rollback)
    assert_exact(continued(loaded), lengths)


@pytest.fixture(scope="module")
def path_factory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    return lambda: folder / "prompt.safetensors"


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [SLIDING, SLIDING]},
        {"layer_types": [HCA, HCA]},
        {"sliding_window": 1, "compress_rates": {CSA: 3, HCA: 7}},
        {"compress_rates": {CSA: 1, HCA: 2}},
        {"index_topk": 1000},
    ],
    ids=str,
)
def test_models_of_other_shapes(changes, path):
    model = tiny_model(**changes)
    cache = filled([50, 47], model)
    save_prompt_cache(path, cache, model=model)
    assert_same(
        continued(load_prompt_cache(path, model.config, model=model), model=model), continued(cache, model=model)
    )


def test_bfloat16_is_kept_bit_by_bit(path):
    model = tiny_model(dtype=torch.bfloat16)
    cache = filled([50, 47], model)
    save_prompt_cache(path, cache, model=model)
    loaded = load_prompt_cache(path, model.config, model=model)
    assert {t.dtype for name, t in loaded.tensors().items() if "." in name} == {torch.bfloat16}
    assert_same(continued(loaded, model=model), continued(cache, model=model))


def test_saving_changes_nothing_and_saving_what_was_loaded_gives_the_same_file(saved, path, tmp_path):
    again, rolled_back = tmp_path / "again.safetensors", filled([45, 38, 26], max_rollback=5)
    save_prompt_cache(again, load_prompt_cache(saved, CONFIG), model=MODEL)
    assert again.read_bytes() == saved.read_bytes()
    rolled_back.crop(-5)
    before = {name: tensor.clone() for name, tensor in rolled_back.tensors().items()}
    save_prompt_cache(again, rolled_back)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rolled_back.tensors().items())


def test_tokens_that_were_taken_back_are_not_in_the_file(path):
    cache = filled([48, 12], max_rollback=16)
    static_logits(MODEL, [ROWS[2], ROWS[2]], [[16, 16]], cache)
    cache.crop(-16)
    save_prompt_cache(path, cache)
    for name, tensor in load_file(path).items():
        rate = 1 if "entries" not in name else 16 if "layers.2" in name else 4
        assert (tensor[1, : max(tensor.shape[1] - 12 // rate, 0)] == 0).all(), name


def test_one_row_is_repeated_to_a_batch(path):
    save_prompt_cache(path, filled([40]))
    loaded = load_prompt_cache(path, CONFIG)
    loaded.batch_repeat_interleave(3)
    rows = [torch.cat([ROWS[0][:40], row[40:50]]) for row in ROWS]
    logits = static_logits(MODEL, [row[40:] for row in rows], [[1] * 3, [9] * 3], loaded)
    for row, ours in zip(rows, logits):
        torch.testing.assert_close(ours, dynamic_logits(MODEL, row)[40:], atol=TOLERANCE, rtol=0)


def test_the_tokens_of_the_file_cannot_be_taken_back_but_later_ones_can(path):
    save_prompt_cache(path, filled([60, 50], max_rollback=6))
    loaded = load_prompt_cache(path, CONFIG, max_rollback=6)
    with pytest.raises(ValueError, match="Cannot take back"):
        loaded.crop(-1)
    static_logits(MODEL, [ROWS[2]] * 2, [[6, 6]], loaded)
    with pytest.raises(ValueError, match="Cannot take back"):
        loaded.crop(-7)
    loaded.crop(-6)
    assert_exact(continued(loaded), [60, 50])


def test_a_loaded_cache_knows_how_much_room_is_left(saved):
    loaded = load_prompt_cache(saved, CONFIG, max_cache_len=42)
    with pytest.raises(ValueError, match="needs room for 43 tokens in a row, which holds 40"):
        continued(loaded, calls=[[3, 3, 3]])
    assert_exact(continued(loaded, calls=[[2, 2, 2]]), [40, 33, 21], new=2)


def test_a_loaded_cache_can_be_reset_and_used_for_something_else(saved):
    loaded = load_prompt_cache(saved, CONFIG, max_rollback=4)
    loaded.reset()
    static_logits(MODEL, ROWS, [[5, 5, 5]], loaded)
    loaded.crop(-4)
    assert_exact(continued(loaded), [1, 1, 1])


def test_generate_goes_on_from_a_saved_prompt(path):
    prompt = ROWS[0][None, :60]
    save_prompt_cache(path, filled([50]), model=MODEL)
    cache = load_prompt_cache(path, CONFIG, model=MODEL)
    static = MODEL.generate(prompt, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert torch.equal(static, MODEL.generate(prompt, max_new_tokens=20, do_sample=False))


def test_everything_works_in_inference_mode(path):
    with torch.inference_mode():
        save_prompt_cache(path, filled([40, 33]), model=MODEL)
        loaded = load_prompt_cache(path, CONFIG, model=MODEL)
    assert_exact(continued(loaded), [40, 33])


# What is in the file


def test_its_size_follows_the_tokens_held_and_not_the_capacity(path):
    sizes = []
    for tokens, capacity in ((64, 160), (64, 4096), (128, 160)):
        save_prompt_cache(path, filled([tokens], max_cache_len=capacity))
        with safe_open(path, framework="pt") as file:
            sizes.append(sum(file.get_tensor(name).nbytes for name in file.keys()))
            assert path.stat().st_size < sizes[-1] + 4096  # the header
    entries = 2 * (32 + 16) * 4 / 4 + 32 * 4 / 16  # bytes per token: two CSA layers with indexer, one HCA layer
    assert sizes[0] == sizes[1] and sizes[2] - sizes[0] == 64 * entries


def test_the_header_says_what_the_state_belongs_to(path):
    cache = filled([40, 33], max_cache_len=64)
    save_prompt_cache(path, cache, model=MODEL, metadata={"prompt": "system, version 3"})
    info, shapes = prompt_cache_info(path)
    assert (info.lengths, info.seq_length, info.max_cache_len, info.dtype) == ([40, 33], 40, 64, "F32")
    assert (info.format_version, info.metadata) == (1, {"prompt": "system, version 3"})
    assert info.config["sliding_window"] == 32 and info.config["compress_rates"] == {CSA: 4, HCA: 16}
    assert info.weights == weights_fingerprint(MODEL)
    assert shapes["layers.2.compressor.entries"] == (2, 2, 32)
    loaded = load_prompt_cache(path, CONFIG)
    assert (loaded.lengths.tolist(), loaded.get_seq_length(), loaded.max_cache_len) == ([40, 33], 40, 64)


def test_the_command_prints_the_header_without_loading_a_tensor(path, capsys):
    save_prompt_cache(path, filled([40, 33]), model=MODEL, metadata={"prompt": "system, version 3"})
    size = sum(tensor.nbytes for tensor in load_file(path).values())
    with open(path, "rb+") as file:  # a hole in the place of the state
        file.truncate(path.stat().st_size - size)
        file.truncate(path.stat().st_size + size)
    main(["cache-info", str(path)])
    output = capsys.readouterr().out
    for text in ("[40, 33]", "sliding_window: 32", "prompt: system, version 3", "torch.float32", "KiB"):
        assert text in output
    assert "layers.2.compressor.entries: (2, 2, 32)" in output and weights_fingerprint(MODEL) in output


def test_the_command_refuses_what_is_no_prompt_cache(path, capsys):
    for content in (None, b"hello"):
        if content:
            path.write_bytes(content)
        with pytest.raises(SystemExit):
            main(["cache-info", str(path)])
        assert ("not a safetensors file" if content else "No such file") in capsys.readouterr().err


# What does not belong


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", 16),
        ("head_dim", 16),
        ("index_head_dim", 32),
        ("index_topk", 9),
        ("compress_rates", {CSA: 4, HCA: 8}),
        ("layer_types", [SLIDING, CSA, HCA, HCA]),
        ("rope_parameters", {name: {"rope_theta": 9.0} for name in ("main", "compress")}),
    ],
)
def test_another_config_is_refused(saved, field, value):
    with pytest.raises(ValueError, match=f"belongs to a config with `{field}="):
        load_prompt_cache(saved, tiny_config(**{field: value}))


def test_another_number_of_layers_is_refused(saved):
    with pytest.raises(ValueError, match="`num_hidden_layers=4`, but this one has `2`"):
        load_prompt_cache(saved, tiny_config(layer_types=[SLIDING, CSA]))


def test_a_model_of_another_dtype_is_refused(saved):
    with pytest.raises(ValueError, match=r"`dtype=torch\.float32`, but the model has `torch\.bfloat16`"):
        load_prompt_cache(saved, CONFIG, model=tiny_model(dtype=torch.bfloat16))


def test_other_weights_are_refused_where_both_sides_know_them(saved, tmp_path):
    other, unsigned = tiny_model(seed=1), tmp_path / "unsigned.safetensors"
    with pytest.raises(ValueError, match="saved with other `weights`"):
        load_prompt_cache(saved, CONFIG, model=other)
    save_prompt_cache(unsigned, filled([5]))
    assert load_prompt_cache(unsigned, CONFIG, model=other).lengths.tolist() == [5]
    assert load_prompt_cache(saved, CONFIG).lengths.tolist() == [40, 33, 21]


def test_the_fingerprint_sees_every_parameter_and_is_the_same_for_a_compiled_model():
    model, seen = tiny_model(), {weights_fingerprint(MODEL)}
    assert weights_fingerprint(model) in seen and weights_fingerprint(torch.compile(model)) in seen
    for parameter in model.parameters():
        parameter.mul_(1.01).add_(0.001)
        fingerprint = weights_fingerprint(model)
        assert fingerprint not in seen
        seen.add(fingerprint)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(saved, kept):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match="is truncated"):
        load_prompt_cache(saved, CONFIG)


@pytest.mark.parametrize("content", [b"hello", b"\x80\x04N.", struct.pack("<Q", 2**60) + b"{}"])
def test_a_file_of_another_kind_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_prompt_cache(path, CONFIG)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_safetensors_of_something_else_are_refused(path, metadata):
    save_file({"weight": torch.zeros(2)}, path, metadata)
    with pytest.raises(ValueError, match="is not a prompt cache"):
        load_prompt_cache(path, CONFIG)


def rewrite(path, tensors=None, **changes):
    """The same file with other header fields, and other tensors."""
    header = vars(prompt_cache_info(path)[0]) | changes
    save_file({**load_file(path), **(tensors or {})}, path, {HEADER: json.dumps(header)})


def test_a_newer_format_is_refused_whatever_else_its_header_has(saved):
    save_file(load_file(saved), saved, {HEADER: '{"format_version": 2, "news": 1}'})
    with pytest.raises(ValueError, match="`format_version=2`"):
        load_prompt_cache(saved, CONFIG)


@pytest.mark.parametrize("header", ["{", "[]", "{}", '{"format_version": 1}', '{"format_version": "1"}'])
def test_a_header_that_cannot_be_read_is_refused(saved, header):
    save_file(load_file(saved), saved, {HEADER: header})
    with pytest.raises(ValueError, match="is damaged: its header cannot be read"):
        load_prompt_cache(saved, CONFIG)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lengths", []),
        ("lengths", [-1, 1, 1]),
        ("lengths", ["4"]),
        ("lengths", 4),
        ("max_cache_len", None),
        ("seq_length", 1.5),
        ("dtype", "nn.Module"),
        ("dtype", ["F32"]),
        ("config", None),
        ("metadata", []),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(saved, field, value):
    rewrite(saved, **{field: value})
    with pytest.raises(ValueError, match=f"is damaged: its header has `{field}="):
        load_prompt_cache(saved, CONFIG)


@pytest.mark.parametrize("changes", [{"lengths": [39, 33, 21]}, {"lengths": [40, 33]}, {"dtype": "BF16"}], ids=str)
def test_state_that_is_not_what_the_header_says_is_refused(saved, changes):
    rewrite(saved, **changes)
    with pytest.raises(ValueError, match="is damaged: `layers"):
        load_prompt_cache(saved, CONFIG)


def test_a_missing_tensor_is_refused(saved):
    tensors, (info, _) = load_file(saved), prompt_cache_info(saved)
    del tensors["layers.2.keys"]
    save_file(tensors, saved, {HEADER: json.dumps(vars(info))})
    with pytest.raises(ValueError, match=r"it has no `layers\.2\.keys`"):
        load_prompt_cache(saved, CONFIG)


def test_too_little_room_is_refused_and_just_enough_is_not(saved):
    with pytest.raises(ValueError, match=r"`max_cache_len=39` is too little room: .* holds 40 tokens"):
        load_prompt_cache(saved, CONFIG, max_cache_len=39)
    assert load_prompt_cache(saved, CONFIG, max_cache_len=40).lengths.tolist() == [40, 33, 21]


def test_nothing_is_allocated_for_what_is_refused(saved, monkeypatch):
    monkeypatch.setattr(DeepseekV4SlidingStaticLayer, "allocate", lambda *_: pytest.fail("allocated"))
    rewrite(saved, {"layers.3.indexer.entries": torch.zeros(3, 9, 16)})
    for arguments in ({}, {"model": tiny_model(seed=1)}, {"max_cache_len": 3}, {"max_rollback": -1}):
        with pytest.raises(ValueError):
            load_prompt_cache(saved, CONFIG, **arguments)


def test_a_cache_without_indexer_cannot_grow_to_where_one_is_needed(path):
    save_prompt_cache(path, filled([20], max_cache_len=32))  # 8 entries, index_topk 8
    with pytest.raises(ValueError, match=r"no `layers\.1\.indexer.*cache so small.*smaller `max_cache_len`"):
        load_prompt_cache(path, CONFIG, max_cache_len=33)
    assert_exact(continued(load_prompt_cache(path, CONFIG, max_cache_len=31)), [20])


def test_the_indexer_is_dropped_where_none_is_needed(path):
    save_prompt_cache(path, filled([20]))
    loaded = load_prompt_cache(path, CONFIG, max_cache_len=32)
    assert loaded.layers[1].indexer is None
    assert_exact(continued(loaded), [20])


# What cannot be saved, and files that never appear


def test_a_cache_without_tokens_is_refused(path):
    cache = filled([5])
    cache.reset()
    for empty in (DeepseekV4StaticCache(CONFIG, 9), cache):
        with pytest.raises(ValueError, match="holds no tokens"):
            save_prompt_cache(path, empty)
    assert not path.exists()


def test_a_cache_that_has_dropped_tokens_is_refused(path):
    cache = filled([8], max_cache_len=9)
    cache.lengths.add_(2)  # as a graph does that the user compiled, where nobody checks for room
    with pytest.raises(ValueError, match=r"lost tokens: it was given 10 .* `max_cache_len=9`"):
        save_prompt_cache(path, cache)


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}])
def test_metadata_that_is_not_strings_is_refused(path, metadata):
    with pytest.raises(ValueError, match="`metadata` must map strings to strings"):
        save_prompt_cache(path, filled([5]), metadata=metadata)


@pytest.mark.parametrize("fails_in", ["save_file", "os.fsync", "os.replace"])
def test_when_writing_fails_the_old_file_stays_and_nothing_else_does(saved, monkeypatch, fails_in):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    content = saved.read_bytes()
    owner, name = (os, fails_in[3:]) if fails_in.startswith("os.") else (save_and_load, fails_in)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="No space left"):
        save_prompt_cache(saved, filled([5]))
    assert saved.read_bytes() == content and list(saved.parent.iterdir()) == [saved]
