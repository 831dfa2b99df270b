"""Small random-weight models of many families, and what tests of any static cache do with them."""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from dsv4_gen.benchmark.graphs import FAMILIES, compile_config, count_graphs, generate, random_ids, small_model
from dsv4_gen.conventions import CACHE_NAME

__all__ = [
    "FAMILIES",
    "WINDOW",
    "cache_of",
    "compile_config",
    "count_graphs",
    "generate",
    "largest_difference",
    "left_padded",
    "random_ids",
    "small_model",
]

WINDOW = 16


def left_padded(*lengths: int, seed: int = 0) -> Tensor:
    """`(rows, longest)` token ids of prompts with these lengths, 0 on the left of the shorter ones."""
    ids = random_ids(len(lengths), max(lengths), seed=seed)
    for row, length in zip(ids, lengths, strict=True):
        row[: len(row) - length] = 0
    return ids


def cache_of(model: PreTrainedModel, ids: Tensor, new_tokens: int = 2, **kwargs) -> Cache:
    """The static cache that `generate` leaves behind."""
    return generate(model, ids, new_tokens, cache_implementation="static", return_dict_in_generate=True, **kwargs)[
        CACHE_NAME
    ]


def largest_difference(model: PreTrainedModel, reference: PreTrainedModel, ids: Tensor, new: int, **kwargs) -> float:
    """Between the logits of `model` with a static cache, given `kwargs`, and `reference` with a dynamic one."""
    both = dict(return_dict_in_generate=True, output_logits=True)
    static = generate(model, ids, new, cache_implementation="static", **kwargs, **both)
    dynamic = generate(reference, ids, new, **both)
    return (torch.stack(static.logits) - torch.stack(dynamic.logits)).abs().max().item()
