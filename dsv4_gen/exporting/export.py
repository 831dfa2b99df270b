"""From a model to a folder of programs."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM
from transformers.exporters.auto import get_exporter_class
from transformers.exporters.base import ExportedComponent, ExportedModel
from transformers.exporters.utils import get_leaf_tensors

from ..conventions import CACHE_NAME
from ..generation_deepseek_v4.devices import allocate, first_device, why_eager
from ..generation_deepseek_v4.experts import experts_in_place
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from .formats import Format, find_format

PREFILL, DECODE = "prefill", "decode"  # as upstream names the components of an export


def export_generation(
    model: DeepseekV4ForCausalLM,
    folder: str | Path,
    *,
    format: str,
    max_cache_len: int,
    batch_size: int = 1,
    prefill_chunk_size: int = 64,
) -> None:
    """Export a prefill chunk and a decode step, two programs that serve every prompt (`load_exported`).

    The folder is one of transformers' exporters: a file per program, each with the weights, the configs, a manifest.

    Args:
        model: the model, on one device, in float32 for "onnx" and "openvino".
        folder: where to write; made if it is not there, its programs replaced if they are.
        format: "onnx", "openvino", "pt2" (`torch.export`) or "aoti" (AOTInductor: compiled for this machine).
        max_cache_len: tokens that a row can hold.
        batch_size: rows.
        prefill_chunk_size: columns of a prefill chunk.

    Raises:
        ValueError: an unknown format, a size below 1, or a model that cannot be exported as it is.
        ImportError: packages that the format needs are missing.

    Example:
        >>> export_generation(model, "exported", format="onnx", max_cache_len=4096, batch_size=2)
        >>> load_exported("exported").generate(input_ids, attention_mask=attention_mask, max_new_tokens=256)
    """
    components = dict(export_programs(model, format, max_cache_len, batch_size, prefill_chunk_size))
    save_programs(model, folder, format, components)


def export_programs(
    model: DeepseekV4ForCausalLM, format: str, max_cache_len: int, batch_size: int, prefill_chunk_size: int
) -> Iterator[tuple[str, ExportedComponent]]:
    """The programs of `export_generation` by name, one after the other: each takes a while."""
    target = find_format(format)
    sizes = {"max_cache_len": max_cache_len, "batch_size": batch_size, "prefill_chunk_size": prefill_chunk_size}
    check_exportable(model, format, target, sizes)
    exporter = get_exporter_class(target.export_format)()
    for name, columns in ((PREFILL, min(prefill_chunk_size, max_cache_len)), (DECODE, 1)):
        cache = DeepseekV4StaticCache(model.config, max_cache_len)
        allocate(model, cache, batch_size)
        device = first_device(model)
        inputs = {
            "input_ids": torch.zeros(batch_size, columns, dtype=torch.long, device=device),
            CACHE_NAME: cache,
            "token_mask": torch.ones(batch_size, columns, dtype=torch.bool, device=device),
            "logits_to_keep": 1,
        }
        with experts_in_place(model, tokens=batch_size * columns):
            component = exporter.export(model, inputs, target.config).components["model"]
        if format == "openvino":
            fix_shapes(component, inputs)
        yield name, component


def fix_shapes(component: ExportedComponent, inputs: dict) -> None:
    """Give an OpenVINO program the shapes that it was traced with: its inputs come without."""
    leaves = get_leaf_tensors(inputs)
    names = {port.any_name: port.any_name.removeprefix("input.") for port in component.program.inputs}
    component.program.reshape({name: list(leaves[leaf].shape) for name, leaf in names.items() if leaf in leaves})


def save_programs(
    model: DeepseekV4ForCausalLM, folder: str | Path, format: str, components: dict[str, ExportedComponent]
) -> None:
    """Write what `export_programs` made."""
    export_format = find_format(format).export_format
    ExportedModel(components, export_format, model.config, model.generation_config).save_pretrained(folder)


def check_exportable(model, format: str, target: Format, sizes: dict[str, int]) -> None:
    """Raise `ValueError` for what `export_generation` cannot export."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise ValueError(f"`export_generation` exports a `DeepseekV4ForCausalLM`, got a `{type(model).__name__}`.")
    if (reason := why_eager(model)) is not None:
        raise ValueError(f"This model cannot be exported: {reason}")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise ValueError("The model stands on several devices: move it to one to export it.")
    if target.float32_only and model.dtype != torch.float32:
        raise ValueError(
            f"{format!r} programs compute in float32, the model is in {model.dtype}: call `model.float()`."
        )
