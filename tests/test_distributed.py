"""Tensor and expert parallel: two processes, each with the whole cache, give what one gives with a dynamic cache."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from test_exact import TOLERANCE
from tiny import CSA, HCA, tiny_model

WORKER = Path(__file__).with_name("distributed_worker.py")

# Ways of running, and the graphs that each compiles: one for chunks, one for steps.
WAYS = {
    "ep eager": 0,
    "ep compile_forward": 2,
    "tp eager": 0,
    "tp compile_forward": 2,
    "tp by hand": 1,
    "tp inductor": 1,
}

# The command, without the time that compiling takes.
DEMO = "import torch; torch.compile = lambda function, **_: function; from dsv4_gen.cli import main; main()"


def run_in_two_processes(*arguments: str | Path) -> list[str]:
    """What each of two processes prints that run Python with these arguments, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    shared = os.environ | address | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    try:
        for rank in "01":
            environment = shared | {"RANK": rank, "LOCAL_RANK": rank}
            command = [sys.executable, *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        printed = [process.communicate(timeout=500)[0] for process in processes]
    finally:  # a process that waits for one that is gone would never end
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    return printed


def test_two_processes_give_what_one_does(tmp_path):
    tiny_model(layer_types=[CSA, HCA, HCA]).save_pretrained(tmp_path)
    first, second = map(json.loads, run_in_two_processes(WORKER, tmp_path))
    assert first == second  # to the last bit: with a digest of all logits
    for way, graphs in WAYS.items():
        assert first[way]["difference"] <= TOLERANCE, way
        assert first[way]["graphs"] == graphs, way
    for kind in ("tp", "ep"):
        assert first[f"{kind} compile_forward"]["regions"] == [2, 2]  # one for each kind of layer
        assert "model.layers.2.mlp.experts.down_proj" in first[f"{kind} weights"]["sharded"]  # afterwards, as before
    assert first["tp generate"]["tokens"] == first["tp generate"]["expected"]
    assert first["tp generate"]["graphs"] == 1


def test_the_demo_is_tensor_parallel_and_the_first_process_speaks():
    spoken, silent = run_in_two_processes("-c", DEMO, "--max-new-tokens", "4")
    assert "tensor-parallel over 2 processes" in spoken
    assert spoken.count("yes") == 6 and "NO" not in spoken  # three prompts, compiled and eager
    assert silent == ""
