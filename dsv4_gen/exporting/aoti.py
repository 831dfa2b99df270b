"""AOTInductor as one more format of transformers' exporters: a program compiled ahead of time, in one file."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor import aoti_compile_and_package, aoti_load_package
from transformers.exporters.auto import EXPORT_BACKENDS, register_backend
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.metadata import ExportMetadata
from transformers.exporters.runners.base import ModelRunner

from ..generation_deepseek_v4.few_rows import FewRowProducts

AOTI = "aoti"


@dataclass
class AotiConfig(DynamoConfig):
    """Configuration of an `AotiExporter`: that of `torch.export`, from which it compiles."""

    export_format: str = AOTI


class AotiExporter(DynamoExporter):
    """Compiles what `torch.export` traces, with inductor. A program is the path of its package."""

    export_format = AOTI
    config_class = AotiConfig
    program_suffix = ".aoti.pt2"

    def export_program(self, model, sample_inputs, config) -> tuple[str, ExportMetadata]:
        program, metadata = super().export_program(model, sample_inputs, config)
        settings = {"post_grad_custom_pre_pass": FewRowProducts()}
        return aoti_compile_and_package(program, inductor_configs=settings), metadata

    @classmethod
    def save_program(cls, program: str, path: str | Path) -> None:
        shutil.copyfile(program, path)

    @classmethod
    def load_program(cls, path: str | Path) -> str:
        return str(path)


class AotiRunner(ModelRunner):
    """Runs a package in the process that loads it."""

    def __init__(self, package: str, metadata: ExportMetadata):
        super().__init__(metadata)
        self.module = aoti_load_package(package)

    @property
    def device(self) -> torch.device:
        return torch.device(self.metadata.export_device)

    @classmethod
    def from_program(cls, program: str, metadata: ExportMetadata, device=None) -> "AotiRunner":
        return cls(program, metadata)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs):
        with torch.no_grad():
            return self.module(**self.metadata.in_constants, **kwargs)


if AOTI not in EXPORT_BACKENDS:
    register_backend(AotiExporter, AotiRunner)
