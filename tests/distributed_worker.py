"""What `test_distributed.py` runs in each of two processes: one model, tensor and expert parallel, in every way.

Its argument is the folder of a checkpoint. What it finds it prints, as JSON.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from test_exact import dynamic_logits
from tiny import random_ids
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import CompileConfig, DeepseekV4ForCausalLM
from transformers.distributed import DistributedConfig

from dsv4_gen import DeepseekV4StaticCache, compile_forward

KINDS = {"tp": {"tp_plan": "auto"}, "ep": {"ep_size": 2}}
PROMPT, LENGTH, PADDING = 40, 48, 5


def main(folder: Path) -> None:
    reference = DeepseekV4ForCausalLM.from_pretrained(folder).eval()
    # Two rows: one padded on the left, one whole.
    ids, mask = random_ids(2, LENGTH, seed=5), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :PADDING] = 0
    rows = [(0, slice(PADDING, LENGTH)), (1, slice(0, LENGTH))]
    expected = [dynamic_logits(reference, ids[row, columns]) for row, columns in rows]
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected_tokens = [reference.generate(ids[row : row + 1, columns], **settings)[0, -8:] for row, columns in rows]
    found = {}

    def note(name: str, logits: Tensor | None = None, **others) -> None:
        found[name] = others | {"graphs": counters["stats"]["unique_graphs"]}
        if logits is not None:
            differences = [logits[row, columns] - wanted for (row, columns), wanted in zip(rows, expected)]
            found[name]["difference"] = max(difference.abs().max().item() for difference in differences)
            found[name]["digest"] = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
        torch._dynamo.reset()
        counters.clear()

    def decode(prefill, step) -> Tensor:
        """The logits of all columns: the prompt's in one call, then one by one."""
        cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
        logits = [prefill(input_ids=ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache).logits]
        for i in range(PROMPT, LENGTH):
            logits.append(step(input_ids=ids[:, i : i + 1].clone(), cache=cache).logits)
        return torch.cat(logits, 1)

    for kind in ("ep", "tp"):
        model = load(folder, **KINDS[kind])
        note(f"{kind} eager", decode(model, model))
        backend = CountRegions()
        forward = compile_forward(model, prefill_chunk_size=16, backend=backend)
        note(f"{kind} compile_forward", decode(forward, forward), regions=backend.regions)
        sharded = [name for name, weight in model.named_parameters() if isinstance(weight, DTensor)]
        note(f"{kind} weights", sharded=sharded)

    # From here on tensor parallel only, to be done in time.
    note("tp by hand", decode(model, torch.compile(model, backend="eager")))
    note("tp inductor", decode(model, compile_forward(model)))
    compile_config = CompileConfig(mode=None, backend="eager")  # the defaults, but for what a CPU has not
    compile_config._compile_all_devices = True
    static = {"cache_implementation": "static", "max_cache_len": 64, "compile_config": compile_config}
    tokens = model.generate(ids, attention_mask=mask, **settings, **static)
    note("tp generate", tokens=tokens[:, -8:].tolist(), expected=[row.tolist() for row in expected_tokens])
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


def load(folder: Path, **sizes) -> DeepseekV4ForCausalLM:
    config = DistributedConfig(tp_size=2, **sizes)
    return DeepseekV4ForCausalLM.from_pretrained(folder, distributed_config=config).eval()


class CountRegions:
    """A backend that runs graphs as they are, and counts the regions in each."""

    def __init__(self):
        self.regions = []

    def __call__(self, graph, inputs):
        self.regions.append(sum("subgraph" in name for name, _ in graph.named_children()))
        return graph


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main(Path(sys.argv[1]))
