"""What transformers and torch ask of every file: the name of the cache, the shape of a call, the strides of tensors."""

import inspect

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

CACHE_NAMES = ("cache", "past_key_values")  # since and before transformers 5.24

# The name of the cache among a forward's keywords: `past_key_values` up to 5.23.
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def call_shape(inputs: dict) -> tuple[int, int]:
    """Batch and sequence length of a forward with these keywords."""
    embeds = inputs.get("inputs_embeds")
    return inputs["input_ids"].shape[:2] if embeds is None else embeds.shape[:2]


def is_traced() -> bool:
    """Whether this very call is being traced, for a graph or for an export.

    `torch.compiler.is_compiling` does not do: it is True in every thread while any of them compiles.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def same_strides(value):
    """Tensors, in a dict too, with the strides of new ones, whatever they are slices of; anything else as it is.

    `contiguous()` does not do: it returns a slice of a single row as it is.
    """
    if isinstance(value, dict):
        return {name: same_strides(tensor) for name, tensor in value.items()}
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
