"""The file of a prompt cache: what it holds, and whether it is whole and belongs to a model.

The file is safetensors. It holds what the rows still need, not the cache's capacity: of every ring the last tokens, of
every compressor the entries of closed windows, in order of position. Since state is addressed by position, a cache of
any other size knows where each of them belongs.

    layers.{i}.keys                                 (batch, last tokens, head_dim)
    layers.{i}.{owner}.source_kv, .source_gate      (batch, last tokens, width)
    layers.{i}.{owner}.entries                      (batch, entries, head_dim)

`owner` is `compressor` or `indexer`. A row that is shorter than the longest has zeros on the left. What the state
belongs to stands in the file's metadata, see `PromptCacheInfo`.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..generation_deepseek_v4.sizes import STATE_FIELDS
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from .fingerprint import weights_fingerprint

FORMAT_VERSION = 1
HEADER = "dsv4_gen.prompt_cache"  # the metadata key under which the header stands, as JSON
STATE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class PromptCacheInfo:
    """What a file's state belongs to: its header.

    Attributes:
        format_version: of the file's layout; a newer one than this package knows is refused.
        package_version: of dsv4_gen, as the file was written.
        config: the config's fields that shape or position the state, by name.
        dtype: of the state, as safetensors names it (`BF16`).
        max_cache_len: tokens per row that fitted in the cache that was saved.
        lengths: tokens that each row holds.
        seq_length: columns seen, padding counted.
        weights: fingerprint of the model's weights (`weights_fingerprint`), None if no model was given.
        metadata: the user's own.
    """

    format_version: int
    package_version: str
    config: dict
    dtype: str
    max_cache_len: int
    lengths: list[int]
    seq_length: int
    weights: str | None
    metadata: dict[str, str]


class Held(NamedTuple):
    """The part of a buffer that a file holds: for each row the last `count` of its tokens, or of its entries.

    Attributes:
        rate: tokens that one of them stands for, 1 where the buffer holds tokens.
        count: how many of them.
        size: slots of the buffer, the spare one not counted.
        width: channels.
    """

    rate: int
    count: int
    size: int
    width: int

    def slots(self, lengths: Tensor) -> Tensor:
        """`(batch, count)`, where a cache keeps them, in order of position; the spare slot -1 where a row has none."""
        places = lengths[:, None] // self.rate - self.count + torch.arange(self.count, device=lengths.device)
        return torch.where(places >= 0, places % self.size, -1)


def held_parts(cache: DeepseekV4StaticCache, longest: int) -> dict[str, Held]:
    """What the file holds of a cache whose longest row has `longest` tokens, by name as in `cache.tensors()`."""
    parts = {}
    for index, layer in enumerate(cache.layers):
        window = min(layer.sizes.sliding_window, longest)
        parts[f"layers.{index}.keys"] = Held(1, window, layer.sizes.ring_size, layer.sizes.head_dim)
        for owner, state in layer.states().items():
            sizes = state.sizes
            # The open window; with overlap also the one before, which the open window's entry pools too.
            source = Held(1, min(sizes.source_tokens, longest), sizes.ring_size, sizes.source_width)
            parts[f"layers.{index}.{owner}.source_kv"] = parts[f"layers.{index}.{owner}.source_gate"] = source
            # The open window's entry is left out: the next call pools it anew, from its source tokens.
            entries = Held(sizes.rate, longest // sizes.rate, sizes.max_compressed_len, sizes.head_dim)
            parts[f"layers.{index}.{owner}.entries"] = entries
    return parts


def prompt_cache_info(path: str | Path) -> tuple[PromptCacheInfo, dict[str, tuple[int, ...]]]:
    """The header of a prompt cache, and the shapes of its tensors by name. No tensor is loaded.

    Raises:
        ValueError: a file that is truncated, foreign, damaged or of a newer format.

    Example:
        >>> info, shapes = prompt_cache_info("system.safetensors")
        >>> info.lengths
        [4096]
    """
    with open_file(path) as file:
        return read_info(path, file), {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def open_file(path: str | Path) -> safe_open:
    """The file, or a `ValueError` if it is not safetensors, or not all of it."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated, or not a safetensors file: {error}.") from error


def read_info(path: str | Path, file: safe_open) -> PromptCacheInfo:
    """The header, or a `ValueError` for one that this version cannot read, or that makes no sense."""
    text = (file.metadata() or {}).get(HEADER)
    if text is None:
        raise ValueError(f"{path} is not a prompt cache: its metadata has no `{HEADER}`.")
    try:
        header = json.loads(text)
        written_in = header["format_version"]
        if written_in > FORMAT_VERSION:
            raise ValueError(
                f"{path} has `format_version={written_in}`, and this version of dsv4_gen reads up to {FORMAT_VERSION}. "
                "Update dsv4_gen."
            )
        info = PromptCacheInfo(**{field.name: header[field.name] for field in fields(PromptCacheInfo)})
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error!r}).") from error
    check_header(path, info)
    return info


def check_header(path: str | Path, info: PromptCacheInfo) -> None:
    """Raise `ValueError` for a field of the header that makes no sense."""
    valid = {
        "lengths": isinstance(info.lengths, list) and info.lengths and all(map(is_count, info.lengths)),
        "max_cache_len": is_count(info.max_cache_len),
        "seq_length": is_count(info.seq_length),
        "dtype": info.dtype in list(STATE_DTYPES),
        "config": isinstance(info.config, dict),
        "metadata": isinstance(info.metadata, dict),
    }
    for field, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{path} is damaged: its header has `{field}={getattr(info, field)!r}`.")


def is_count(value) -> bool:
    return isinstance(value, int) and value >= 0


def check_belongs(path: str | Path, info: PromptCacheInfo, state_fields: dict, model: nn.Module | None) -> None:
    """Raise `ValueError` if the state is of another config, dtype or weights."""
    for field in STATE_FIELDS:
        theirs, ours = info.config.get(field), json.loads(json.dumps(state_fields[field]))
        if theirs != ours:
            raise ValueError(f"{path} belongs to a config with `{field}={theirs}`, but this one has `{ours}`.")
    if model is None:
        return
    if STATE_DTYPES[info.dtype] != model.dtype:
        raise ValueError(
            f"{path} has `dtype={STATE_DTYPES[info.dtype]}`, but the model has `{model.dtype}`. Load the model in "
            "the file's dtype, or prefill anew."
        )
    if info.weights is not None and info.weights != weights_fingerprint(model):
        raise ValueError(
            f"{path} was saved with other `weights` than this model's: their fingerprints differ. Load the model that "
            "it was saved with, or prefill anew."
        )


def check_tensors(path: str | Path, info: PromptCacheInfo, file: safe_open, parts: dict[str, Held]) -> None:
    """Raise `ValueError` if the tensors are not those that the header promises, or not enough for `parts`."""
    present = set(file.keys())
    for name, held in parts.items():
        if name not in present and ".indexer." in name:
            raise ValueError(
                f"{path} has no `{name}`: it was saved from a cache so small that a query never had to choose, and one "
                "of this size has to. Load it with a smaller `max_cache_len`, or prefill and save from a cache with "
                "the `max_cache_len` that you need."
            )
        if name not in present:
            raise ValueError(f"{path} is damaged: it has no `{name}`.")
        stored, expected = file.get_slice(name), [len(info.lengths), held.count, held.width]
        if (stored.get_dtype(), stored.get_shape()) != (info.dtype, expected):
            raise ValueError(
                f"{path} is damaged: `{name}` is {stored.get_dtype()} {stored.get_shape()}, and its header says "
                f"{info.dtype} {expected}."
            )
