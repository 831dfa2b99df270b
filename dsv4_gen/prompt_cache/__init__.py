"""A prompt cache on disk: a long prompt is prefilled once, saved, and continued from ever after.

Read in this order; each file imports only from those before it:

    fingerprint         what tells a model's weights from another's
    file_format         what the file holds, and whether one is whole and belongs
    save_and_load       from a cache to a file, and back
"""

from .file_format import PromptCacheInfo, prompt_cache_info
from .fingerprint import weights_fingerprint
from .save_and_load import load_prompt_cache, save_prompt_cache

__all__ = [
    "PromptCacheInfo",
    "load_prompt_cache",
    "prompt_cache_info",
    "save_prompt_cache",
    "weights_fingerprint",
]
