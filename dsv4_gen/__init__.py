"""A static cache for DeepSeek-V4 in transformers, and a forward that compiles as one full graph.

Importing this package registers it with transformers (`register`), see `generation_deepseek_v4/integration.py`.
"""

from .generation_deepseek_v4 import (
    DeepseekV4CSAStaticLayer,
    DeepseekV4HCAStaticLayer,
    DeepseekV4SlidingStaticLayer,
    DeepseekV4StaticCache,
    DeepseekV4StaticForward,
    compile_forward,
    register,
    unregister,
)
from .memory import longest_context, plan_cache_memory
from .prompt_cache import load_prompt_cache, prompt_cache_info, save_prompt_cache

__all__ = [
    "DeepseekV4CSAStaticLayer",
    "DeepseekV4HCAStaticLayer",
    "DeepseekV4SlidingStaticLayer",
    "DeepseekV4StaticCache",
    "DeepseekV4StaticForward",
    "compile_forward",
    "export_generation",
    "load_exported",
    "load_prompt_cache",
    "longest_context",
    "plan_cache_memory",
    "prompt_cache_info",
    "register",
    "save_prompt_cache",
    "unregister",
]

register()


def __getattr__(name: str):
    """`export_generation` and `load_exported` on first use: transformers' exporters are younger than all else here."""
    if name in ("export_generation", "load_exported"):
        from . import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
