"""Weights that are tensor subclasses: the compiled step gives the eager one's numbers, without regions of its own."""

import pytest
import torch
from tiny import CSA, HCA, random_ids, tiny_model
from torch._dynamo.utils import counters
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

from dsv4_gen import DeepseekV4StaticCache, compile_forward

QUANTIZATIONS = {"int8": Int8WeightOnlyConfig(), "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4)}


def is_quantized(module, name):
    """All linear layers but `o_a_proj`, whose weight upstream views as a block per group, which torchao refuses."""
    return type(module) is torch.nn.Linear and "o_a_proj" not in name


@pytest.mark.parametrize("weights, backend", [("int8", "eager"), ("int8", "aot_eager"), ("int4", "eager")])
def test_quantized_weights_compile_to_one_graph_without_regions(weights, backend):
    model, ids = tiny_model(layer_types=[CSA, HCA]), random_ids(2, 20)
    quantize_(model, QUANTIZATIONS[weights], filter_fn=is_quantized)
    expected = model(ids, use_cache=False).logits
    cache = DeepseekV4StaticCache(model.config, max_cache_len=32)
    torch.testing.assert_close(model(ids[:, :12], cache=cache).logits, expected[:, :12], atol=2e-5, rtol=0)
    counters.clear()
    forward = compile_forward(model, backend=backend)
    logits = [forward(ids[:, i : i + 1], cache=cache).logits for i in range(12, 20)]
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, 12:], atol=2e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1
