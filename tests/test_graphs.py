"""Graphs: one to decode, one more to prefill in chunks, whatever the prompts. Counted with the eager backend."""

import pytest
import torch
from test_exact import dynamic_logits
from tiny import CSA, HCA, SLIDING, CountRegions, random_ids, tiny_model
from torch._dynamo.utils import counters
from transformers import CompileConfig

from dsv4_gen import DeepseekV4StaticCache, DeepseekV4StaticForward, compile_forward
from dsv4_gen.conventions import CACHE_NAME
from dsv4_gen.generation_deepseek_v4.region import has_regions

MODEL = tiny_model()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def count_from_zero():
    counters.clear()


def test_generate_decodes_every_prompt_with_one_graph():
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    compile_config._compile_all_devices = True
    static = {"cache_implementation": "static", "max_cache_len": 128, "compile_config": compile_config}
    for length, padding, new_tokens in [(24, 0, 40), (24, 3, 40), (5, 0, 90), (70, 20, 25), (1, 0, 90)]:
        ids, mask = random_ids(2, length), torch.ones(2, length, dtype=torch.long)
        mask[0, :padding] = ids[0, :padding] = 0
        settings = {"max_new_tokens": new_tokens, "do_sample": False}
        tokens = MODEL.generate(ids, attention_mask=mask, **settings, **static)
        for row in range(2):
            alone = MODEL.generate(ids[row : row + 1, mask[row].bool()], **settings)
            assert torch.equal(tokens[row, length:], alone[0, -new_tokens:])
        assert graphs() == 1


@pytest.mark.parametrize("chunk_size", [None, 8])
def test_compile_forward_has_one_graph_to_decode_and_one_for_chunks(chunk_size):
    forward = compile_forward(MODEL, prefill_chunk_size=chunk_size, backend="eager")
    for length in (5, 24, 37, 61, 200):
        ids, cache = random_ids(1, length + 20), DeepseekV4StaticCache(MODEL.config, max_cache_len=220)
        logits = [forward(ids[:, :length], cache=cache).logits]
        logits += [forward(ids[:, i : i + 1], cache=cache).logits for i in range(length, length + 20)]
        torch.testing.assert_close(torch.cat(logits, 1)[0], dynamic_logits(MODEL, ids[0]), atol=2e-5, rtol=0)
        assert graphs() == (1 if chunk_size is None else 2)


def test_a_prompt_in_chunks_keeps_its_padding_and_the_logits_that_are_wanted():
    forward = compile_forward(MODEL, prefill_chunk_size=8, backend="eager")
    ids, mask = random_ids(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[1, :13] = 0
    expected = dynamic_logits(MODEL, ids[1, 13:])
    for keep in (0, 3, 8, 21, torch.tensor([13, 20])):
        cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=32)
        logits = forward(ids, cache=cache, attention_mask=mask, logits_to_keep=keep).logits
        wanted = expected[keep - 13] if torch.is_tensor(keep) else expected[-keep:]
        assert logits.shape[1] == (len(keep) if torch.is_tensor(keep) else keep or 21)
        torch.testing.assert_close(logits[1, -len(wanted) :], wanted, atol=2e-5, rtol=0)
        assert cache.lengths.tolist() == [21, 8]


@pytest.mark.parametrize(
    "make", [lambda: MODEL, lambda: DeepseekV4StaticForward(MODEL)], ids=["model", "static forward"]
)
def test_a_graph_compiled_by_hand_drops_what_does_not_fit_and_the_next_call_says_so(make):
    compiled = torch.compile(make(), fullgraph=True, dynamic=False, backend="eager")
    ids, cache = random_ids(1, 12), DeepseekV4StaticCache(MODEL.config, max_cache_len=8, max_rollback=4)
    MODEL(ids[:, :3], cache=cache)
    for i in range(3, 12):
        logits = compiled(input_ids=ids[:, i : i + 1].clone(), cache=cache).logits
        if i < 8:
            expected = dynamic_logits(MODEL, ids[0, : i + 1])[-1:]
            torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=0)
    assert graphs() == 1
    with pytest.raises(ValueError, match="needs room for 13 tokens in a row, which holds 12"):
        MODEL(ids[:, :1], cache=cache)


def test_a_first_call_in_a_graph_compiled_by_hand_allocates_there():
    compiled = torch.compile(MODEL, fullgraph=True, dynamic=False, backend="eager")
    ids, cache = random_ids(1, 6), DeepseekV4StaticCache(MODEL.config, max_cache_len=8)
    logits = [compiled(input_ids=ids[:, i : i + 1].clone(), cache=cache).logits for i in range(6)]
    torch.testing.assert_close(torch.cat(logits, 1)[0], dynamic_logits(MODEL, ids[0]), atol=2e-5, rtol=0)
    assert graphs() == 2  # the one that allocates, and the one for all others


