"""The processes that torchrun starts: each holds a part of the model's weights, and the first one speaks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed
from transformers import DeepseekV4ForCausalLM
from transformers.distributed import DistributedConfig


def has_processes() -> bool:
    """Whether torchrun, or what else sets its variables, started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


@contextmanager
def one_voice() -> Iterator[None]:
    """While it lasts, all processes but the first are silent; with it ends what they share."""
    if int(os.environ.get("RANK", 0)) == 0:
        yield
    else:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            yield
    if has_processes() and distributed.is_initialized():
        distributed.destroy_process_group()


def load_model(path: Path | str, dtype: torch.dtype | str = "auto") -> DeepseekV4ForCausalLM:
    """The model of a checkpoint folder, for inference; tensor-parallel over the processes, if there are several."""
    config = DistributedConfig(tp_plan="auto") if has_processes() else None
    return DeepseekV4ForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config).eval()


def share(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """A model that every process has made alike, tensor-parallel: upstream shards weights while it loads them.

    For the start of a command: once the processes are connected, only the first one would save.
    """
    if not has_processes():
        return model
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_model(folder)
