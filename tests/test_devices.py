"""Models whose layers run on several devices, or whose weights are elsewhere while nothing runs.

Two devices are simulated (`simulated_devices.py`): numbers are right, and tensors that do not meet raise. Where a
compiler takes part, the second device is "meta", which has shapes only.
"""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from simulated_devices import CPU, FIRST, SECOND, simulated_devices
from tiny import CSA, HCA, SLIDING, random_ids, tiny_model
from torch._dynamo.utils import counters
from transformers import CompileConfig, DeepseekV4ForCausalLM

import dsv4_gen
from dsv4_gen import DeepseekV4StaticCache, compile_forward, load_prompt_cache, save_prompt_cache
from dsv4_gen.prompt_cache import weights_fingerprint

GREEDY = {"max_new_tokens": 4, "do_sample": False}
STATIC = GREEDY | {"cache_implementation": "static"}
IDS, MASK = random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
MASK[1, :7] = 0


def model_of(**changes):
    """A model whose experts are read in place: upstream's default tells the CPU from all other devices."""
    model = tiny_model(**changes)
    model.set_experts_implementation("batched_mm")
    return model


MODEL = model_of()
TOKENS = MODEL.generate(IDS, **GREEDY)


def device_map(model, first, second, head=None):
    """The first half of the layers on `first`, all that comes after on `second`."""
    layers = len(model.model.layers)
    halves = {f"model.layers.{i}": first if i < layers // 2 else second for i in range(layers)}
    ends = {"model.hc_head": second, "model.norm": second, "lm_head": head or second}
    return {"model.embed_tokens": first, "model.rotary_emb": first, **halves, **ends}


def dispatched(first, second, hooks=True, model=None, **more):
    """A model over two devices, with accelerate's hooks or as they leave it behind."""
    model = model or model_of()
    model = dispatch_model(model, device_map(model, first, second, **more), main_device=first)
    return model if hooks else remove_hook_from_module(model, recurse=True)


def devices(cache):
    """The devices of each layer's state."""
    return [{tensor.device for tensor in layer.tensors().values()} for layer in cache.layers]


def step_by_step(model, ids=IDS, cache=None, prompt=17):
    """The logits of a prompt and then of single tokens, on the CPU."""
    cache = cache or DeepseekV4StaticCache(model.config, max_cache_len=64)
    calls = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    return torch.cat([model(call, cache=cache).logits.cpu() for call in calls], dim=1)


def assert_exact(logits, ids=IDS):
    torch.testing.assert_close(logits, MODEL(ids, use_cache=False).logits, atol=2e-5, rtol=0)


# Several devices


@pytest.mark.parametrize("hooks", [True, False])
def test_each_layers_state_is_where_the_layer_runs_and_lengths_are_where_the_model_begins(hooks):
    with simulated_devices():
        model = dispatched(FIRST, SECOND, hooks)
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        assert_exact(step_by_step(model, cache=cache))
    assert devices(cache) == [{FIRST}, {FIRST}, {SECOND}, {SECOND}]
    assert {counter.device for counter in cache.counters().values()} == {FIRST}


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 8])
def test_generate_over_two_devices_with_inputs_from_a_third(hooks, chunk_size):
    with simulated_devices():
        model = dispatched(FIRST, SECOND, hooks)
        assert torch.equal(model.generate(IDS, prefill_chunk_size=chunk_size, **STATIC), TOKENS)
        padded = model.generate(IDS, attention_mask=MASK, prefill_chunk_size=chunk_size, **STATIC)
    alone = MODEL.generate(IDS[1:, 7:], **GREEDY)
    assert torch.equal(padded[1, 20:], alone[0, 13:])


@pytest.mark.parametrize("hooks", [True, False])
def test_what_layers_need_moves_once_per_change_of_device(hooks):
    with simulated_devices() as moves:
        model = dispatched(FIRST, SECOND, hooks)
        ids, cache = IDS.to(FIRST), DeepseekV4StaticCache(model.config, max_cache_len=64)
        model(ids, cache=cache)
        moves.clear()
        model(ids[:, :1], cache=cache)
    # The hidden states, the ids, the positions, the three tensors of a `Chunk`, and cos and sin of two kinds.
    assert moves.count((FIRST, SECOND)) == 10
    assert moves.count((SECOND, FIRST)) == hooks  # accelerate brings the logits back


def test_a_head_on_a_device_of_its_own_and_ids_and_masks_from_anywhere():
    with simulated_devices():
        model = dispatched(FIRST, SECOND, hooks=False, head=FIRST)
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        logits = model(IDS.to(SECOND), attention_mask=MASK, cache=cache, output_hidden_states=True).logits
        assert logits.device == FIRST
        logits = logits.cpu()
    assert_exact(logits[:1], IDS[:1])
    assert_exact(logits[1:, 7:], IDS[1:, 7:])


def test_rollback_beams_and_batches_over_two_devices():
    results = []
    with simulated_devices():
        for model in (MODEL, dispatched(FIRST, SECOND, hooks=False)):
            cache = DeepseekV4StaticCache(model.config, max_cache_len=64, max_rollback=8)
            step_by_step(model, cache=cache)
            cache.crop(-6)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 1, 3]))
            results.append(step_by_step(model, random_ids(3, 8, seed=1), cache, prompt=7))
        assert devices(cache) == [{FIRST}, {FIRST}, {SECOND}, {SECOND}]
        cache.reset()
        assert_exact(step_by_step(model, random_ids(3, 8), cache, prompt=7), random_ids(3, 8))
    assert torch.equal(*results)


