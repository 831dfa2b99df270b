"""From a folder of programs to `generate`, without the model."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.exporters.base import EXPORT_MANIFEST_FILE, ExportedModel
from transformers.exporters.metadata import load_treespec
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..conventions import CACHE_NAME
from ..generation_deepseek_v4.admission import check_rows, count_tokens
from ..generation_deepseek_v4.chunks import run_in_chunks
from ..generation_deepseek_v4.generate_hooks import move_padding_left, prefill_hook
from ..generation_deepseek_v4.model_hooks import static_cache
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from .export import DECODE, PREFILL
from .formats import FORMATS, find_format
from .programs import PROGRAMS


class ExportedDeepseekV4(GenerationMixin):
    """A model of two exported programs: `generate` is transformers', the state a `DeepseekV4StaticCache`.

    Args:
        exported: what transformers' exporters load.

    Attributes:
        batch_size, prefill_chunk_size: rows of every call, and columns of a prefill chunk.
        sizes: the `CacheSizes` that the programs were exported with.

    Raises:
        ValueError: not an export of `export_generation`.

    Example:
        >>> exported = load_exported("exported")
        >>> cache = exported.new_cache()
        >>> text = exported.generate(input_ids, max_new_tokens=64, cache=cache)
        >>> exported.generate(torch.cat([text, message], dim=1), max_new_tokens=64, cache=cache)  # a second turn
    """

    main_input_name = "input_ids"
    _is_stateful = False

    def __init__(self, exported: ExportedModel):
        self.config, self.generation_config = exported.config, exported.generation_config
        self.device, self.dtype = exported.device, exported.dtype
        program = PROGRAMS[exported.export_format]
        self.programs = {
            name: program(component, exported.runners[name], self.config.vocab_size)
            for name, component in exported.components.items()
        }
        metadata = exported.components[PREFILL].metadata
        self.batch_size, self.prefill_chunk_size = metadata.kwargs["input_ids"]["shape"]
        kwargs = load_treespec(metadata.in_spec).child(1)
        cache = kwargs.child(kwargs.context.index(CACHE_NAME))
        self.sizes, self.state_fields = cache.context

    def new_cache(self) -> DeepseekV4StaticCache:
        """An empty cache as the programs take it."""
        sizes = dict(vars(self.sizes))
        cache = DeepseekV4StaticCache(self.config, sizes.pop("max_cache_len"), **sizes)
        self.admit_cache(cache)
        return cache

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: DeepseekV4StaticCache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Run tokens over the state of `cache`, which is brought up to date.

        Args:
            input_ids: `(batch_size, seq)`, any number of tokens.
            attention_mask: `(batch_size, seq)`, or as `generate` has it; 0 is padding. None for no padding.
            cache: from `new_cache`, or another of the same sizes. Defaults to a new one.

        Returns:
            `logits`, `(batch_size, 1, vocab_size)`, of the last column, and the cache.

        Raises:
            ValueError: a cache of another size, dtype or config, other rows than `batch_size`, no tokens, or no room.
                Nothing has changed then.
        """
        cache = self.new_cache() if cache is None else cache
        self.admit_cache(cache)
        check_rows(cache, *input_ids.shape)
        has_padding = attention_mask is not None
        mask = attention_mask if has_padding else torch.ones_like(input_ids)
        tokens, token_mask = move_padding_left(input_ids, mask)
        count_tokens(cache, token_mask, has_padding)
        cache.host.unfinished = True
        if tokens.shape[1] == 1:
            output = self.run(DECODE, tokens, token_mask, cache)
        else:
            output = run_in_chunks(
                self.run_chunk, "input_ids", tokens, token_mask, self.prefill_chunk_size, cache=cache, logits_to_keep=1
            )
        cache.host.unfinished = False
        return output

    __call__ = forward

    def run_chunk(self, input_ids: Tensor, token_mask: Tensor, cache: DeepseekV4StaticCache, **kwargs):
        return self.run(PREFILL, input_ids, token_mask, cache)

    def run(self, name: str, input_ids: Tensor, token_mask: Tensor, cache: DeepseekV4StaticCache):
        """Run one of the two programs."""
        logits = self.programs[name](input_ids, token_mask, cache)
        return CausalLMOutputWithPast(logits=logits, **{CACHE_NAME: cache})

    def admit_cache(self, cache: DeepseekV4StaticCache) -> None:
        """See that a cache is one that the programs can take, and allocated.

        Raises:
            ValueError: they were exported for another one.
        """
        pairs = {f"`{name}`": (getattr(cache.sizes, name), mine) for name, mine in vars(self.sizes).items()}
        pairs |= {
            f"`{name}` of the config": (cache.state_fields[name], mine) for name, mine in self.state_fields.items()
        }
        if cache.is_initialized:
            pairs |= {"dtype": (cache.dtype, self.dtype), "batch size": (cache.batch_size, self.batch_size)}
        for name, (theirs, mine) in pairs.items():
            if theirs != mine:
                raise ValueError(
                    f"The programs were exported for a cache with another {name}: {mine}, but this one has {theirs}. "
                    "Use one from `new_cache()`."
                )
        if not cache.is_initialized:
            cache.early_initialization(self.batch_size, 1, self.config.head_dim, self.dtype, self.device)

    # What `generate` calls

    def can_generate(self) -> bool:
        return True

    def get_experts_implementation(self) -> dict:
        return {}

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, generation_mode: GenerationMode, *sizes
    ) -> None:
        """A new cache, unless the caller brings one; settings that the programs do not know are refused."""
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError("The programs take one token per step: they cannot verify drafts.")
        exported = {"prefill_chunk_size": self.prefill_chunk_size, "max_cache_len": self.sizes.max_cache_len}
        for name, size in exported.items():
            asked = getattr(generation_config, name)
            if asked not in (None, size):
                raise ValueError(f"The programs were exported with `{name}={size}`, not {asked}: leave it out.")
        generation_config.prefill_chunk_size = None  # `forward` runs prompts in chunks
        if not generation_config.use_cache:
            raise ValueError("The programs keep their state in a cache: leave out `use_cache=False`.")
        if static_cache((), model_kwargs) is None:
            model_kwargs[CACHE_NAME] = self.new_cache()

    _prefill = prefill_hook(GenerationMixin._prefill)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs
    ) -> dict:
        if next_sequence_length is not None:
            if next_sequence_length < 1:
                raise ValueError("The cache has seen this text already: there is nothing to continue.")
            input_ids = input_ids[:, -next_sequence_length:]
        cache = static_cache((), kwargs)
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask"), "cache": cache}


