"""General static-cache fixes, for any decoder model of transformers.

A static cache exists so that every prefill chunk and every decode step run from a fixed graph, whatever the prompt's
length. Three things in transformers still stand in the way; each has its fix here, in a file of its name:

| fix | what goes wrong without it | upstream | where |
| --- | --- | --- | --- |
| `sliding_window` | sliding-window layers compile a graph for every token | issue 44609 | `RingLayer` |
| `layer_initialization` | the first chunk of a prefill has a graph of its own | issue 46421 | `initialize_layers` |
| `uniform_chunks` | chunked prefill compiles for every prompt length | issue 46421 | `make_chunk_uniform` |

`apply_static_cache_fixes(model)` changes that instance alone, and `remove_static_cache_fixes(model)` undoes it:

    apply_static_cache_fixes(model)
    model.generate(ids, cache_implementation="static", max_cache_len=4096, prefill_chunk_size=256)
"""

from .integration import apply_static_cache_fixes, needed, remove_static_cache_fixes

__all__ = ["apply_static_cache_fixes", "needed", "remove_static_cache_fixes"]
