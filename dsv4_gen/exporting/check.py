"""Whether exported programs give the tokens of the model that they were made from."""

from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM

from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache
from .exported_model import load_exported

NEW_TOKENS = 32


def same_tokens(model: DeepseekV4ForCausalLM, folder: str | Path) -> bool:
    """Whether both generate the same from a random prompt, greedily, the model in eager mode.

    The prompt takes two chunks where there is room, and each row of it has one more column of padding than the last.

    Args:
        model: what was exported.
        folder: where to.
    """
    exported = load_exported(folder)
    capacity, rows = exported.sizes.max_cache_len, exported.batch_size
    new_tokens = min(NEW_TOKENS, (capacity + 1) // 2)
    length = min(exported.prefill_chunk_size + 3, capacity - new_tokens + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    padding = torch.arange(rows, device=model.device)[:, None] % length
    mask = (torch.arange(length, device=model.device) >= padding).long()
    settings = {"attention_mask": mask, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    cache = DeepseekV4StaticCache(model.config, capacity)
    expected = model.generate(ids, cache=cache, **settings)
    return torch.equal(exported.generate(ids, **settings), expected)
