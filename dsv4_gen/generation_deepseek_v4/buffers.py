"""The tensors of a cache: allocated once, `(batch, slots + 1, width)`, and written in place ever after.

The last slot is to spare: index -1 stands for "no token", and what is written there nobody reads.
"""

import torch
from torch import Tensor

from ..conventions import is_traced


def new_buffer(batch_size: int, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`(batch_size, slots + 1, width)` zeros."""
    return static_zeros(batch_size, slots + 1, width, dtype=dtype, device=device)


# Opaque to the compiler: memory that a graph makes, writes and returns, torch 2.13's inductor gives to others too.
@torch.library.custom_op("dsv4_gen::zeros", mutates_args=())
def opaque_zeros(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, for a cache that is allocated in a graph."""
    return torch.zeros(shape, dtype=dtype, device=device)


@opaque_zeros.register_fake
def _(shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


def static_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that never move, and that can be written outside of `inference_mode` even if they were made in it."""
    with torch.inference_mode(False):
        if is_traced():
            return opaque_zeros(shape, dtype, device)
        return mark_static(torch.zeros(shape, dtype=dtype, device=device))


def mark_static(tensor: Tensor) -> Tensor:
    """Tell the compiler that `tensor` neither moves, which CUDA graphs require, nor changes its shape.

    The compiler cannot be told while it traces. No guard, which older versions of torch have by default: a graph is for
    every cache of these sizes, not for this tensor alone.
    """
    if not is_traced():
        torch._dynamo.mark_static_address(tensor, guard=False)
        torch._dynamo.mark_static(tensor)
    return tensor


def slots_of(buffer: Tensor) -> int:
    """Slots of a `(batch, slots + 1, width)` buffer that hold something: a constant to a compiler."""
    return buffer.shape[1] - 1


def write(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    """Put `values`, `(batch, n, width)`, into the slots `(batch, n)` of `buffer`, `(batch, slots + 1, width)`."""
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer[rows, slots] = values.to(buffer.dtype)


def read(buffer: Tensor, slots: Tensor) -> Tensor:
    """The slots `(batch, n)` of `buffer`, `(batch, slots + 1, width)`."""
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    return buffer[rows, slots]
