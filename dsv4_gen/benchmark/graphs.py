"""How many graphs a static cache compiles, and what a decode step takes, without and with `static_cache_fixes`.

    python -m dsv4_gen.benchmark.graphs                    # all families, about ten minutes on two cores
    python -m dsv4_gen.benchmark.graphs mistral gpt_oss

Four `generate` calls in a row per cell, whose prompts and new tokens differ in number and share one `max_cache_len`.
"""

import argparse
import time
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, LogitsProcessor, PreTrainedModel

from ..static_cache_fixes import apply_static_cache_fixes

PROMPT_LENGTHS, NEW_TOKENS = (24, 24, 32, 40), (24, 24, 16, 8)
MAX_CACHE_LEN, CHUNK = 64, 8

COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
# For decode steps that take longer than what the host does between them.
WIDER = dict(hidden_size=512, intermediate_size=1024)
WIDER_WINDOW = 256

MIXED_WINDOWS = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)

# What a family's config has besides `COMMON`, by its `model_type`.
FAMILIES = {
    "llama": {},
    "mistral": dict(sliding_window=16),
    "qwen3_next": EXPERTS
    | dict(
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "gemma2": MIXED_WINDOWS | dict(query_pre_attn_scalar=16),
    "gemma3_text": MIXED_WINDOWS | dict(query_pre_attn_scalar=16),
    "gpt_oss": MIXED_WINDOWS
    | EXPERTS
    | dict(num_local_experts=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "deepseek_v3": EXPERTS
    | dict(
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def small_model(family: str, **changes) -> PreTrainedModel:
    """A model of two layers whose weights are far enough from zero for a wrong cache to show; no token ends a text.

    Args:
        family: a key of `FAMILIES`.
        changes: to the config.
    """
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family] | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    """Token ids, none of which is the padding token 0."""
    return torch.randint(1, COMMON["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: Tensor, new_tokens: int, **kwargs) -> Tensor:
    """`generate` without sampling; tokens 0 left of a prompt are padding."""
    padding = (ids == 0).cumprod(dim=1)
    return model.generate(ids, attention_mask=1 - padding, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def compile_config(backend: str, dynamic: bool | None) -> CompileConfig:
    """Whole graphs or an error, on the CPU too. The `eager` backend only traces, which is enough to count."""
    config = CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=dynamic)
    config._compile_all_devices = True
    return config


@contextmanager
def graph_counter():
    """Start over with compiling; yields a function that returns how many graphs were compiled since it was last asked.

    Without fixes there are more than the 8 graphs of a function that dynamo compiles before it gives up.
    """
    torch._dynamo.reset()
    counted = counters["stats"]["unique_graphs"]

    def since_last_asked() -> int:
        nonlocal counted
        before, counted = counted, counters["stats"]["unique_graphs"]
        return counted - before

    with torch._dynamo.config.patch(recompile_limit=128, accumulated_recompile_limit=1024):
        yield since_last_asked


def count_graphs(model: PreTrainedModel, prompts: list[Tensor], new_tokens: tuple[int, ...], **kwargs):
    """Graphs that each `generate` call with a static cache compiles, and the tokens it returns.

    Args:
        model: fixed or not.
        prompts: `(batch, seq)` token ids per call.
        new_tokens: per call.
        kwargs: for `generate`.

    Returns:
        The number of graphs per call, and `(batch, seq + new)` tokens per call.
    """
    kwargs |= dict(cache_implementation="static", compile_config=compile_config("eager", dynamic=False))
    graphs, tokens = [], []
    with graph_counter() as graphs_since_last_asked:
        for ids, new in zip(prompts, new_tokens, strict=True):
            tokens.append(generate(model, ids, new, **kwargs))
            graphs.append(graphs_since_last_asked())
    return graphs, tokens


class StepClock(LogitsProcessor):
    """Notes the time at every token of a `generate` call."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores):
        self.times.append(time.perf_counter())
        return scores

    def steps(self) -> list[float]:
        """Seconds from one token to the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def decode_step_ratio(family: str, rounds: int = 20, new_tokens: int = 32) -> tuple[float, float]:
    """Seconds of a decode step without and with fixes: medians over rounds that take turns, compiled by inductor.

    Without fixes, `dynamic=False` means a graph per token to choose from. With `dynamic=None` the compiler gives up on
    a number that keeps changing, and both sides have one graph for all steps.
    """
    changes = WIDER | ({"sliding_window": WIDER_WINDOW} if "sliding_window" in FAMILIES[family] else {})
    models = small_model(family, **changes), apply_static_cache_fixes(small_model(family, **changes))
    seconds = [], []
    torch._dynamo.reset()
    for round_ in range(rounds + 1):
        turns = list(zip(models, seconds, strict=True))
        for model, steps in turns if round_ % 2 else reversed(turns):
            clock = StepClock()
            generate(
                model,
                random_ids(1, WIDER_WINDOW + 8),
                new_tokens,
                cache_implementation="static",
                max_cache_len=4 * WIDER_WINDOW,
                compile_config=compile_config("inductor", dynamic=None),
                logits_processor=[clock],
            )
            if round_ > 0:  # the first compiles
                steps += clock.steps()
    return median(seconds[0]), median(seconds[1])


def main() -> None:
    """Print both tables, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}; default: all")
    families = parser.parse_args().families

    print(
        "| model | `prefill_chunk_size` | graphs without fixes | graphs with fixes | same tokens as the dynamic cache |"
    )
    print("| --- | --- | --- | --- | --- |")
    prompts = [random_ids(1, length, seed=call) for call, length in enumerate(PROMPT_LENGTHS)]
    for family in families:
        model = small_model(family)
        expected = [generate(model, ids, new) for ids, new in zip(prompts, NEW_TOKENS, strict=True)]
        for chunk in (None, CHUNK):
            cells, are_same = [], []
            for model in (small_model(family), apply_static_cache_fixes(small_model(family))):
                graphs, tokens = count_graphs(
                    model, prompts, NEW_TOKENS, max_cache_len=MAX_CACHE_LEN, prefill_chunk_size=chunk
                )
                cells.append(", ".join(map(str, graphs)))
                are_same += map(torch.equal, tokens, expected)
            same = "all" if all(are_same) else f"{sum(are_same)} of {len(are_same)} calls"
            print(f"| {family} | {chunk} | {' | '.join(cells)} | {same} |", flush=True)

    print("\n| model | decode step without fixes, ms | with fixes, ms | ratio |")
    print("| --- | --- | --- | --- |")
    for family in families:
        without, with_fixes = decode_step_ratio(family)
        ratio = with_fixes / without
        print(f"| {family} | {1e3 * without:.2f} | {1e3 * with_fixes:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
