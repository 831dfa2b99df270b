"""What a model can be exported to, and what that needs."""

from dataclasses import dataclass, field
from importlib.util import find_spec

from transformers.exporters import DynamoConfig, OnnxConfig, OpenVINOConfig
from transformers.exporters.configs import ExportConfigMixin

from .aoti import AOTI, AotiConfig


@dataclass(frozen=True)
class Format:
    """One of the formats.

    Attributes:
        export_format: its name in transformers.
        config: how transformers exports to it, with static shapes and the state as inputs and outputs.
        needs: packages that must be there.
        float32_only: whether the runtime takes models in float32 alone.
        runner: what the runtime is told when it loads a program.
    """

    export_format: str
    config: ExportConfigMixin
    needs: tuple[str, ...] = ()
    float32_only: bool = False
    runner: dict = field(default_factory=dict)


ON_CPU = {"device": "cpu"}

FORMATS = {
    "onnx": Format(
        "onnx", OnnxConfig(dynamic=False), ("onnx", "onnxscript", "onnxruntime"), float32_only=True, runner=ON_CPU
    ),
    "openvino": Format(
        "openvino",
        OpenVINOConfig(dynamic=False, stateful=False),
        ("openvino",),
        float32_only=True,
        # It would compute in bfloat16 where the CPU can.
        runner=ON_CPU | {"config": {"INFERENCE_PRECISION_HINT": "f32"}},
    ),
    "pt2": Format("dynamo", DynamoConfig(dynamic=False)),
    "aoti": Format(AOTI, AotiConfig(dynamic=False)),
}


def find_format(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: there is none.
        ImportError: it needs packages that are not installed; the message names the extra that brings them.
    """
    if name not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {name!r}.")
    if missing := missing_packages(name):
        raise ImportError(f"The format {name!r} needs {', '.join(missing)}: `pip install dsv4_gen[{name}]`.")
    return FORMATS[name]


def missing_packages(name: str) -> list[str]:
    """What a format needs and is not installed."""
    return [package for package in FORMATS[name].needs if find_spec(package) is None]
