"""Experts read in place: for a few tokens, each reads its own experts' weights, and nothing is sorted by expert."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward

# A variable of the call, not a setting of the model: other threads may be running other calls of the same model.
_in_place = ContextVar("experts_in_place", default=False)


@contextmanager
def experts_in_place(model: nn.Module, tokens: int) -> Iterator[None]:
    """While it lasts, calls of so few tokens that they cannot use all experts read them in place.

    That is upstream's `batched_mm` where the model would use its `grouped_mm`, as `generate` has it on accelerators.

    Args:
        model: the model.
        tokens: of a call, over all rows.
    """
    config = model.config
    token = _in_place.set(tokens * config.num_experts_per_tok <= config.n_routed_experts)
    try:
        yield
    finally:
        _in_place.reset(token)


@torch.compiler.assume_constant_result  # a graph is for one number of tokens, which decides
def reads_in_place() -> bool:
    return _in_place.get()


def experts_forward(
    experts: nn.Module, original: Callable, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`DeepseekV4Experts.forward`, with its arguments, and `original` where experts are not read in place."""
    if experts.config._experts_implementation == "grouped_mm" and reads_in_place():
        return batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return original(experts, hidden_states, top_k_index, top_k_weights)
