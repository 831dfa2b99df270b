"""Seconds of steps that take turns, so that noise meets all of them, and what the machine's memory allows."""

import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

WARM_UP, ROUNDS = 3, 20


def interleaved_seconds(
    steps: dict[str, Callable[[], object]], rounds: int = ROUNDS, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Seconds of every round of every step, by name."""
    seconds = {name: [] for name in steps}
    for round_number in range(warm_up + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def milliseconds(seconds: dict[str, list[float]], quartiles_of: str) -> dict[str, float | str]:
    """Columns of a table: the median of each step, and the quartiles of one."""
    low, _, high = quantiles(seconds[quartiles_of], n=4)
    return {f"{name}, ms": median(values) * 1e3 for name, values in seconds.items()} | {
        "quartiles": f"{low * 1e3:.1f}-{high * 1e3:.1f}"
    }


def bandwidth() -> float:
    """Bytes per second that a matrix-vector product of 512 MiB reaches, the best of several."""
    matrix, vector = torch.randn(16384, 8192), torch.randn(8192)
    seconds = interleaved_seconds({"product": lambda: matrix @ vector}, rounds=5)["product"]
    return matrix.nbytes / min(seconds)