def test_a_prompt_cache_goes_where_the_layers_are(tmp_path):
    path = tmp_path / "prompt.safetensors"
    with simulated_devices():
        model = dispatched(FIRST, SECOND)
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        model(IDS[:, :15], cache=cache)
        save_prompt_cache(path, cache, model=model)
        for loader, expected in ((MODEL, [{CPU}] * 4), (model, [{FIRST}, {FIRST}, {SECOND}, {SECOND}])):
            cache = load_prompt_cache(path, loader.config, model=loader)
            assert devices(cache) == expected
            logits = loader(IDS[:, 15:], cache=cache).logits.cpu()
            torch.testing.assert_close(logits, MODEL(IDS).logits[:, 15:], atol=2e-5, rtol=0)


def test_state_on_another_device_than_its_layer_is_refused_before_anything_changes():
    with simulated_devices():
        model = dispatched(FIRST, SECOND)
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        cache.early_initialization(2, 1, model.config.head_dim, model.dtype, FIRST)
        with pytest.raises(ValueError, match=r"state of layer 2 is on privateuseone:0, .* on privateuseone:1"):
            model(IDS, cache=cache)
        assert cache.get_seq_length() == 0


# Compiled


def test_without_hooks_the_whole_model_is_one_graph_over_its_devices():
    regions = []

    def count_regions(graph, inputs):
        regions.append(sum("subgraph" in name for name, _ in graph.named_children()))
        return graph

    counters.clear()
    model = dispatched("cpu", "meta", hooks=False, model=model_of(layer_types=[HCA] * 4, mlp_layer_types=["moe"] * 4))
    forward, ids = compile_forward(model, backend=count_regions, prefill_chunk_size=8), random_ids(1, 20)
    cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
    for call in (ids[:, :17], *ids[:, 17:].split(1, dim=1)):
        assert forward(call, cache=cache).logits.device.type == "meta"
    assert counters["stats"]["unique_graphs"] == 2 and cache.lengths.tolist() == [20]
    assert regions == [2, 2]  # one for each device: all layers are of one kind


def test_a_first_call_in_a_graph_compiled_by_hand_allocates_on_every_device():
    counters.clear()
    model = dispatched("cpu", "meta", hooks=False, model=model_of(layer_types=[SLIDING, CSA]))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
    for _ in range(3):
        compiled(input_ids=random_ids(1, 1), cache=cache)
    assert counters["stats"]["unique_graphs"] == 2
    assert [found.pop().type for found in devices(cache)] == ["cpu", "meta"]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True), "remove_hook_from_module"),
        (lambda model: cpu_offload(model, "cpu"), "offloaded weights in hooks"),
    ],
    ids=["dispatched", "offloaded"],
)
def test_a_model_with_accelerates_hooks_runs_eagerly_and_compile_forward_says_why(hook, message):
    model, compile_config = hook(tiny_model()), CompileConfig(fullgraph=True, backend="eager", mode=None)
    compile_config._compile_all_devices = True
    with pytest.raises(ValueError, match=message):
        compile_forward(model)
    counters.clear()
    with pytest.warns(UserWarning, match=f"leaves this model uncompiled.*{message}"):
        model.generate(IDS, compile_config=compile_config, **STATIC)
    assert counters["stats"]["unique_graphs"] == 0


# Offloaded weights


def offloaded(way, folder):
    """A model whose weights are on the CPU or a disk while nothing runs, as accelerate and transformers do it."""
    model = tiny_model()
    if way == "cpu_offload":
        return cpu_offload(model, "cpu")
    if way == "disk_offload":
        return disk_offload(model, folder, "cpu")
    if way == "device_map":
        places = device_map(model, "cpu", "disk")
        return dispatch_model(model, places, main_device="cpu", offload_dir=folder)
    model.save_pretrained(folder / "model")
    places = device_map(model, "cpu", "disk")
    return DeepseekV4ForCausalLM.from_pretrained(folder / "model", device_map=places, offload_folder=folder / "offload")


WAYS = ["cpu_offload", "disk_offload", "device_map", "from_pretrained"]


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_weights_give_the_same_tokens_and_state_is_never_on_meta(way, tmp_path):
    expected, model = tiny_model().generate(IDS, **GREEDY), offloaded(way, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    for more in ({}, {"prefill_chunk_size": 8}):
        assert torch.equal(model.generate(IDS, **STATIC, **more), expected)
    cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
    model(IDS, cache=cache)
    assert devices(cache) == [{CPU}] * 4


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_weights_have_the_fingerprint_of_the_model(way, tmp_path):
    model = offloaded(way, tmp_path)
    assert weights_fingerprint(model) == weights_fingerprint(tiny_model())


def test_weights_that_are_not_there_cannot_be_compared(tmp_path):
    path, cache = tmp_path / "prompt.safetensors", DeepseekV4StaticCache(MODEL.config, max_cache_len=64)
    MODEL(IDS, cache=cache)
    with torch.device("meta"):
        empty = DeepseekV4ForCausalLM(MODEL.config)
    with pytest.raises(ValueError, match=r"`model\.embed_tokens\.weight` is on the meta device"):
        save_prompt_cache(path, cache, model=empty)
    assert not path.exists()
    save_prompt_cache(path, cache, model=MODEL)
    with pytest.raises(ValueError, match="leave out `model`"):
        load_prompt_cache(path, MODEL.config, model=empty)


# Imported after the model was dispatched


@pytest.fixture
def before_the_import():
    dsv4_gen.unregister()
    yield
    dsv4_gen.register()


@pytest.mark.parametrize("hooks", [True, False])
def test_importing_after_the_model_was_dispatched(before_the_import, hooks):
    model = dispatch_model(model_of(), {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    model = model if hooks else remove_hook_from_module(model, recurse=True)
    dsv4_gen.register()
    assert_exact(step_by_step(model))
    assert torch.equal(model.generate(IDS, prefill_chunk_size=8, **STATIC), TOKENS)
