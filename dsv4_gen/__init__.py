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

__all__ = [
    "DeepseekV4CSAStaticLayer",
    "DeepseekV4HCAStaticLayer",
    "DeepseekV4SlidingStaticLayer",
    "DeepseekV4StaticCache",
    "DeepseekV4StaticForward",
    "compile_forward",
    "register",
    "unregister",
]

register()
