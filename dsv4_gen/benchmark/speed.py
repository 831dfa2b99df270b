"""What a decode step takes: the static cache compiled and eager, beside transformers' dynamic cache, in one run.

    python -m dsv4_gen bench --contexts 1024 8192 --dtype bfloat16 --batch 1

A context is filled by writing random state, not by prefilling it. Steps of all contenders take turns; the table has
their medians and quartiles, and the *roofline*: the bytes that a step must read, over the bandwidth that a large
matrix-vector product reaches in the same run.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from ..generation_deepseek_v4.cache_layers import CSA, HCA, SLIDING
from ..generation_deepseek_v4.compiled import DeepseekV4StaticForward, compile_forward
from ..generation_deepseek_v4.forward import CACHE_NAME
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from .random_model import random_model

WARM_UP, ROUNDS = 3, 20
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


def filled_static_cache(model: DeepseekV4ForCausalLM, context: int, batch_size: int) -> DeepseekV4StaticCache:
    """A static cache that holds `context` tokens of random state in every row."""
    cache = DeepseekV4StaticCache(model.config, max_cache_len=context + ROOM)
    cache.early_initialization(batch_size, 1, model.config.head_dim, model.dtype, model.device)
    for tensor in cache.tensors().values():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.fill_(context)
    cache.recount()
    return cache


def filled_dynamic_cache(model: DeepseekV4ForCausalLM, context: int, batch_size: int) -> DynamicCache:
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


def decode_steps(model: DeepseekV4ForCausalLM, context: int, batch_size: int) -> dict[str, Callable[[], object]]:
    """One decode step of each contender, by name, on a context of its own."""
    token = torch.ones(batch_size, 1, dtype=torch.long)
    dynamic = filled_dynamic_cache(model, context, batch_size)
    eager, compiled = (filled_static_cache(model, context, batch_size) for _ in range(2))
    run_eager, run_compiled = DeepseekV4StaticForward(model), compile_forward(model)
    return {
        "dynamic, eager": lambda: model(token, **{CACHE_NAME: dynamic}),
        "static, eager": lambda: run_eager(token, cache=eager),
        "static, compiled": lambda: run_compiled(token, cache=compiled),
    }


def interleaved_seconds(steps: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of every round of every step; the steps take turns, so that noise meets all of them."""
    seconds = {name: [] for name in steps}
    for round_number in range(WARM_UP + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def bytes_read_per_step(model: DeepseekV4ForCausalLM, context: int, batch_size: int) -> int:
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


def bandwidth() -> float:
    """Bytes per second that a matrix-vector product of 512 MiB reaches, the best of several."""
    matrix, vector = torch.randn(16384, 8192), torch.randn(8192)
    seconds = interleaved_seconds({"product": lambda: matrix @ vector}, rounds=5)["product"]
    return matrix.nbytes / min(seconds)


@torch.inference_mode()
def run(
    contexts: list[int], dtypes: list[torch.dtype], batches: list[int], layers: int, json_path: Path | None
) -> list[dict]:
    """Time decode steps over contexts, dtypes and batches; write all of it to `json_path` if there is one.

    Returns:
        A row per setting, for `format_table`.
    """
    rows, records, peak = [], [], bandwidth()
    for dtype in dtypes:
        model = random_model(benchmark_config(layers), dtype=dtype)
        for batch_size in batches:
            for context in contexts:
                torch._dynamo.reset()
                seconds = interleaved_seconds(decode_steps(model, context, batch_size))
                floor = bytes_read_per_step(model, context, batch_size) / peak
                medians = {name: median(values) * 1e3 for name, values in seconds.items()}
                low, _, high = quantiles(seconds["static, compiled"], n=4)
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "batch": batch_size,
                        "context": context,
                        **{f"{name}, ms": value for name, value in medians.items()},
                        "quartiles": f"{low * 1e3:.1f}-{high * 1e3:.1f}",
                        "times faster": medians["dynamic, eager"] / medians["static, compiled"],
                        "% of roofline": 100 * floor * 1e3 / medians["static, compiled"],
                    }
                )
                records.append(rows[-1] | {"seconds": seconds, "roofline seconds": floor})
    if json_path is not None:
        json_path.write_text(json.dumps({"bandwidth": peak, "torch": torch.__version__, "decode": records}, indent=1))
    return rows