def test_a_model_without_a_cache_still_compiles_as_upstream_does():
    compiled = torch.compile(MODEL, fullgraph=True, dynamic=False, backend="eager")
    ids = random_ids(1, 40)
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits[0], dynamic_logits(MODEL, ids[0]))


def test_unused_capacity_is_left_out_at_one_graph_for_each_doubling():
    forward = compile_forward(MODEL, backend="eager", min_attended_len=40)
    ids, cache = random_ids(1, 100), DeepseekV4StaticCache(MODEL.config, max_cache_len=1000)
    logits = [forward(ids[:, i : i + 1], cache=cache).logits for i in range(100)]
    torch.testing.assert_close(torch.cat(logits, 1)[0], dynamic_logits(MODEL, ids[0]), atol=2e-5, rtol=0)
    assert graphs() == 3  # 40, 80 and 160 tokens


def test_compile_forward_checks_before_it_runs():
    with pytest.raises(ValueError, match="`prefill_chunk_size` must be at least 2"):
        compile_forward(MODEL, prefill_chunk_size=1)
    with pytest.raises(ValueError, match="`min_attended_len` must be at least 1"):
        compile_forward(MODEL, min_attended_len=0)
    forward = compile_forward(MODEL, prefill_chunk_size=8, backend="eager")
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=8)
    with pytest.raises(ValueError, match="room for 9 tokens"):
        forward(random_ids(1, 9), cache=cache)
    assert cache.get_seq_length() == 0 and graphs() == 0


def test_outputs_that_hooks_collect_come_from_an_eager_call():
    forward = compile_forward(MODEL, backend="eager")
    cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=8)
    output = forward(random_ids(1, 1), cache=cache, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 5 and len(output.attentions) == 4 and graphs() == 0


@pytest.mark.skipif(not has_regions, reason="torch before 2.13 compiles the layers one by one")
def test_a_kind_of_layer_is_traced_once_however_many_there_are():
    backend = CountRegions()
    for pairs in (1, 4):
        model = tiny_model(layer_types=[SLIDING] + pairs * [CSA, HCA])
        ids, cache = random_ids(1, 50), DeepseekV4StaticCache(model.config, max_cache_len=50)
        forward = compile_forward(model, backend=backend)
        logits = torch.cat([forward(ids[:, i : i + 1], cache=cache).logits for i in range(50)], dim=1)
        torch.testing.assert_close(logits[0], dynamic_logits(model, ids[0]), atol=2e-5, rtol=0)
    assert backend.regions == [3, 3]


@pytest.mark.skipif(not has_regions, reason="torch before 2.13 compiles the layers one by one")
@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.2.self_attn.q_b_proj"])
def test_a_hook_runs_in_a_graph_and_its_layer_is_no_region(path):
    model, backend, seen = tiny_model(layer_types=[SLIDING, CSA, HCA]), CountRegions(), {}

    def halve(module, args, output):
        seen["halved"] = output / 2
        return output / 2

    model.get_submodule(path).register_forward_hook(halve)
    ids, cache = random_ids(1, 20), DeepseekV4StaticCache(model.config, max_cache_len=20)
    expected = dynamic_logits(model, ids[0])
    in_eager_mode = seen["halved"][:, -1:]
    forward = compile_forward(model, backend=backend)
    logits = torch.cat([forward(ids[:, i : i + 1], cache=cache).logits for i in range(20)], dim=1)
    torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(seen["halved"], in_eager_mode, atol=2e-5, rtol=0)
    assert backend.regions == [2]


def test_inductor_agrees_with_the_dynamic_model():
    ids, cache = random_ids(2, 50), DeepseekV4StaticCache(MODEL.config, max_cache_len=50)
    forward = compile_forward(MODEL)
    logits = [forward(ids[:, :10], cache=cache).logits]
    logits += [forward(ids[:, i : i + 1], cache=cache).logits for i in range(10, 50)]
    for row, ours in zip(ids, torch.cat(logits, 1)):
        torch.testing.assert_close(ours, dynamic_logits(MODEL, row), atol=2e-5, rtol=0)
    assert graphs() == 1


@pytest.mark.parametrize("padded", [False, True])
def test_between_decode_steps_the_host_never_waits_for_the_device(monkeypatch, padded):
    model = tiny_model(mlp_layer_types=["moe"] * 4)
    model.set_experts_implementation("batched_mm")  # upstream's other implementations do wait
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)  # what a graph would run, seen
    forward = compile_forward(model)
    ids, cache = random_ids(2, 20), DeepseekV4StaticCache(model.config, max_cache_len=30)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0 if padded else 1
    forward(ids[:, :10], attention_mask=mask[:, :10], cache=cache)
    forward(ids[:, 10:11], cache=cache)

    def waits(*args):
        raise AssertionError("the host waits for the device")

    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    for i in range(11, 20):
        forward(ids[:, i : i + 1], cache=cache)
        masked = {"attention_mask": mask[:, : i + 1] if padded else None, CACHE_NAME: cache}
        model.prepare_inputs_for_generation(ids[:, : i + 1], next_sequence_length=1, **masked)
