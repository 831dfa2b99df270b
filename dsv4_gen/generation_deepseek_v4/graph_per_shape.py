"""A graph for each shape of a call: shapes are static, and many of them do not reach the recompile limit."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from types import FunctionType

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import reset_code
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from .static_cache import DeepseekV4StaticCache

# The compiler keeps at most 8 graphs of one function, and then stops compiling or raises.
MOST_SHAPES = 64


class GraphPerShape:
    """A model's forward with a static cache, compiled anew for each shape of a call.

    Args:
        settings: for `torch.compile`.

    Example:
        >>> run = GraphPerShape({"fullgraph": True, "dynamic": False})
        >>> logits = run(model, input_ids=token, token_mask=mask, cache=cache).logits
    """

    def __init__(self, settings: dict):
        self.settings = settings
        self._compiled: OrderedDict[Hashable, Callable] = OrderedDict()
        self._lock = Lock()

    def __call__(self, model: nn.Module, **inputs) -> MoeCausalLMOutputWithPast:
        """`model(**inputs)`, through the graph of this shape; the shape that was not used for longest is forgotten."""
        shape = shape_of(inputs)
        with self._lock:
            run = self._compiled.pop(shape, None) or torch.compile(copy_of(call), **self.settings)
            self._compiled[shape] = run
            if len(self._compiled) > MOST_SHAPES:
                _, forgotten = self._compiled.popitem(last=False)
                reset_code(forgotten.__wrapped__.__code__)  # which would keep the graph, and nothing else frees it
        # A graph writes Python's attributes at its end only: without this, one that fails would leave no trace.
        next(value for value in inputs.values() if isinstance(value, DeepseekV4StaticCache)).host.unfinished = True
        return run(model, inputs)


def call(model: nn.Module, inputs: dict) -> MoeCausalLMOutputWithPast:
    return model(**inputs)


def copy_of(function: FunctionType) -> FunctionType:
    """The function with code of its own: the compiler counts and keeps graphs by code."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def shape_of(inputs: dict) -> Hashable:
    """What a graph is compiled for: the shapes of tensors, the sizes of the cache, and numbers as they are."""
    shape = []
    for name, value in sorted(inputs.items()):
        if isinstance(value, Tensor):
            value = (value.shape, value.dtype, value.device)
        elif isinstance(value, DeepseekV4StaticCache):
            value = value.sizes
        elif not isinstance(value, bool | int | None):
            value = type(value)
        shape.append((name, value))
    return tuple(shape)
