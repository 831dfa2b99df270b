"""`python -m dsv4_gen`, also installed as `dsv4-gen`."""

import argparse
import re
from math import prod
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, DeepseekV4Config, DeepseekV4ForCausalLM

from .benchmark import speed
from .benchmark.random_model import demo_config, random_model
from .demo import describe, progress_bar, random_prompts, run_demo
from .generation_deepseek_v4.sizes import SHORT_NAMES
from .memory import PUBLIC_MODELS, longest_context, plan_cache_memory, public_config
from .processes import load_model, one_voice, share
from .prompt_cache import prompt_cache_info
from .prompt_cache.file_format import STATE_DTYPES
from .tables import print_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNITS = {"B": 1} | {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
ROUNDING = (
    "A compiled graph rounds {} in other places than eager mode: texts part where the best two tokens are closer "
    "than that."
)
EXPORT = (
    "Export a prefill chunk and a decode step, two programs that serve every prompt, and see that they give the "
    "model's tokens. In Python: `export_generation`, `load_exported`."
)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run what it asks for."""
    arguments = parser().parse_args(argv)
    arguments.run(arguments)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="dsv4-gen",
        description="Generate with a DeepSeek-V4 model through a static cache and one compiled graph, and compare "
        "with the dynamic cache. Without options a small model with random weights is built: nothing is downloaded. "
        "Started by torchrun, the model is tensor-parallel.",
    )
    top.add_argument("--model", type=Path, metavar="PATH", help="a local checkpoint folder instead of random weights")
    top.add_argument("--prompt", action="append", help="a text to continue, with --model; may be given several times")
    top.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    top.add_argument("--dtype", choices=DTYPES, help="default: float32, or what the checkpoint has")
    top.set_defaults(run=_demo, usage_error=top.error)
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    _add_plan(commands)
    _add_cache_info(commands)
    _add_export(commands)
    _add_bench(commands)
    return top


def _add_plan(commands) -> None:
    plan = commands.add_parser("plan", help="what a cache will cost", description="What a cache will cost in memory.")
    plan.add_argument("--model", required=True, help="`flash`, `pro`, or a checkpoint folder (its config is enough)")
    plan.add_argument("--context", type=int, metavar="N", help="tokens of prompt per row (default: all the model has)")
    plan.add_argument("--new-tokens", type=int, default=0, metavar="N", help="tokens to generate per row (default: 0)")
    plan.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default: 1)")
    plan.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model (default: bfloat16)")
    plan.add_argument("--max-rollback", type=int, default=0, metavar="N", help="tokens to take back (default: 0)")
    plan.add_argument("--memory", type=_bytes, metavar="SIZE", help="such as 80GiB: the longest context that fits")
    plan.set_defaults(run=_plan, usage_error=plan.error)


def _add_cache_info(commands) -> None:
    cache_info = commands.add_parser("cache-info", help="the header of a prompt cache", description="Print the header.")
    cache_info.add_argument("file", type=Path, metavar="FILE", help="what `save_prompt_cache` wrote")
    cache_info.set_defaults(run=_cache_info, usage_error=cache_info.error)


def _add_export(commands) -> None:
    export = commands.add_parser("export", help="programs that run without the model", description=EXPORT)
    export.add_argument(
        "--model", type=Path, default=argparse.SUPPRESS, metavar="PATH", help="a checkpoint folder (default: random)"
    )
    export.add_argument("--dtype", choices=DTYPES, default=argparse.SUPPRESS, help="default: what the checkpoint has")
    export.add_argument("--format", choices=("onnx", "openvino", "pt2", "aoti"), required=True)
    export.add_argument("--max-cache-len", type=int, required=True, metavar="N", help="tokens that a row can hold")
    export.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default: 1)")
    export.add_argument("--chunk", type=int, default=64, metavar="N", help="columns of a prefill chunk (default: 64)")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    export.set_defaults(run=_export, usage_error=export.error)


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="time it beside the dynamic cache", description=speed.__doc__)
    bench.formatter_class = argparse.RawDescriptionHelpFormatter
    bench.add_argument("--sections", choices=speed.SECTIONS, nargs="+", default=speed.SECTIONS, help="default: all")
    bench.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768], metavar="N", help="tokens held")
    bench.add_argument("--prompts", type=int, nargs="+", default=[512, 2048], metavar="N", help="tokens to prefill")
    bench.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    bench.add_argument("--batch", type=int, nargs="+", default=[1, 4], metavar="N", help="rows (default: 1 4)")
    bench.add_argument("--layers", type=int, default=8, metavar="N", help="of the model (default: 8)")
    bench.add_argument("--depths", type=int, nargs="+", default=[4, 16], metavar="N", help="layers to compile")
    bench.add_argument("--output", type=Path, default="bench", metavar="FOLDER", help="for JSON and plots (bench)")
    bench.set_defaults(run=_bench, usage_error=bench.error)


def _bench(arguments: argparse.Namespace) -> None:
    if any(context < 128 or context % 128 for context in arguments.contexts):
        arguments.usage_error("--contexts must be multiples of 128, the coarser compression rate")
    for option in ("prompts", "batch", "depths"):
        if any(value < 1 for value in getattr(arguments, option)):
            arguments.usage_error(f"--{option} must be at least 1")
    if arguments.layers < 1:
        arguments.usage_error("--layers must be at least 1")
    speed.run(
        sections=arguments.sections,
        contexts=arguments.contexts,
        dtypes=[DTYPES[name] for name in arguments.dtype],
        batches=arguments.batch,
        prompts=arguments.prompts,
        depths=arguments.depths,
        layers=arguments.layers,
        output=arguments.output,
    )


@one_voice()
def _demo(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 4:
        arguments.usage_error("--max-new-tokens must be at least 4")
    if arguments.prompt and arguments.model is None:
        arguments.usage_error("--prompt needs a tokenizer: give a checkpoint folder with --model")
    model = _model(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model) if arguments.prompt else None
    if tokenizer is None:
        prompts = random_prompts(model.config.vocab_size)
    else:
        prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in arguments.prompt]

    print(describe(model))
    rows = run_demo(model, prompts, arguments.max_new_tokens)
    tokens = [row.pop("tokens") for row in rows]
    print_table(rows)
    if any(row["same tokens, eager"] and not row["same tokens"] for row in rows):
        print(ROUNDING.format(model.dtype) + " Compare eager with eager, or use float32.")
    if tokenizer is not None:
        for text in tokenizer.batch_decode([row[0] for row in tokens]):
            print(f"\n{text}")


def _model(arguments: argparse.Namespace) -> DeepseekV4ForCausalLM:
    if arguments.model is None:
        return share(random_model(demo_config(), dtype=DTYPES[arguments.dtype or "float32"]))
    if not (arguments.model / "config.json").is_file():
        arguments.usage_error(f"{arguments.model} is not a checkpoint folder: it has no config.json")
    return load_model(arguments.model, DTYPES.get(arguments.dtype, "auto"))


def _export(arguments: argparse.Namespace) -> None:
    try:
        from .exporting.check import same_tokens
        from .exporting.export import DECODE, PREFILL, export_programs, save_programs

        model = _model(arguments)
        programs = export_programs(model, arguments.format, arguments.max_cache_len, arguments.batch, arguments.chunk)
        components = {}
        for program in (PREFILL, DECODE):
            with progress_bar(f"exporting the {program} program to {arguments.format}"):
                components |= [next(programs)]
        save_programs(model, arguments.out, arguments.format, components)
    except (ImportError, ValueError) as error:
        arguments.usage_error(str(error))

    print(describe(model))
    files = sorted(file for file in arguments.out.iterdir() if file.is_file())
    print_table([{"file": file.name, "size": format_bytes(file.stat().st_size)} for file in files])
    plan = plan_cache_memory(model.config, arguments.max_cache_len, batch_size=arguments.batch, dtype=model.dtype)
    print(f"State, allocated when the programs are loaded: {format_bytes(plan.total)}.")
    with progress_bar("running the programs beside the model"):
        same = same_tokens(model, arguments.out)
    print(f"The programs give {'the tokens' if same else 'OTHER TOKENS than those'} of the model in eager mode.")
    if not same and model.dtype == torch.float32:
        raise SystemExit(1)
    if not same:
        print(ROUNDING.format(model.dtype))


def _plan(arguments: argparse.Namespace) -> None:
    for option, least in (("context", 1), ("new_tokens", 0), ("batch", 1), ("max_rollback", 0)):
        value = getattr(arguments, option)
        if value is not None and value < least:
            arguments.usage_error(f"--{option.replace('_', '-')} must be at least {least}, got {value}")
    config = _planned_config(arguments)
    limit = config.max_position_embeddings
    context = limit - arguments.new_tokens if arguments.context is None else arguments.context
    max_cache_len = context + arguments.new_tokens
    if context < 1 or max_cache_len > limit:
        arguments.usage_error(
            f"the model has {limit:,} positions: give --context and --new-tokens that come to no more than that"
        )
    sizes = {"batch_size": arguments.batch, "dtype": DTYPES[arguments.dtype], "max_rollback": arguments.max_rollback}
    plan = plan_cache_memory(config, max_cache_len, **sizes)

    print(
        f"Cache of {arguments.model}, {arguments.dtype}, rows: {arguments.batch}, tokens per row: {max_cache_len:,} "
        f"({context:,} of context, {arguments.new_tokens:,} new), rollback: {arguments.max_rollback} tokens"
    )
    rows = [_plan_row(SHORT_NAMES[kind.kind], kind.layers, kind) for kind in plan.kinds]
    print_table([*rows, _plan_row("in all", len(config.layer_types), plan)])
    print(f"Exactly {plan.total:,} bytes, the rows' counters ({plan.lengths} B, fixed) included.")
    if arguments.memory is not None:
        tokens = longest_context(config, arguments.memory, **sizes)
        end = ", which is all the model has positions for" if tokens == limit else ""
        print(f"In {format_bytes(arguments.memory)} for the cache alone fit {tokens:,} tokens per row{end}.")


def _planned_config(arguments: argparse.Namespace) -> DeepseekV4Config:
    if arguments.model in PUBLIC_MODELS:
        return public_config(arguments.model)
    if not (Path(arguments.model) / "config.json").is_file():
        arguments.usage_error(f"--model must be flash, pro, or a folder with a config.json, got {arguments.model}")
    try:
        config = AutoConfig.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        arguments.usage_error(f"the config of {arguments.model} cannot be read: {error}")
    if config.model_type != "deepseek_v4":
        arguments.usage_error(f"{arguments.model} is a `{config.model_type}` model: give one of DeepSeek-V4")
    return config


def _plan_row(name: str, layers: int, memory) -> dict:
    return {
        "layers": f"{layers} {name}",
        "fixed": format_bytes(memory.fixed),
        "per token of context": f"{memory.per_token:,.1f} B",
        "entries": format_bytes(memory.entries),
        "fixed + entries": format_bytes(memory.total),
    }


def _cache_info(arguments: argparse.Namespace) -> None:
    try:
        info, shapes = prompt_cache_info(arguments.file)
    except (OSError, ValueError) as error:
        arguments.usage_error(str(error))
    state_bytes = sum(prod(shape) for shape in shapes.values()) * STATE_DTYPES[info.dtype].itemsize
    print(f"{arguments.file}: prompt cache, format {info.format_version}, written by dsv4_gen {info.package_version}")
    print(f"tokens held per row: {info.lengths}, columns with padding: {info.seq_length}")
    print(f"saved from a cache for {info.max_cache_len:,} tokens per row")
    print(f"state: {len(shapes)} tensors, {STATE_DTYPES[info.dtype]}, {format_bytes(state_bytes)}")
    print(f"weights: {info.weights or 'no fingerprint'}")
    for title, values in (("config", info.config), ("metadata", info.metadata), ("tensors", shapes)):
        print(f"{title}:" if values else f"{title}: none")
        for name, value in values.items():
            print(f"  {name}: {value}")


def format_bytes(count: int) -> str:
    """Bytes with the largest binary unit that they fill.

    Example:
        >>> format_bytes(7_226_181_912)
        '6.73 GiB'
    """
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:,.2f} {unit}"
    return f"{count} B"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B)", text)
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"give a number and its unit, such as 80GiB or 500MB, not {text!r}")
    return int(float(match[1]) * UNITS[match[2]])
