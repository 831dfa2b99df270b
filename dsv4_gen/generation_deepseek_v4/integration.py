"""The hooks into transformers: what `import dsv4_gen` changes, in one place.

    of the model's forward (`model_hooks.py`)
    DeepseekV4ForCausalLM.forward                          records no gradients
    DeepseekV4Model.forward                                runs `model_forward`
    DeepseekV4Attention.forward                            runs `attention_forward`
    DeepseekV4HCACompressor.forward, and two more          run `compress`
    DeepseekV4Experts.forward                              reads the experts of a few tokens in place, if compiled so

    of `generate` (`generate_hooks.py`)
    DeepseekV4ForCausalLM._prepare_cache_for_generation    builds a `DeepseekV4StaticCache` for "static"
    DeepseekV4ForCausalLM._prefill                         sees that the answer has room, keeps all chunks to one size
    DeepseekV4ForCausalLM.prepare_inputs_for_generation    admits the call outside of the graph
    DeepseekV4ForCausalLM.get_compiled_call                keeps a graph for each shape

    of assisted decoding (`drafts.py`)
    DeepseekV4ForCausalLM._validate_generation_mode        lets drafts through that the static cache can take back
    DeepseekV4ForCausalLM._get_candidate_generator         keeps their number, gives an assistant a cache of its own

A call without a static cache goes to upstream's method with the arguments as they came.
"""

from collections.abc import Callable
from functools import wraps

from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

from .drafts import candidates_hook, validate_hook
from .generate_hooks import compiled_call_hook, prefill_hook, prepare_cache_hook, prepare_inputs_hook
from .model_hooks import attention_hook, causal_lm_hook, compressor_hook, experts_hook, model_hook

HOOKS = {
    (upstream.DeepseekV4ForCausalLM, "forward"): causal_lm_hook,
    (upstream.DeepseekV4Model, "forward"): model_hook,
    (upstream.DeepseekV4Attention, "forward"): attention_hook,
    (upstream.DeepseekV4HCACompressor, "forward"): compressor_hook,
    (upstream.DeepseekV4CSACompressor, "forward"): compressor_hook,
    (upstream.DeepseekV4Indexer, "forward"): compressor_hook,
    (upstream.DeepseekV4Experts, "forward"): experts_hook,
    (upstream.DeepseekV4ForCausalLM, "_prepare_cache_for_generation"): prepare_cache_hook,
    (upstream.DeepseekV4ForCausalLM, "_prefill"): prefill_hook,
    (upstream.DeepseekV4ForCausalLM, "prepare_inputs_for_generation"): prepare_inputs_hook,
    (upstream.DeepseekV4ForCausalLM, "get_compiled_call"): compiled_call_hook,
    (upstream.DeepseekV4ForCausalLM, "_validate_generation_mode"): validate_hook,
    (upstream.DeepseekV4ForCausalLM, "_get_candidate_generator"): candidates_hook,
}

_replaced: dict[tuple[type, str], Callable | None] = {}


def register() -> None:
    """Install the hooks. Importing `dsv4_gen` does; a second time changes nothing."""
    if _replaced:
        return
    for (owner, name), make_hook in HOOKS.items():
        original = getattr(owner, name)
        _replaced[owner, name] = vars(owner).get(name)  # None: inherited
        setattr(owner, name, wraps(original)(make_hook(original)))


def unregister() -> None:
    """Take the hooks out: transformers is as it was. A second time changes nothing."""
    for (owner, name), own in _replaced.items():
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    _replaced.clear()
