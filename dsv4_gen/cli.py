"""`python -m dsv4_gen`, also installed as `dsv4-gen`."""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV4ForCausalLM

from .benchmark.random_model import demo_config, random_model
from .demo import describe, random_prompts, run_demo
from .tables import format_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run what it asks for."""
    arguments = parser().parse_args(argv)
    arguments.run(arguments)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="dsv4-gen",
        description="Generate with a DeepSeek-V4 model through a static cache and one compiled graph, and compare "
        "with the dynamic cache. Without options a small model with random weights is built: nothing is downloaded.",
    )
    top.add_argument("--model", type=Path, metavar="PATH", help="a local checkpoint folder instead of random weights")
    top.add_argument("--prompt", action="append", help="a text to continue, with --model; may be given several times")
    top.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    top.add_argument("--dtype", choices=DTYPES, help="default: float32, or what the checkpoint has")
    top.set_defaults(run=_demo, usage_error=top.error)
    return top


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 4:
        arguments.usage_error("--max-new-tokens must be at least 4")
    tokenizer = None
    if arguments.model is None:
        if arguments.prompt:
            arguments.usage_error("--prompt needs a tokenizer: give a checkpoint folder with --model")
        model = random_model(demo_config(), dtype=DTYPES[arguments.dtype or "float32"])
    else:
        if not (arguments.model / "config.json").is_file():
            arguments.usage_error(f"{arguments.model} is not a checkpoint folder: it has no config.json")
        model = DeepseekV4ForCausalLM.from_pretrained(arguments.model, dtype=DTYPES.get(arguments.dtype, "auto")).eval()
        if arguments.prompt:
            tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if tokenizer is None:
        prompts = random_prompts(model.config.vocab_size)
    else:
        prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in arguments.prompt]

    print(describe(model))
    rows = run_demo(model, prompts, arguments.max_new_tokens)
    tokens = [row.pop("tokens") for row in rows]
    print(format_table(rows))
    if any(row["same tokens, eager"] and not row["same tokens"] for row in rows):
        print(
            f"A compiled graph rounds {model.dtype} in other places than eager mode. Texts part where the best two "
            "tokens are closer than that: compare eager with eager, or use float32."
        )
    if tokenizer is not None:
        for text in tokenizer.batch_decode([row[0] for row in tokens]):
            print(f"\n{text}")
