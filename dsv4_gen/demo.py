"""The main job, shown: one model generates with transformers' dynamic cache and with the static cache, compiled."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from tqdm import tqdm
from transformers import CompileConfig, DeepseekV4ForCausalLM

from .generation_deepseek_v4.sizes import CSA
from .memory import plan_cache_memory

PROMPT_LENGTHS = (5, 24, 61)


def run_demo(model: DeepseekV4ForCausalLM, prompts: list[Tensor], max_new_tokens: int) -> list[dict]:
    """Generate from each prompt with both caches, greedily.

    Args:
        model: the model.
        prompts: `(1, seq)` each.
        max_new_tokens: per prompt.

    Returns:
        A row per prompt: its length, tokens per second of both, graphs compiled, whether the compiled and the eager
        static cache give the dynamic one's tokens, bytes of the static cache, and the tokens.
    """
    # One cache size for all prompts, so that they share a graph.
    max_cache_len = max(prompt.shape[1] for prompt in prompts) + max_new_tokens
    settings = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "do_sample": False}
    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode=None)
    compile_config._compile_all_devices = True
    eager = {"cache_implementation": "static", "max_cache_len": max_cache_len}
    static = eager | {"compile_config": compile_config}
    # Before the first graph, so that its compilation is not counted as generation.
    graphs_before = counters["stats"]["unique_graphs"]
    with progress_bar("compiling the decode step"):
        model.generate(prompts[0], **settings | {"max_new_tokens": 3, "min_new_tokens": 3}, **static)

    rows = []
    for prompt in tqdm(prompts, desc="generating", leave=False):
        dynamic_tokens, dynamic_seconds = _timed(lambda: model.generate(prompt, **settings))  # noqa: B023
        static_tokens, static_seconds = _timed(lambda: model.generate(prompt, **settings, **static))  # noqa: B023
        rows.append(
            {
                "prompt": prompt.shape[1],
                "dynamic tok/s": max_new_tokens / dynamic_seconds,
                "static tok/s": max_new_tokens / static_seconds,
                "graphs": counters["stats"]["unique_graphs"] - graphs_before,
                "same tokens": torch.equal(dynamic_tokens, static_tokens),
                "same tokens, eager": torch.equal(dynamic_tokens, model.generate(prompt, **settings, **eager)),
                "cache bytes": plan_cache_memory(model.config, max_cache_len, dtype=model.dtype).total,
                "tokens": static_tokens,
            }
        )
        graphs_before = counters["stats"]["unique_graphs"]
    return rows


def random_prompts(vocab_size: int) -> list[Tensor]:
    """Prompts of `PROMPT_LENGTHS` random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (1, length), generator=generator) for length in PROMPT_LENGTHS]


def describe(model: DeepseekV4ForCausalLM) -> str:
    """One line on what kind of model it is."""
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    shared = f", tensor-parallel over {model.tp_size} processes" if model.tp_size else ""
    return (
        f"DeepSeek-V4 with {config.num_hidden_layers} layers, {parameters:.1f}M parameters, {model.dtype}, "
        f"window {config.sliding_window}, rates {list(config.compress_rates.values())}, top {config.index_topk} of "
        f"the {config.layer_types.count(CSA)} CSA layers' entries{shared}"
    )


@contextmanager
def progress_bar(description: str) -> Iterator[None]:
    """A bar that ticks with the seconds while one long call runs."""
    done = threading.Event()
    with tqdm(desc=description, bar_format="{desc}: {bar:20} {elapsed}", total=60, leave=False) as bar:

        def tick() -> None:
            while not done.wait(1):
                bar.update(1)
                bar.total = max(bar.total, bar.n + 10)

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()


def _timed(generate) -> tuple[Tensor, float]:
    start = time.perf_counter()
    tokens = generate()
    return tokens, time.perf_counter() - start
