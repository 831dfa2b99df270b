"""Sums of bools are made int64 by name: not every compiler widens them by itself (XLA keeps them bool, silently)."""

import pytest
import torch
from tiny import random_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_gen import DeepseekV4StaticCache
from dsv4_gen.generation_deepseek_v4.positions import place

ARITHMETIC = {"cumsum", "cumprod", "sum", "prod", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_"}


class NoSumsOfBools(TorchDispatchMode):
    """Refuses arithmetic that takes a bool tensor: its dtype would be the backend's choice."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        bools = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.bool]
        if bools and func.overloadpacket.__name__ in ARITHMETIC:
            raise TypeError(f"{func} of a bool tensor relies on implicit promotion")
        return func(*args, **kwargs or {})


@torch.no_grad()
def test_a_prefill_a_chunk_and_a_step_of_padded_rows_sum_no_bools():
    model = tiny_model()
    cache = DeepseekV4StaticCache(model.config, max_cache_len=64)
    for columns in (13, 8, 1):
        mask = torch.ones(2, columns, dtype=torch.long)
        mask[0, : columns // 2] = 0
        with NoSumsOfBools():
            model(random_ids(2, columns), attention_mask=mask, cache=cache)
    assert cache.lengths.tolist() == [7 + 4 + 1, 13 + 8 + 1]


def test_a_sum_of_bools_would_be_noticed():
    with NoSumsOfBools(), pytest.raises(TypeError, match=r"aten.cumsum.* implicit promotion"):
        torch.ones(1, 3, dtype=torch.bool).cumsum(dim=1)


def test_positions_are_int64():
    chunk = place(torch.tensor([5]), torch.tensor([[False, True, True]]), capacity=8)
    assert {tensor.dtype for tensor in chunk} == {torch.int64}
