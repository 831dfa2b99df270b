"""Two processes on one machine, with the variables that torchrun sets, run to their end or not at all."""

import os
import socket
import time
from collections.abc import Callable

import torch


def run_in_two_processes(function: Callable, *arguments, seconds: int) -> None:
    """Call `function(*arguments)` in each; what one of them raises is raised here, and so is running for too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    end = time.monotonic() + seconds
    processes = torch.multiprocessing.spawn(
        _in_each_process, args=(port, function, arguments), nprocs=2, join=False, daemon=True
    )
    try:
        while not processes.join(timeout=max(0, end - time.monotonic())):
            assert time.monotonic() < end, f"still running after {seconds} seconds"
    finally:
        for process in processes.processes:
            process.kill()


def _in_each_process(rank: int, port: int, function: Callable, arguments: tuple) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    function(*arguments)
