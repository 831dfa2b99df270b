"""The DeepSeek-V4 add-on: a static cache, and the forward that compiles as one graph with it.

Read in this order: `positions`, `compression`, `attention`, `cache_layers`, `selection`, `static_cache`, `forward`,
`compiled`, `integration`. Each imports only from those before it.
"""

from .cache_layers import DeepseekV4CSAStaticLayer, DeepseekV4HCAStaticLayer, DeepseekV4SlidingStaticLayer
from .compiled import DeepseekV4StaticForward, compile_forward
from .integration import register, unregister
from .static_cache import DeepseekV4StaticCache

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
