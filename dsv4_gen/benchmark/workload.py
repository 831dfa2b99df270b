"""What the benchmark runs: a model of eight layers, and caches that hold a context of random state."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from ..generation_deepseek_v4.sizes import CSA, HCA, SLIDING
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache

ROOM = 256  # tokens beyond the context, for the steps that are timed


def benchmark_config(layers: int = 8) -> DeepseekV4Config:
    """Heads, windows and rates of the public models at an eighth of their width; layer 0 slides, then CSA and HCA."""
    return DeepseekV4Config(
        vocab_size=8192,
        hidden_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=16,
        head_dim=512,
        partial_rotary_factor=64 / 512,
        q_lora_rank=256,
        num_experts_per_tok=4,
        n_routed_experts=16,
        o_groups=4,
        o_lora_rank=128,
        sliding_window=128,
        compress_rates={CSA: 4, HCA: 128},
        index_n_heads=16,
        index_head_dim=128,
        index_topk=128,
        layer_types=[SLIDING] + [CSA if i % 2 == 0 else HCA for i in range(layers - 1)],
        mlp_layer_types=["hash_moe"] + ["moe"] * (layers - 1),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        max_position_embeddings=1_048_576,
    )


def filled_static_cache(
    model: DeepseekV4ForCausalLM, context: int, batch_size: int = 1, max_cache_len: int | None = None
) -> DeepseekV4StaticCache:
    """A static cache that holds `context` tokens of random state in every row; by default with `ROOM` for more."""
    cache = DeepseekV4StaticCache(model.config, max_cache_len=max_cache_len or context + ROOM)
    cache.early_initialization(batch_size, 1, model.config.head_dim, model.dtype, model.device)
    for tensor in cache.tensors().values():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.fill_(context)
    cache.host.lose_count()
    return cache


def filled_dynamic_cache(model: DeepseekV4ForCausalLM, context: int, batch_size: int = 1) -> DynamicCache:
    """transformers' dynamic cache of the same context, `context` a multiple of the rates."""
    config, cache = model.config, DynamicCache(config=model.config)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch_size, *shape, dtype=model.dtype, device=model.device)

    for kind, layer in zip(config.layer_types, cache.layers):
        window = random(1, min(context, config.sliding_window - 1), config.head_dim)
        layer.lazy_initialization(window, window)
        layer.keys = layer.values = window
        layer.cumulative_length = context
        if kind == SLIDING:
            continue
        rate = config.compress_rates[kind]
        for name in layer.entry_count:
            width = config.head_dim if name == "compressor" else config.index_head_dim
            layer.compressed_kv[name], layer.entry_count[name] = random(context // rate, width), context // rate
            if kind == CSA:
                layer.overlap_kv[name], layer.overlap_gate[name] = random(rate, width), random(rate, width)
    return cache


def bytes_read_per_step(model: DeepseekV4ForCausalLM, context: int, batch_size: int = 1) -> int:
    """The weights that one token uses (its experts, one row of the embedding), and the cache that it looks at."""
    config, weights = model.config, 0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        active = min(1.0, batch_size * config.num_experts_per_tok / config.n_routed_experts)
        weights += parameter.nbytes * (active if ".experts." in name else 1)
    cache = 0
    for kind in config.layer_types:
        rows = config.sliding_window * config.head_dim
        if kind == HCA:
            rows += (context // config.compress_rates[HCA]) * config.head_dim
        if kind == CSA:
            entries = context // config.compress_rates[CSA]
            rows += min(entries, config.index_topk) * config.head_dim + entries * config.index_head_dim
        cache += rows * batch_size * model.dtype.itemsize
    return int(weights) + cache
