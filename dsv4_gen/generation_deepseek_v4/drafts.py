"""Hooks of assisted decoding: the static cache takes back what the model does not accept, which upstream's cannot.

Each hook takes upstream's method and returns the one to put in its place (see `integration.py`).
"""

import copy
from collections.abc import Callable

from torch import Tensor, nn
from transformers import DeepseekV4Config, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.configuration_utils import GenerationMode

from ..conventions import CACHE_NAME
from .static_cache import DeepseekV4StaticCache


def validate_hook(original: Callable) -> Callable:
    """For `_validate_generation_mode`: drafts are for `check_drafts` to judge, which sees the cache too."""

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            # On `generate`'s own copy of the config, where upstream keeps such things too (`_mask_length`).
            generation_config._drafts_per_step = drafts_per_step(generation_config, generation_mode_kwargs)
            # `_is_stateful` is how upstream says that a model's cache cannot go back, which refuses all drafts.
            self = copy.copy(self)
            self._is_stateful = False
        original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def drafts_per_step(generation_config: GenerationConfig, generation_mode_kwargs: dict) -> int:
    """The most tokens that are drafted for one call of the model.

    Raises:
        ValueError: a way of drafting that cannot work with this model.
    """
    assistant, lookup = generation_mode_kwargs.get("assistant_model"), generation_config.prompt_lookup_num_tokens
    refused = {
        "`assistant_early_exit` (it runs the model's first layers on the cache of all)": (
            generation_config.assistant_early_exit is not None
        ),
        "`use_mtp` (transformers does not load the draft head of a checkpoint)": getattr(
            generation_config, "use_mtp", False
        ),
        "`speculation_type` (it is for models of another kind)": getattr(generation_config, "speculation_type", None),
        "a DeepSeek-V4 assistant that has another tokenizer": is_deepseek_v4(assistant)
        and generation_mode_kwargs.get("assistant_tokenizer") is not None,
        "`prompt_lookup_num_tokens` below 1": lookup is not None and lookup < 1,
        "`output_hidden_states` or `output_attentions` (transformers would cut them along another dimension)": (
            generation_config.return_dict_in_generate
            and (generation_config.output_hidden_states or generation_config.output_attentions)
        ),
    }
    for way, is_asked in refused.items():
        if is_asked:
            raise ValueError(
                f"DeepSeek-V4 cannot draft with {way}. Leave that out, and draft by `prompt_lookup_num_tokens` or by "
                "an `assistant_model` with the same tokenizer."
            )
    if lookup is not None:
        return lookup
    default = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
    return assistant.generation_config.num_assistant_tokens or default


def is_deepseek_v4(assistant: nn.Module | None) -> bool:
    """Whether an assistant is a DeepSeek-V4 model, wrapped by peft or the compiler or not."""
    return assistant is not None and assistant.config.model_type == DeepseekV4Config.model_type


def check_drafts(
    cache: DeepseekV4StaticCache | None, drafts: int, max_cache_length: int, attention_mask: Tensor | None
) -> None:
    """Raise `ValueError` if the cache of an assisted `generate` cannot take back that many tokens, or not hold them.

    Args:
        cache: None for a dynamic one.
        drafts: per step.
        max_cache_length: columns of the prompt and of all new tokens.
        attention_mask: `(1, columns)`, None for no padding.
    """
    if cache is None:
        raise ValueError(
            "assisted generation is not supported with stateful models, and with its dynamic cache DeepSeek-V4 is one: "
            "add `cache_implementation='static'`, and leave `use_cache` on."
        )
    if drafts > cache.max_rollback:
        raise ValueError(
            f"The cache's `max_rollback` of {cache.max_rollback} is too small for {drafts} drafts per step: all of "
            f"them may have to be taken back. Make the cache with `max_rollback={drafts}`, or use "
            "`cache_implementation='static'` instead of a cache of your own."
        )
    if cache.get_seq_length() > 0:
        raise ValueError(
            "Assisted decoding begins with an empty cache, since upstream hands over the whole text: `reset()` it."
        )
    needed = max_cache_length + drafts - (0 if attention_mask is None else int((attention_mask == 0).sum()))
    if needed > cache.max_cache_len:
        raise ValueError(
            f"Prompt, new tokens and drafts need room for {needed} tokens, but the cache has "
            f"`max_cache_len={cache.max_cache_len}`. Use a larger cache or fewer new tokens."
        )


def candidates_hook(original: Callable) -> Callable:
    """For `_get_candidate_generator`: never more drafts than can be taken back, and an assistant's own static cache."""

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        generator = original(self, generation_config, *args, **kwargs)
        drafts, propose = generation_config._drafts_per_step, generator.get_candidates

        def get_candidates(input_ids: Tensor, **kwargs) -> tuple[Tensor, Tensor | None]:
            if input_ids.shape[1] == 1:  # of which an assistant would take back what it has not seen yet
                return input_ids, None
            candidates, logits = propose(input_ids, **kwargs)
            return candidates[:, : input_ids.shape[1] + drafts], None if logits is None else logits[:, :drafts]

        generator.get_candidates = get_candidates
        if isinstance(generator, AssistedCandidateGenerator):
            limit_schedule(generator, drafts)
            give_static_cache(generator, drafts, generation_config.max_length)
        return generator

    return _get_candidate_generator


def limit_schedule(generator: AssistedCandidateGenerator, drafts: int) -> None:
    """Let a heuristic schedule never ask for more drafts than it began with, in this call and the next."""
    adapt = generator.update_candidate_strategy

    def update_candidate_strategy(*args) -> None:
        adapt(*args)
        generator.num_assistant_tokens = min(generator.num_assistant_tokens, drafts)

    generator.update_candidate_strategy = update_candidate_strategy


def give_static_cache(generator: AssistedCandidateGenerator, drafts: int, max_length: int) -> None:
    """Let a DeepSeek-V4 assistant keep a static cache, which can go back as the model's own can."""
    if is_deepseek_v4(generator.assistant_model):
        generator.assistant_kwargs[CACHE_NAME] = DeepseekV4StaticCache(
            generator.assistant_model.config, max_cache_len=max_length + drafts, max_rollback=drafts
        )
