"""From a cache to a file, and from the file to a cache of any size.

Since state is addressed by position, a cache of any size knows where each token and each entry of the file belongs.
"""

import json
import os
import uuid
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from ..generation_deepseek_v4.buffers import read, write
from ..generation_deepseek_v4.devices import allocate
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from .file_format import (
    FORMAT_VERSION,
    HEADER,
    STATE_DTYPES,
    PromptCacheInfo,
    check_belongs,
    check_tensors,
    held_parts,
    open_file,
    read_info,
)
from .fingerprint import weights_fingerprint


def save_prompt_cache(
    path: str | Path,
    cache: DeepseekV4StaticCache,
    *,
    model: nn.Module | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write what `cache` holds to a file. Its size follows the tokens held, not the capacity.

    The file appears under its name when it is complete, and replaces what was there.

    Args:
        path: the file, by custom `*.safetensors`.
        cache: a cache that holds tokens. It is not changed.
        model: the model that filled it. Its weights' fingerprint then goes into the header, and
            `load_prompt_cache` can tell another model's weights. Where they are sharded, every process calls this.
        metadata: strings of your own, kept in the header.

    Raises:
        ValueError: a cache without tokens, or with more than it has room for (a graph that you compiled yourself
            dropped some), in a dtype or with metadata that the file cannot hold, or a model without its weights.

    Example:
        >>> model(**tokenizer(system_prompt, return_tensors="pt"), cache=cache)
        >>> save_prompt_cache("system.safetensors", cache, model=model, metadata={"prompt": "system, version 3"})
    """
    metadata = metadata or {}
    if not all(isinstance(text, str) for item in metadata.items() for text in item):
        raise ValueError(f"`metadata` must map strings to strings, got {metadata}.")
    lengths = cache.lengths.tolist() if cache.is_initialized else [0]
    if max(lengths) == 0:
        raise ValueError("The cache holds no tokens. Run the model over the prompt first.")
    if max(lengths) > cache.max_cache_len:
        raise ValueError(
            f"The cache has lost tokens: it was given {max(lengths)} in a row and has `max_cache_len="
            f"{cache.max_cache_len}`. Fill a larger cache."
        )
    state = cache.tensors()
    dtypes = {tensor.dtype for name, tensor in state.items() if name.startswith("layers.")}
    names = [name for name, dtype in STATE_DTYPES.items() if dtypes == {dtype}]
    if not names:
        raise ValueError(
            f"The state must have one dtype of {list(STATE_DTYPES.values())}, got {sorted(map(str, dtypes))}."
        )

    tensors = {}
    for name, held in held_parts(cache, max(lengths)).items():
        buffer = state[name]
        slots = held.slots(cache.lengths.to(buffer.device))
        tensors[name] = read(buffer, slots).masked_fill(slots[..., None] < 0, 0).cpu()
    info = PromptCacheInfo(
        format_version=FORMAT_VERSION,
        package_version=version("dsv4_gen"),
        config=cache.state_fields,
        dtype=names[0],
        max_cache_len=cache.max_cache_len,
        lengths=lengths,
        seq_length=cache.get_seq_length(),
        weights=None if model is None else weights_fingerprint(model),
        metadata=metadata,
    )
    write_whole(Path(path), tensors, info)


def load_prompt_cache(
    path: str | Path,
    config: DeepseekV4Config,
    *,
    model: nn.Module | None = None,
    max_cache_len: int | None = None,
    max_rollback: int = 0,
    device: torch.device | str | None = None,
) -> DeepseekV4StaticCache:
    """A cache that goes on where the saved one stood, in any size that has room for its tokens.

    With the sizes of the cache that was saved, the logits that follow are the same to the last bit on the same
    machine. Other sizes change the order of sums, hence the last digits.

    Args:
        path: a file that `save_prompt_cache` wrote.
        config: the model's config.
        model: the model that will continue. Its dtype and, if the file has their fingerprint, its weights are checked;
            where they are sharded, every process calls this.
        max_cache_len: tokens that a row can hold, those in the file included. Defaults to what fitted in the cache
            that was saved.
        max_rollback: tokens that `crop` can take back, of those that come after the file's own.
        device: of the whole new cache. By default each layer's state is where the model runs the layer, or on the CPU
            without a model.

    Raises:
        ValueError: a file that is truncated, foreign, damaged or of a newer format; a config, dtype or weights other
            than the file's, or a model without its weights; or too little room. The message names the field. Nothing
            has been allocated then.

    Example:
        >>> cache = load_prompt_cache("system.safetensors", model.config, model=model, max_cache_len=131_072)
        >>> model.generate(**inputs, cache=cache)  # the system prompt and what follows it
    """
    with open_file(path) as file:
        info = read_info(path, file)
        longest = max(info.lengths)
        max_cache_len = info.max_cache_len if max_cache_len is None else max_cache_len
        if max_cache_len < longest:
            raise ValueError(
                f"`max_cache_len={max_cache_len}` is too little room: {path} holds {longest} tokens in a row. Give at "
                "least that, and what you mean to generate."
            )
        cache = DeepseekV4StaticCache(config, max_cache_len, max_rollback=max_rollback)
        check_belongs(path, info, cache.state_fields, model)
        parts = held_parts(cache, longest)
        check_tensors(path, info, file, parts)

        rows, dtype, head_dim = len(info.lengths), STATE_DTYPES[info.dtype], cache.state_fields["head_dim"]
        if device is None and model is not None:
            allocate(model, cache, rows)
        else:
            cache.early_initialization(rows, 1, head_dim, dtype, torch.device(device or "cpu"))
        cache.lengths.copy_(torch.tensor(info.lengths))
        cache.seq_length.fill_(info.seq_length)
        # As if the rows had been longer, and all rollback were used up: the file does not have what lies behind.
        cache.high_water.copy_(cache.lengths + max_rollback)
        cache.host.lose_count()
        state = cache.tensors()
        for name, held in parts.items():
            buffer = state[name]
            write(buffer, held.slots(cache.lengths.to(buffer.device)), file.get_tensor(name).to(buffer.device))
    return cache


def write_whole(path: Path, tensors: dict[str, Tensor], info: PromptCacheInfo) -> None:
    """Write the file beside `path`, and rename it: whoever looks finds a whole file there, or what was there before."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, beside, metadata={HEADER: json.dumps(asdict(info))})
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
