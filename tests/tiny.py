"""Small random-weight DeepSeek-V4 models, for tests that compare with transformers' own dynamic path."""

import torch
from hypothesis import strategies as st
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4_gen import DeepseekV4StaticCache
from dsv4_gen.benchmark.random_model import random_model

SLIDING, HCA, CSA = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"

# What decides a cache's bytes.
CACHE_SIZES = {
    "layer_types": st.lists(st.sampled_from([SLIDING, HCA, CSA]), min_size=1, max_size=4),
    "max_cache_len": st.integers(1, 300),
    "batch_size": st.integers(1, 3),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "max_rollback": st.integers(0, 40),
}


def tiny_config(**changes) -> DeepseekV4Config:
    """Boundaries that are cheap to cross: rates 4 and 16, a window of 32, `index_topk` 8, all kinds of layer."""
    settings = {
        "vocab_size": 128,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "layer_types": [SLIDING, CSA, HCA, CSA],
        "compress_rates": {CSA: 4, HCA: 16},
        "sliding_window": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        # With few heads many of the indexer's scores are exactly 0, and ties are broken by memory layout.
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 2,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | changes
    layers = len(settings["layer_types"])
    settings.setdefault("mlp_layer_types", ["hash_moe"] + ["moe"] * (layers - 1))
    return DeepseekV4Config(num_hidden_layers=layers, **settings)


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> DeepseekV4ForCausalLM:
    """A model of `tiny_config(**changes)` with random weights; logits are of scale 2 to 3."""
    return random_model(tiny_config(**changes), dtype=dtype, seed=seed, scale=0.1)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids, none of which is the padding token 0."""
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


def allocated_cache(config, max_cache_len, batch_size=1, dtype=torch.bfloat16, **sizes) -> DeepseekV4StaticCache:
    """An empty cache with all its tensors."""
    cache = DeepseekV4StaticCache(config, max_cache_len, **sizes)
    cache.early_initialization(batch_size, 1, config.head_dim, dtype, "cpu")
    return cache


class CountRegions:
    """A backend that runs graphs as they are, and counts the regions in each."""

    def __init__(self):
        self.regions = []

    def __call__(self, graph, inputs):
        self.regions.append(sum("subgraph" in name for name, _ in graph.named_children()))
        return graph