def load_exported(folder: str | Path) -> ExportedDeepseekV4:
    """What `export_generation` wrote, ready to generate.

    Programs of "pt2" and "aoti" are code: load those that you trust.

    Args:
        folder: what `export_generation` was given.

    Raises:
        ValueError: not a folder of `export_generation`, or programs that are truncated or damaged.
        ImportError: packages that the format needs are missing.
    """
    name = read_format(Path(folder))
    target = find_format(name)
    try:
        exported = ExportedModel.from_pretrained(folder, trust_remote_code=True, **target.runner)
    except Exception as error:  # each runtime has its own
        raise ValueError(
            f"The programs in {folder} cannot be loaded as {name!r}: they are truncated, damaged or of another format "
            f"({type(error).__name__}: {error})."
        ) from error
    return ExportedDeepseekV4(exported)


def read_format(folder: Path) -> str:
    """The format of a folder that `export_generation` made.

    Raises:
        ValueError: it did not.
    """
    try:
        manifest = json.loads((folder / EXPORT_MANIFEST_FILE).read_text(encoding="utf-8"))
        name = next(name for name, target in FORMATS.items() if target.export_format == manifest["export_format"])
        states = {program: entry["metadata"]["kwargs"][CACHE_NAME] for program, entry in manifest["components"].items()}
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise ValueError(
            f"{folder} is not a folder of `export_generation`: {type(error).__name__}: {error}."
        ) from error
    if states != {program: {"container": DeepseekV4StaticCache.__name__} for program in (PREFILL, DECODE)}:
        raise ValueError(f"{folder} is not a folder of `export_generation`: it holds the programs {states}.")
    return name
