"""The benchmark compares like with like: its contenders give the same numbers, and what it counts is what is there."""

import json

import pytest
import torch
from tiny import allocated_cache, random_ids, tiny_model

from dsv4_gen import DeepseekV4StaticCache
from dsv4_gen.benchmark.speed import attend_densely
from dsv4_gen.benchmark.timing import interleaved_seconds
from dsv4_gen.benchmark.workload import benchmark_config, filled_dynamic_cache, filled_static_cache
from dsv4_gen.cli import main
from dsv4_gen.conventions import CACHE_NAME

MODEL = tiny_model()


def test_attending_densely_gives_the_numbers_of_gathering():
    ids, cache = random_ids(1, 120), DeepseekV4StaticCache(MODEL.config, max_cache_len=120)
    logits = [MODEL(ids[:, :80], **{CACHE_NAME: cache}).logits]
    logits += [MODEL(ids[:, i : i + 1], **{CACHE_NAME: cache}).logits for i in range(80, 100)]
    with attend_densely():
        logits += [MODEL(ids[:, i : i + 1], **{CACHE_NAME: cache}).logits for i in range(100, 120)]
    expected = MODEL(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_both_caches_hold_the_context_that_is_asked_for(batch_size):
    static = filled_static_cache(MODEL, 256, batch_size)
    dynamic = filled_dynamic_cache(MODEL, 256, batch_size)
    assert static.lengths.tolist() == batch_size * [256] and dynamic.get_seq_length() == 256
    for cache in (static, dynamic):
        MODEL(random_ids(batch_size, 1), **{CACHE_NAME: cache})
        assert cache.get_seq_length() == 257


def test_steps_take_turns_and_warm_up():
    calls = []
    seconds = interleaved_seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, warm_up=1)
    assert "".join(calls) == "ababab" and [len(values) for values in seconds.values()] == [2, 2]


def test_the_command_prints_tables_and_writes_them(tmp_path, capsys):
    main(["bench", "--sections", "bytes", "--contexts", "1024", "--batch", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "bench.json").read_text())["bytes"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"] and "cache, MiB" in capsys.readouterr().out
    cache = allocated_cache(benchmark_config(), 1024, dtype=torch.float32)
    assert rows[0]["cache, MiB"] == pytest.approx(cache.nbytes / 2**20)
