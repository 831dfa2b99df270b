"""Tensor and expert parallel: two processes, each with the whole cache, give what one gives with a dynamic cache."""

import os
from contextlib import redirect_stdout

import torch
import torch.distributed as dist
from test_exact import TOLERANCE, dynamic_logits
from tiny import CSA, HCA, CountRegions, random_ids, tiny_model
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import CompileConfig, DeepseekV4ForCausalLM
from transformers.distributed import DistributedConfig
from two_processes import run_in_two_processes

from dsv4_gen import DeepseekV4StaticCache, cli, compile_forward
from dsv4_gen.generation_deepseek_v4.region import has_regions

PROMPT, LENGTH, PADDING = 40, 48, 5  # columns; the first row is padded on the left


@torch.inference_mode()
def compare_with_one_process(checkpoint):
    reference = DeepseekV4ForCausalLM.from_pretrained(checkpoint).eval()
    ids, mask = random_ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :PADDING] = 0
    rows = [ids[0, PADDING:], ids[1]]
    expected = [dynamic_logits(reference, row) for row in rows]

    def check(prefill, step, graphs):
        """A prompt and single tokens, in so many graphs: right, and equal in both processes."""
        torch._dynamo.reset()
        counters.clear()
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        logits = [prefill(input_ids=ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache).logits]
        logits += [step(input_ids=ids[:, i : i + 1].clone(), cache=cache).logits for i in range(PROMPT, LENGTH)]
        logits = torch.cat(logits, dim=1)
        for ours, wanted in zip(logits, expected):
            torch.testing.assert_close(ours[-len(wanted) :], wanted, atol=TOLERANCE, rtol=0)
        assert counters["stats"]["unique_graphs"] == graphs
        of_both = [None, None]
        dist.all_gather_object(of_both, logits)
        assert torch.equal(*of_both)

    for plan in ({"ep_size": 2}, {"tp_plan": "auto"}):
        config = DistributedConfig(tp_size=2, **plan)
        model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, distributed_config=config).eval()
        check(model, model, graphs=0)
        backend = CountRegions()
        forward = compile_forward(model, prefill_chunk_size=16, backend=backend)
        check(forward, forward, graphs=2)
        assert backend.regions == 2 * [2 if has_regions else 0]  # in each graph one for each kind of layer
        assert isinstance(model.model.layers[-1].mlp.experts.down_proj, DTensor)  # as before

    # From here on tensor parallel only, which takes long enough.
    check(model, torch.compile(model, backend="eager"), graphs=1)
    check(model, compile_forward(model), graphs=1)
    counters.clear()
    compile_config = CompileConfig(mode=None, backend="eager")  # else the defaults
    compile_config._compile_all_devices = True
    greedy, static = {"max_new_tokens": 8, "do_sample": False}, {"cache_implementation": "static"}
    tokens = model.generate(ids, attention_mask=mask, compile_config=compile_config, **greedy, **static)
    for row, ours in zip(rows, tokens):
        assert torch.equal(ours[-8:], reference.generate(row[None], **greedy)[0, -8:])
    assert counters["stats"]["unique_graphs"] == 1
    dist.destroy_process_group()


def test_two_processes_give_what_one_does(tmp_path):
    tiny_model(layer_types=[CSA, HCA, HCA]).save_pretrained(tmp_path)
    run_in_two_processes(compare_with_one_process, tmp_path, seconds=500)


def run_demo(folder):
    torch.compile = lambda function, **settings: function  # compiling takes long
    with open(folder / os.environ["RANK"], "w") as printed, redirect_stdout(printed):
        cli.main(["--max-new-tokens", "4"])


def test_the_demo_is_tensor_parallel_and_the_first_process_speaks(tmp_path):
    run_in_two_processes(run_demo, tmp_path, seconds=200)
    spoken, silent = ((tmp_path / rank).read_text() for rank in "01")
    assert "tensor-parallel over 2 processes" in spoken
    assert spoken.count("yes") == 6 and "NO" not in spoken  # three prompts, compiled and eager
    assert silent == ""
