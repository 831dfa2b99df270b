"""Where a token's state lives and what a query may see: arithmetic on positions, and nothing else.

A token at position `p` of its row has one fixed place in every buffer, wherever it came from (prefill, chunk, decode
step, second turn): slot `p % size` of a ring, entry `p // rate` of a compressor. So no buffer is ever shifted, no
counter decides where to write, and what a query sees follows from positions alone.

Masks are made int64 before they are summed: not every compiler widens a sum of bools by itself (XLA does not).

Position -1 stands for "no token": padding, or a token past the capacity. Used as an index it is the last slot of a
buffer, and every buffer has one slot to spare there, which nothing reads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """The tokens of one call: one for a decode step, more for a prefill.

    Attributes:
        held: `(batch,)`, tokens that each row held before the call.
        padding: `(batch,)`, padding columns on the left of each row of the call.
        positions: `(batch, seq)`, each token's position in its row, -1 for none.
    """

    held: Tensor
    padding: Tensor
    positions: Tensor


def place(lengths: Tensor, token_mask: Tensor, capacity: int) -> Chunk:
    """Give every token of a call its position: a row's tokens follow those it holds, padding is skipped.

    Args:
        lengths: `(batch,)`, tokens held per row.
        token_mask: `(batch, seq)` bool, False for padding, which stands on the left.
        capacity: tokens that a row can hold; a token past it gets no position and is dropped.

    Example:
        >>> place(torch.tensor([5]), torch.tensor([[False, True, True]]), capacity=8).positions
        tensor([[-1,  5,  6]])
    """
    positions = lengths[:, None] + token_mask.long().cumsum(dim=1) - 1
    kept = token_mask & (positions < capacity)
    return Chunk(lengths.clone(), count_true(~token_mask), torch.where(kept, positions, -1))


def count_true(mask: Tensor) -> Tensor:
    """`(batch,)` int64, the True columns of each row of a `(batch, seq)` bool mask."""
    return mask.long().sum(dim=1)


def last_positions(chunk: Chunk) -> Tensor:
    """`(batch,)`, the last position that a call brings, -1 for a row that brings no token."""
    return chunk.positions.amax(dim=1)


def ring_slots(chunk: Chunk, size: int) -> Tensor:
    """`(batch, seq)`, the ring slot where each token is written: `p % size`.

    The spare slot -1 takes padding, and those tokens of a chunk longer than the ring that later ones would overwrite.
    """
    survives = (chunk.positions >= 0) & (chunk.positions > last_positions(chunk)[:, None] - size)
    return torch.where(survives, chunk.positions % size, -1)


def ring_positions(last: Tensor, size: int) -> Tensor:
    """`(batch, size)`, the position that each slot of a ring holds when `last` is the newest; negative where empty.

    Example:
        >>> ring_positions(torch.tensor([5]), size=4)
        tensor([[4, 5, 2, 3]])
    """
    slots = torch.arange(size, device=last.device)
    return last[:, None] - (last[:, None] - slots) % size


def visible_in_window(query_positions: Tensor, key_positions: Tensor, sliding_window: int) -> Tensor:
    """`(batch, queries, keys)` bool: a query at `p` sees the keys at `p - sliding_window < q <= p`, itself included."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return (key_positions[:, None, :] >= 0) & (distance >= 0) & (distance < sliding_window)


def closed_windows(query_positions: Tensor, rate: int) -> Tensor:
    """How many compression windows have closed at a query's position: it sees the entries `w < (p + 1) // rate`."""
    return (query_positions + 1) // rate


def touchable_windows(seq: int, rate: int) -> int:
    """The most compression windows that `seq` tokens in a row can reach into, wherever they start."""
    return (seq + rate - 2) // rate + 1


def touched_windows(chunk: Chunk, rate: int) -> Tensor:
    """`(batch, windows)`, the compression windows that hold a token of the call, -1 to fill up.

    Their number depends on the call's length alone, so that shapes stay static.
    """
    steps = torch.arange(touchable_windows(chunk.positions.shape[1], rate), device=chunk.held.device)
    windows = chunk.held[:, None] // rate + steps
    return torch.where(windows * rate <= last_positions(chunk)[:, None], windows, -1)
