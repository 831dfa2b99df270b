"""Compiling as people do it: transformers' default `CompileConfig`, torch's defaults, and outputs besides logits."""

from itertools import product

import pytest
import torch
from tiny import CSA, HCA, random_ids, tiny_model
from torch._dynamo.utils import counters
from transformers import CompileConfig

from dsv4_gen import DeepseekV4StaticCache
from dsv4_gen.conventions import CACHE_NAME

KINDS = [CSA, HCA]
MODEL = tiny_model(layer_types=KINDS)
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def default_config(**changes):
    """What an accelerator compiles with unasked, but for the backend, which only traces."""
    config = CompileConfig(backend="eager", mode=None, **changes)
    config._compile_all_devices = True
    return config


def new_graphs(call):
    """What `call` returns, and how many graphs were compiled for it."""
    before = counters["stats"]["unique_graphs"]
    return call(), counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize(
    ("rooms", "batches", "chunk", "graphs"),
    [((48, 64, 80), (1, 2), None, 1), ((48, 64), (1,), 8, 2)],
    ids=["prompt at once", "in chunks"],
)
def test_each_shape_is_compiled_once_and_never_again(rooms, batches, chunk, graphs):
    settings = GREEDY | {"prefill_chunk_size": chunk, "compile_config": default_config()}
    for length, expected in ((9, graphs), (30, 0)):
        for rows, room in product(batches, rooms):
            ids, cache = random_ids(rows, length), DeepseekV4StaticCache(MODEL.config, max_cache_len=room)
            tokens, compiled = new_graphs(lambda: MODEL.generate(ids, **{CACHE_NAME: cache}, **settings))  # noqa: B023
            assert torch.equal(tokens, MODEL.generate(ids, **GREEDY))
            assert compiled == expected


def test_a_longer_prompt_gets_a_larger_cache_and_a_shorter_one_shares_it():
    settings = GREEDY | {"cache_implementation": "static", "compile_config": default_config()}
    model, compiled = tiny_model(layer_types=KINDS), []
    for length in (9, 30, 9):
        ids = random_ids(1, length)
        tokens, graphs = new_graphs(lambda: model.generate(ids, **settings))  # noqa: B023
        assert torch.equal(tokens, model.generate(ids, **GREEDY))
        compiled.append(graphs)
    assert compiled == [1, 1, 0]


@pytest.mark.parametrize("what", ["model", "forward"])
def test_by_hand_with_torchs_defaults_a_shape_seen_before_costs_nothing(what):
    model = tiny_model(layer_types=KINDS)
    if what == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
        run = model
    else:
        run = torch.compile(model, backend="eager")

    @torch.no_grad()
    def greedy(ids, cache):
        logits = [run(input_ids=ids, cache=cache).logits[:, -1:]]
        for _ in range(5):
            logits.append(run(input_ids=logits[-1].argmax(-1), cache=cache).logits)
        return torch.cat(logits, dim=1).argmax(-1)

    for seen, (rows, length) in [(False, (1, 9)), (False, (2, 30)), (True, (1, 9)), (True, (2, 30))]:
        ids, cache = random_ids(rows, length), DeepseekV4StaticCache(model.config, max_cache_len=length + 8)
        tokens, compiled = new_graphs(lambda: greedy(ids, cache))  # noqa: B023
        assert torch.equal(tokens, MODEL.generate(ids, **GREEDY)[:, length:])
        assert compiled == 0 if seen else compiled <= 2  # the prompt, and the single token


def test_outputs_of_a_compiled_generate_are_those_of_an_eager_one():
    asked = dict.fromkeys(("hidden_states", "attentions", "scores", "logits"), True)
    settings = GREEDY | {f"output_{name}": True for name in asked} | {"return_dict_in_generate": True}
    settings |= {"cache_implementation": "static"}
    compiled = MODEL.generate(random_ids(1, 20), compile_config=default_config(), **settings)
    eager = MODEL.generate(random_ids(1, 20), **settings)
    for name in asked:
        ours, theirs = (torch.utils._pytree.tree_leaves(output[name]) for output in (compiled, eager))
        assert len(ours) == len(theirs) > 0
        torch.testing.assert_close(ours, theirs)


def test_outputs_of_a_model_compiled_by_hand():
    ids = random_ids(1, 20)
    asked = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    outputs = []
    for run in (torch.compile(MODEL, backend="eager"), MODEL):
        cache = DeepseekV4StaticCache(MODEL.config, max_cache_len=32)
        with torch.no_grad():
            outputs.append(run(input_ids=ids, cache=cache, **asked))
    for name in ("logits", "hidden_states", "attentions", "router_logits"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name])


def test_inductor_with_torchs_defaults_and_caches_that_the_graph_allocates():
    model = tiny_model(layer_types=[CSA])
    run = torch.compile(model)
    for length in (9, 30):  # by the second length, sizes are symbols
        ids = random_ids(1, length)
        ours, eager = (DeepseekV4StaticCache(model.config, max_cache_len=length + 8) for _ in range(2))
        with torch.no_grad():
            torch.testing.assert_close(
                run(input_ids=ids, cache=ours).logits, model(ids, cache=eager).logits, atol=2e-5, rtol=0
            )
        for name, tensor in eager.layers[0].tensors().items():
            mine = ours.layers[0].tensors()[name]
            torch.testing.assert_close(mine[:, :-1], tensor[:, :-1], atol=2e-5, rtol=0)  # less the spare slot
