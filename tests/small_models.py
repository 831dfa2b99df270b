"""Small random-weight models of many families, for tests of what concerns any decoder with a static cache."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

WINDOW = 16
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)

# What differs from `COMMON`, by family. The name is the `model_type` of transformers.
FAMILIES = {
    "llama": {},
    "mistral": dict(sliding_window=WINDOW),
    "gemma2": dict(
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16
    ),
    "gemma3_text": dict(
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16
    ),
    "gpt_oss": dict(
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], num_local_experts=4, **EXPERTS
    ),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=32,
        **EXPERTS,
    ),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **EXPERTS,
    ),
}

COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def small_model(family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A model with weights far enough from zero for a wrong cache to show, and no token that ends a text.

    Args:
        family: a key of `FAMILIES`.
        seed: of the weights.
        changes: to the config.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids, none of which is the padding token 0."""
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))
