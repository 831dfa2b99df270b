"""A prompt cache on disk: a long prompt is prefilled once, saved, and continued from ever after.

The file is safetensors. It holds what the rows still need, not the cache's capacity: of every ring the last tokens, of
every compressor the entries of closed windows, in order of position. Since state is addressed by position, a cache of
any other size knows where each of them belongs.

    layers.{i}.keys                                 (batch, last tokens, head_dim)
    layers.{i}.{owner}.source_kv, .source_gate      (batch, last tokens, width)
    layers.{i}.{owner}.entries                      (batch, entries, head_dim)

`owner` is `compressor` or `indexer`. A row that is shorter than the longest has zeros on the left. What the state
belongs to stands in the file's metadata, see `PromptCacheInfo`.
"""

import hashlib
import json
import os
import uuid
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .generation_deepseek_v4.buffers import read, write
from .generation_deepseek_v4.sizes import STATE_FIELDS
from .generation_deepseek_v4.static_cache import DeepseekV4StaticCache

FORMAT_VERSION = 1
HEADER = "dsv4_gen.prompt_cache"  # the metadata key under which the header stands, as JSON
STATE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAMPLES = 256  # values of each weight that its fingerprint looks at


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
            `load_prompt_cache` can tell another model's weights.
        metadata: strings of your own, kept in the header.

    Raises:
        ValueError: a cache without tokens, or with more than it has room for (a graph that you compiled yourself
            dropped some), in a dtype or with metadata that the file cannot hold.

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
    _write_whole(Path(path), tensors, info)


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
        model: the model that will continue. Its dtype and, if the file has their fingerprint, its weights are checked.
        max_cache_len: tokens that a row can hold, those in the file included. Defaults to what fitted in the cache
            that was saved.
        max_rollback: tokens that `crop` can take back, of those that come after the file's own.
        device: of the new cache. Defaults to the model's, or the CPU without one.

    Raises:
        ValueError: a file that is truncated, foreign, damaged or of a newer format; a config, dtype or weights other
            than the file's; or too little room. The message names the field. Nothing has been allocated then.

    Example:
        >>> cache = load_prompt_cache("system.safetensors", model.config, model=model, max_cache_len=131_072)
        >>> model.generate(**inputs, cache=cache)  # the system prompt and what follows it
    """
    with _open(path) as file:
        info = _read_info(path, file)
        longest = max(info.lengths)
        max_cache_len = info.max_cache_len if max_cache_len is None else max_cache_len
        if max_cache_len < longest:
            raise ValueError(
                f"`max_cache_len={max_cache_len}` is too little room: {path} holds {longest} tokens in a row. Give at "
                "least that, and what you mean to generate."
            )
        cache = DeepseekV4StaticCache(config, max_cache_len, max_rollback=max_rollback)
        _check_belongs(path, info, cache.state_fields, model)
        parts = held_parts(cache, longest)
        _check_tensors(path, info, file, parts)

        dtype = STATE_DTYPES[info.dtype]
        if device is None:
            device = "cpu" if model is None else model.device
        cache.early_initialization(len(info.lengths), 1, cache.state_fields["head_dim"], dtype, torch.device(device))
        cache.lengths.copy_(torch.tensor(info.lengths))
        cache.seq_length.fill_(info.seq_length)
        # As if the rows had been longer, and all rollback were used up: the file does not have what lies behind.
        cache.high_water.copy_(cache.lengths + max_rollback)
        cache.host.lose_count()
        state = cache.tensors()
        for name, held in parts.items():
            write(state[name], held.slots(cache.lengths), file.get_tensor(name).to(device))
    return cache


def prompt_cache_info(path: str | Path) -> tuple[PromptCacheInfo, dict[str, tuple[int, ...]]]:
    """The header of a prompt cache, and the shapes of its tensors by name. No tensor is loaded.

    Raises:
        ValueError: a file that is truncated, foreign, damaged or of a newer format.

    Example:
        >>> info, shapes = prompt_cache_info("system.safetensors")
        >>> info.lengths
        [4096]
    """
    with _open(path) as file:
        return _read_info(path, file), {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def weights_fingerprint(model: nn.Module) -> str:
    """A hash that tells a model's weights from another's, without reading them all.

    Of every parameter and saved buffer it covers name, dtype, shape, and about `SAMPLES` values at even distances. So
    it tells another checkpoint, a finetuned one, another quantization; a change to a few single values it may miss.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("_orig_mod.")  # which `torch.compile` puts before all names
        step = max(1, tensor.numel() // SAMPLES) | 1  # odd, so as not to look at one column of a matrix only
        sample = tensor.flatten()[::step].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(bytes(sample.view(torch.uint8).tolist()))
    return digest.hexdigest()


def _write_whole(path: Path, tensors: dict[str, Tensor], info: PromptCacheInfo) -> None:
    """Write the file beside `path`, and rename it: whoever looks finds a whole file there, or what was there before."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, beside, metadata={HEADER: json.dumps(asdict(info))})
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _open(path: str | Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated, or not a safetensors file: {error}.") from error


def _read_info(path: str | Path, file: safe_open) -> PromptCacheInfo:
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
    _check_header(path, info)
    return info


def _check_header(path: str | Path, info: PromptCacheInfo) -> None:
    valid = {
        "lengths": isinstance(info.lengths, list) and info.lengths and all(map(_is_count, info.lengths)),
        "max_cache_len": _is_count(info.max_cache_len),
        "seq_length": _is_count(info.seq_length),
        "dtype": info.dtype in list(STATE_DTYPES),
        "config": isinstance(info.config, dict),
        "metadata": isinstance(info.metadata, dict),
    }
    for field, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{path} is damaged: its header has `{field}={getattr(info, field)!r}`.")


def _is_count(value) -> bool:
    return isinstance(value, int) and value >= 0


def _check_belongs(path: str | Path, info: PromptCacheInfo, state_fields: dict, model: nn.Module | None) -> None:
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


def _check_tensors(path: str | Path, info: PromptCacheInfo, file: safe_open, parts: dict[str, Held]) -> None:
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
