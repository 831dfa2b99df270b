"""What steps, prompts and compiling take: the static cache, beside what a user would otherwise run, in one run.

    python -m dsv4_gen bench --sections decode --contexts 1024 8192 --dtype bfloat16 --batch 1

decode    a step by context, batch and dtype: transformers' dynamic cache, the static one eager and compiled, and the
          *roofline*: the bytes that a step must read, over the bandwidth that a large matrix-vector product reaches
dense     a compiled step that attends to all entries through a mask, as upstream does, beside one that gathers
capacity  a compiled step of 2,048 tokens in a cache for 4,096 and in one for 262,144
prefill   prompts at once and in compiled chunks
compile   seconds to compile a step, by depth
graphs    graphs compiled over twelve steps
exported  a step of the first context in each format whose packages are there, and the state that it copies
bytes     of the cache, by context

A context is filled by writing random state, not by prefilling it. Contenders take turns, warmed up; tables have
medians, and the quartiles of the compiled static cache. All is written as JSON, and plotted if matplotlib is there.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import DeepseekV4ForCausalLM, DynamicCache

from ..conventions import CACHE_NAME
from ..generation_deepseek_v4 import forward as static_forward
from ..generation_deepseek_v4.compiled import DeepseekV4StaticForward, compile_forward
from ..generation_deepseek_v4.selection import select_entries
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from ..memory import plan_cache_memory
from ..tables import print_table
from .random_model import random_model
from .timing import bandwidth, interleaved_seconds, milliseconds
from .workload import (
    ROOM,
    benchmark_config,
    bytes_read_per_step,
    filled_dynamic_cache,
    filled_static_cache,
)

COMPILED = "static, compiled"
CHUNK_SIZE = 256


def tokens(batch_size: int = 1, seq: int = 1) -> torch.Tensor:
    return torch.randint(1, 8192, (batch_size, seq), generator=torch.Generator().manual_seed(0))


def decode_steps(model: DeepseekV4ForCausalLM, context: int, batch_size: int) -> dict[str, Callable[[], object]]:
    """One decode step of each contender, by name, on a context of its own."""
    token, dynamic = tokens(batch_size), filled_dynamic_cache(model, context, batch_size)
    eager, compiled = (filled_static_cache(model, context, batch_size) for _ in range(2))
    run_eager, run_compiled = DeepseekV4StaticForward(model), compile_forward(model)
    return {
        "dynamic, eager": lambda: model(token, **{CACHE_NAME: dynamic}),
        "static, eager": lambda: run_eager(token, cache=eager),
        COMPILED: lambda: run_compiled(token, cache=compiled),
    }


def decode(contexts: list[int], dtypes: list[torch.dtype], batches: list[int], layers: int) -> Iterator[dict]:
    peak = bandwidth()
    for dtype in dtypes:
        model = random_model(benchmark_config(layers), dtype=dtype)
        for batch_size in batches:
            for context in contexts:
                torch._dynamo.reset()
                seconds = interleaved_seconds(decode_steps(model, context, batch_size))
                row = {"dtype": name(dtype), "batch": batch_size, "context": context}
                row |= milliseconds(seconds, quartiles_of=COMPILED)
                row["times faster"] = row["dynamic, eager, ms"] / row[f"{COMPILED}, ms"]
                floor = bytes_read_per_step(model, context, batch_size) / peak
                row["% of roofline"] = 100 * floor * 1e3 / row[f"{COMPILED}, ms"]
                yield row | {"GB/s": peak / 1e9}


@contextmanager
def attend_densely() -> Iterator[None]:
    """Attend to all entries through a mask, where the package would gather the chosen ones."""

    def select(*args, mask_only: bool):
        return select_entries(*args, mask_only=True)

    with patch.object(static_forward, "select_entries", select):
        yield


def dense_steps(model: DeepseekV4ForCausalLM, context: int) -> dict[str, Callable[[], object]]:
    token, gathering, masking = tokens(), compile_forward(model), compile_forward(model)
    cache, other = filled_static_cache(model, context), filled_static_cache(model, context)

    def masked_step():
        with attend_densely():
            masking(token, cache=other)

    return {COMPILED: lambda: gathering(token, cache=cache), "dense": masked_step}


def dense(contexts: list[int], dtypes: list[torch.dtype], layers: int) -> Iterator[dict]:
    for dtype in dtypes:
        model = random_model(benchmark_config(layers), dtype=dtype)
        for context in contexts:
            torch._dynamo.reset()
            seconds = interleaved_seconds(dense_steps(model, context))
            row = {"dtype": name(dtype), "context": context} | milliseconds(seconds, quartiles_of=COMPILED)
            yield row | {"gathering, times faster": row["dense, ms"] / row[f"{COMPILED}, ms"]}


def step_with_room(
    model: DeepseekV4ForCausalLM, held: int, max_cache_len: int, min_attended_len: int | None
) -> Callable[[], object]:
    run, token = compile_forward(model, min_attended_len=min_attended_len), tokens()
    cache = filled_static_cache(model, held, max_cache_len=max_cache_len)
    return lambda: run(token, cache=cache)


def capacity(dtypes: list[torch.dtype], layers: int) -> Iterator[dict]:
    held, small, large = 2048, 4096, 262_144
    for dtype in dtypes:
        torch._dynamo.reset()
        model = random_model(benchmark_config(layers), dtype=dtype)
        fits, roomy = f"room for {small:,}", f"{large:,}, min_attended_len={small:,}"
        steps = {
            fits: step_with_room(model, held, small, None),
            roomy: step_with_room(model, held, large, small),
            f"{large:,}": step_with_room(model, held, large, None),
        }
        row = {"dtype": name(dtype)} | milliseconds(interleaved_seconds(steps), quartiles_of=roomy)
        yield row | {"times slower": f"{row[f'{roomy}, ms'] / row[f'{fits}, ms']:.2f}"}


def prefill_steps(model: DeepseekV4ForCausalLM, length: int) -> dict[str, Callable[[], object]]:
    prompt, cache = tokens(seq=length), DeepseekV4StaticCache(model.config, max_cache_len=length + ROOM)
    run_eager, run_compiled = DeepseekV4StaticForward(model), compile_forward(model, prefill_chunk_size=CHUNK_SIZE)

    def dynamic():
        model(prompt, logits_to_keep=1, **{CACHE_NAME: DynamicCache(config=model.config)})

    def static(run):
        cache.reset()
        run(prompt, cache=cache, logits_to_keep=1)

    return {
        "dynamic, eager": dynamic,
        "static, eager": lambda: static(run_eager),
        COMPILED: lambda: static(run_compiled),
    }


def prefill(lengths: list[int], dtypes: list[torch.dtype], layers: int) -> Iterator[dict]:
    for dtype in dtypes:
        model = random_model(benchmark_config(layers), dtype=dtype)
        for length in lengths:
            torch._dynamo.reset()
            seconds = interleaved_seconds(prefill_steps(model, length), rounds=3, warm_up=1)
            row = {"dtype": name(dtype), "prompt": length} | milliseconds(seconds, quartiles_of=COMPILED)
            row["tokens/s"] = length * 1e3 / row[f"{COMPILED}, ms"]
            yield row | {"times faster": row["dynamic, eager, ms"] / row[f"{COMPILED}, ms"]}


def compile_time(depths: list[int], context: int) -> Iterator[dict]:
    first = None
    for depth in depths:
        torch._dynamo.reset()
        model = random_model(benchmark_config(depth))
        run, cache = compile_forward(model), filled_static_cache(model, context)
        with fresh_cache():
            start = time.perf_counter()
            run(tokens(), cache=cache)
            seconds = time.perf_counter() - start
        first = first or seconds
        yield {"layers": depth, "seconds to compile a step": seconds, "times the first": f"{seconds / first:.2f}"}


def graphs(steps: int = 12) -> Iterator[dict]:
    model, token = random_model(benchmark_config(layers=3)), tokens()
    dynamic, static = filled_dynamic_cache(model, 1024), filled_static_cache(model, 1024)
    run_dynamic, run_static = torch.compile(model.forward, backend="eager"), compile_forward(model, backend="eager")
    for title, step in (
        ("dynamic, compiled", lambda: run_dynamic(token, **{CACHE_NAME: dynamic})),
        (COMPILED, lambda: run_static(token, cache=static)),
    ):
        torch._dynamo.reset()
        counters.clear()
        for _ in range(steps):
            step()
        count = counters["stats"]["unique_graphs"]
        limit = torch._dynamo.config.recompile_limit
        then = "eager from there on" if count >= limit else "compiled"
        yield {"cache": title, "steps": steps, "graphs": count, "then": then}


def exported(context: int, layers: int) -> Iterator[dict]:
    # Not at the top: transformers before 5.23 cannot import them.
    from ..exporting import export_generation, load_exported
    from ..exporting.export import DECODE
    from ..exporting.formats import FORMATS, missing_packages

    torch._dynamo.reset()
    model, token = random_model(benchmark_config(layers)), tokens()
    steps, copied = decode_steps(model, context, batch_size=1), {}
    with TemporaryDirectory() as folder:
        for format in FORMATS:
            if missing_packages(format):
                continue
            export_generation(model, Path(folder) / format, format=format, max_cache_len=context + ROOM)
            program, cache = load_exported(Path(folder) / format), filled_static_cache(model, context)
            steps[format] = partial(program, token, cache=cache)
            steps[format]()
            copied[format] = program.programs[DECODE].bytes_copied(cache)
        seconds = interleaved_seconds(steps)
    for title, values in seconds.items():
        row = {"context": context, "step": title} | milliseconds({"median": values}, quartiles_of="median")
        row["times faster than static, eager"] = median(seconds["static, eager"]) / median(values)
        yield row | {"state copied, bytes": copied.get(title, 0)}


def cache_bytes(contexts: list[int], dtypes: list[torch.dtype], batches: list[int], layers: int) -> Iterator[dict]:
    config = benchmark_config(layers)
    for dtype in dtypes:
        for batch_size in batches:
            for context in contexts:
                plan = plan_cache_memory(config, context, batch_size=batch_size, dtype=dtype)
                yield {"dtype": name(dtype), "batch": batch_size, "context": context, "cache, MiB": plan.total / 2**20}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SECTIONS = ("decode", "dense", "capacity", "prefill", "compile", "graphs", "exported", "bytes")


@torch.inference_mode()
def run(
    sections: list[str],
    contexts: list[int],
    dtypes: list[torch.dtype],
    batches: list[int],
    prompts: list[int],
    depths: list[int],
    layers: int,
    output: Path,
) -> None:
    """Run the sections, print each one's table, and write all of them to `output`, a folder: `bench.json` and plots."""
    measure = {
        "decode": lambda: decode(contexts, dtypes, batches, layers),
        "dense": lambda: dense(contexts, dtypes, layers),
        "capacity": lambda: capacity(dtypes, layers),
        "prefill": lambda: prefill(prompts, dtypes, layers),
        "compile": lambda: compile_time(depths, contexts[0]),
        "graphs": graphs,
        "exported": lambda: exported(contexts[0], layers),
        "bytes": lambda: cache_bytes(contexts, dtypes, batches, layers),
    }
    output.mkdir(parents=True, exist_ok=True)
    measured = {"torch": torch.__version__, "threads": torch.get_num_threads(), "layers": layers}
    for section in sections:
        measured[section] = list(measure[section]())
        print(f"\n{section}")
        print_table(measured[section])
        (output / "bench.json").write_text(json.dumps(measured, indent=1) + "\n")
    try:
        from .plots import plot
    except ImportError:  # matplotlib is not a dependency
        return
    plot(measured, output)
