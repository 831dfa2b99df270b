"""One compiled forward for many: threads, capacities and batches share it, and nothing of the model is changed."""

from concurrent.futures import ThreadPoolExecutor

import torch
from test_exact import dynamic_logits
from tiny import CSA, SLIDING, random_ids, tiny_model
from torch._dynamo.utils import counters

from dsv4_gen import DeepseekV4StaticCache, compile_forward
from dsv4_gen.generation_deepseek_v4 import graph_per_shape
from dsv4_gen.generation_deepseek_v4.experts import experts_in_place, reads_in_place

MODEL = tiny_model(layer_types=[SLIDING, CSA])


def run(forward, seed, max_cache_len=48):
    """Logits of 40 tokens: a prompt at once, then one by one."""
    ids, cache = random_ids(1, 40, seed=seed), DeepseekV4StaticCache(MODEL.config, max_cache_len=max_cache_len)
    with torch.no_grad():
        logits = [forward(ids[:, :20], cache=cache).logits]
        logits += [forward(ids[:, i : i + 1], cache=cache).logits for i in range(20, 40)]
    return torch.cat(logits, dim=1)[0]


def test_threads_decode_through_one_compiled_forward():
    settings = dict(vars(MODEL.config))
    forward = compile_forward(MODEL, backend="eager")
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda seed: run(forward, seed), range(8)))
    for seed, logits in enumerate(results):
        expected = dynamic_logits(MODEL, random_ids(1, 40, seed=seed)[0])
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    assert vars(MODEL.config) == settings


def test_which_experts_are_read_in_place_is_a_matter_of_the_call_not_of_the_model():
    with experts_in_place(MODEL, tokens=1):
        assert reads_in_place() and MODEL.config._experts_implementation == "grouped_mm"
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(reads_in_place).result()
    assert not reads_in_place()


def test_more_capacities_than_the_compiler_keeps_graphs_of_one_function():
    model, before = tiny_model(layer_types=[SLIDING]), counters["stats"]["unique_graphs"]
    forward, ids = compile_forward(model, backend="eager"), random_ids(1, 1)
    for _ in range(2):
        for capacity in range(50, 60):
            logits = forward(ids, cache=DeepseekV4StaticCache(model.config, max_cache_len=capacity)).logits
            torch.testing.assert_close(logits[0], dynamic_logits(model, ids[0]), atol=2e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] - before == 10


def test_of_too_many_shapes_the_one_that_was_not_used_for_longest_is_compiled_anew(monkeypatch):
    monkeypatch.setattr(graph_per_shape, "MOST_SHAPES", 2)
    model, compiled = tiny_model(layer_types=[SLIDING]), []
    forward, ids = compile_forward(model, backend="eager"), random_ids(1, 1)
    for capacity in (50, 51, 50, 52, 50, 51):
        before = counters["stats"]["unique_graphs"]
        forward(ids, cache=DeepseekV4StaticCache(model.config, max_cache_len=capacity))
        compiled.append(counters["stats"]["unique_graphs"] - before)
    assert compiled == [1, 1, 0, 1, 0, 1]


def test_a_compiled_call_that_fails_half_way_asks_for_a_reset():
    model = tiny_model(layer_types=[SLIDING])

    def failing(graph, inputs):
        def run(*inputs):
            raise MemoryError

        return run

    cache = DeepseekV4StaticCache(model.config, max_cache_len=8)
    forward, ids = compile_forward(model, backend=failing), random_ids(1, 1)
    for error, message in ((MemoryError, ""), (ValueError, "failed half-way")):
        try:
            forward(ids, cache=cache)
        except error as raised:
            assert message in str(raised)
        else:
            raise AssertionError("it did not fail")
