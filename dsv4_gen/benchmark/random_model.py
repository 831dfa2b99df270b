"""DeepSeek-V4 models with random weights, for whatever must run with nothing downloaded."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from ..generation_deepseek_v4.sizes import CSA, HCA, SLIDING


def demo_config() -> DeepseekV4Config:
    """A model that runs in seconds on a CPU, with every kind of layer, and windows that a short text crosses."""
    return DeepseekV4Config(
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=64,
        q_lora_rank=128,
        num_experts_per_tok=2,
        n_routed_experts=8,
        layer_types=[SLIDING, CSA, HCA, CSA],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={CSA: 4, HCA: 16},
        sliding_window=32,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=16,
        partial_rotary_factor=0.25,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def random_model(
    config: DeepseekV4Config, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.05
) -> DeepseekV4ForCausalLM:
    """A model for inference whose weights are all far enough from zero that a wrong cache shows in its output.

    Args:
        config: the model's config.
        dtype: of the weights; those that upstream keeps in float32 stay so.
        seed: of the weights.
        scale: standard deviation of what is added to upstream's initial weights, many of which are zeros.
    """
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM._from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))
    for layer in model.model.layers:
        if layer.mlp.is_hash:  # distinct experts for each token, as a checkpoint has
            table = layer.mlp.gate.tid2eid
            table.copy_(torch.rand(len(table), config.n_routed_experts).topk(table.shape[1]).indices)
    return model
