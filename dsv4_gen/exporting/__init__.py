"""DeepSeek-V4 as exported programs, and `generate` over them, without the model.

A prefill chunk and a decode step are two programs with static shapes, which serve every prompt: the first chunk is
filled up on the left, padding takes no room. Read in this order:

    aoti               AOTInductor beside transformers' own export formats
    formats            what can be exported to, and what that needs
    export             from a model to a folder
    programs           a program at work on the state of a cache
    exported_model     from a folder to `generate`
    check              whether the two agree
"""

from transformers.exporters import base as exporters

if not hasattr(exporters, "ExportedModel"):
    raise ImportError("Exporting needs transformers 5.23 or later: `pip install -U transformers`.")

from .export import export_generation
from .exported_model import ExportedDeepseekV4, load_exported

__all__ = ["ExportedDeepseekV4", "export_generation", "load_exported"]
