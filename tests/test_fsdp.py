"""Weights that FSDP2 shards over two processes (gloo, on one machine): eager calls, and what compiling says."""

import pytest
import torch
import torch.distributed as dist
from tiny import random_ids, tiny_model
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from transformers import CompileConfig
from two_processes import run_in_two_processes

from dsv4_gen import DeepseekV4StaticCache, compile_forward, load_prompt_cache, save_prompt_cache


def in_each_process(folder):
    dist.init_process_group("gloo")
    whole, ids, greedy = tiny_model(), random_ids(2, 20), {"max_new_tokens": 4, "do_sample": False}
    compiles = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiles._compile_all_devices = True
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        model = tiny_model()
        for module in (*model.model.layers, model):
            fully_shard(module, offload_policy=policy)
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        logits = torch.cat([model(call, cache=cache).logits for call in (ids[:, :15], ids[:, 15:])], dim=1)
        torch.testing.assert_close(logits, whole(ids).logits, atol=2e-5, rtol=0)

        expected, static = whole.generate(ids, **greedy), greedy | {"cache_implementation": "static"}
        assert torch.equal(model.generate(ids, prefill_chunk_size=8, **static), expected)
        with pytest.warns(UserWarning, match="leaves this model uncompiled: `fully_shard`"):
            assert torch.equal(model.generate(ids, compile_config=compiles, **static), expected)
        with pytest.raises(ValueError, match="hooks that turn the compiler off"):
            compile_forward(model)

        # The file is that of the whole model.
        save_prompt_cache(f"{folder}/{dist.get_rank()}", cache, model=model)
        assert load_prompt_cache(f"{folder}/{dist.get_rank()}", whole.config, model=whole).lengths.tolist() == [20, 20]
    dist.destroy_process_group()


def test_two_processes_with_a_half_of_each_weight(tmp_path):
    run_in_two_processes(in_each_process, tmp_path, seconds=120)
