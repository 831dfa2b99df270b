"""The hooks into transformers: what `import dsv4_gen` changes, in one place.

    of the model's forward (`model_hooks.py`)
    DeepseekV4ForCausalLM.forward                          records no gradients, finds the head's device
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

    of exported programs, for any model (`static_cache_fixes/exported_runners.py`)
    ExportedModel.to                                       lets OpenVINO programs run with the state they have inside

A call without a static cache goes to upstream's method with the arguments as they came.
"""

import gc
from collections.abc import Callable
from functools import wraps
from types import MethodType

from transformers.exporters import base as exporters
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

from ..static_cache_fixes.exported_runners import runners_hook
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
if hasattr(exporters, "ExportedModel"):  # since transformers 5.23
    HOOKS[exporters.ExportedModel, "to"] = runners_hook

_replaced: dict[tuple[type, str], Callable | None] = {}


def register() -> None:
    """Install the hooks, for models that are there already too. Importing `dsv4_gen` does; twice is as good as once."""
    if _replaced:
        return
    before = current_methods()
    for (owner, name), make_hook in HOOKS.items():
        _replaced[owner, name] = vars(owner).get(name)  # None: inherited
        setattr(owner, name, wraps(before[owner, name])(make_hook(before[owner, name])))
    rebind(before)


def unregister() -> None:
    """Take the hooks out: transformers is as it was. A second time changes nothing."""
    before = current_methods()
    for (owner, name), own in _replaced.items():
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    _replaced.clear()
    rebind(before)


def current_methods() -> dict[tuple[type, str], Callable]:
    """The methods that `HOOKS` names, as they are now."""
    return {(owner, name): getattr(owner, name) for owner, name in HOOKS}


def rebind(before: dict[tuple[type, str], Callable]) -> None:
    """Let modules that keep one of the methods `before` for themselves keep the one that is now in its place.

    accelerate's hooks do: they call the forward that a module had when the model was dispatched, and leave it behind on
    the module when they are removed.
    """
    owners = tuple({owner for owner, _ in HOOKS})
    now = {method: getattr(owner, name) for (owner, name), method in before.items()}
    for module in gc.get_objects():
        if issubclass(type(module), owners):
            for name, value in vars(module).items():
                if isinstance(value, MethodType) and value.__func__ in now:
                    vars(module)[name] = MethodType(now[value.__func__], module)
