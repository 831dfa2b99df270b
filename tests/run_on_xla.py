"""XLA, which CI does not run: the CPU's tokens, rows padded differently, and how many graphs were compiled.

CONTRIBUTING.md has the two lines that set it up and run it. `sync` ends a call: what it computes is one graph, which
XLA compiles when it first turns up. Experts run as batched products: grouped ones need an op that it lacks.
"""

import copy

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from tiny import random_ids, tiny_model

from dsv4_gen import DeepseekV4StaticCache

CAPACITY, NEW_TOKENS = 64, 30


@torch.no_grad()
def greedy(model, ids, mask, sync=lambda: None):
    """Greedy tokens, `(batch, NEW_TOKENS)`, on the CPU; the prompt is one chunk."""
    cache = DeepseekV4StaticCache(model.config, max_cache_len=CAPACITY)
    cache.early_initialization(len(ids), 1, model.config.head_dim, model.dtype, ids.device)
    tokens, token_mask = [], mask.bool()
    sync()
    metrics.clear_all()
    for _ in range(NEW_TOKENS):
        ids = model(ids, cache=cache, token_mask=token_mask, logits_to_keep=1).logits.argmax(-1)
        token_mask = torch.ones_like(ids).bool()
        sync()
        tokens.append(ids.cpu())
    return torch.cat(tokens, dim=1)


model, ids = tiny_model(), random_ids(2, 11)
mask = torch.ones_like(ids)
mask[0, :4] = 0
model.set_experts_implementation("batched_mm")
expected = greedy(model, ids, mask)
device = torch_xla.device()
tokens = greedy(copy.deepcopy(model).to(device), ids.to(device), mask.to(device), torch_xla.sync)
print("torch_xla:", torch_xla.__version__)
print("same tokens:", torch.equal(tokens, expected))
print("compilations:", (metrics.metric_data("CompileTime") or [0])[0])
