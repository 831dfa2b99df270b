"""Products with few rows give what a library's product gives, and only they are written out."""

import pytest
import torch
from torch._inductor.utils import fresh_cache

from dsv4_gen.generation_deepseek_v4.few_rows import FewRowProducts


class CountingPass(FewRowProducts):
    """Counts the library's products that are left."""

    def __call__(self, graph):
        super().__call__(graph)
        self.left = sum(node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) for node in graph.nodes)


def products(states, weights, heads, entries):
    turned = heads.transpose(0, 1).contiguous().transpose(0, 1)  # as the heads of a query are: not contiguous
    few = [states[:rows] @ weights.T for rows in (1, 2, 4)]
    scores = [heads @ entries.transpose(1, 2), turned @ entries.transpose(1, 2), entries @ heads[:, :1].transpose(1, 2)]
    return few + scores, states @ weights.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_few_rows_are_the_librarys(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"states": (20, 64), "weights": (512, 64), "heads": (2, 16, 32), "entries": (2, 1024, 32)}
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    counting = CountingPass()
    compiled = torch.compile(products, fullgraph=True, dynamic=False, options={"post_grad_custom_pre_pass": counting})
    with fresh_cache():  # a graph from the cache on disk would not pass through the pass again
        few, many = compiled(**inputs)
    assert counting.left == 1  # 20 rows
    expected_few, expected_many = products(**{name: tensor.float() for name, tensor in inputs.items()})
    tolerance = 1e-4 if dtype == torch.float32 else 0.2  # bfloat16 has 8 bits, and the products are up to 40
    for ours, expected in zip([*few, many], [*expected_few, expected_many]):
        torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=0)
