"""Products with few rows, on a CPU: a decode step is made of them, and reads its weights once for each.

With one row, a library's matrix product reaches about half of the memory's bandwidth. Written out as multiply and sum
it becomes a loop that inductor generates, vectorizes and fuses with what surrounds it; and an expert's matrix, chosen
by index, is then read in place instead of being copied first. With a few rows, a product is a few times faster with
the big matrix on the left. On other devices nothing is changed.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims

FEW = 16  # rows: heads of the indexer, or rows of a small batch


class FewRowProducts(CustomGraphPass):
    """A pass over inductor's graph that rewrites products with few rows on a CPU."""

    def __call__(self, graph: Graph) -> None:
        for target in (aten.mm.default, aten.bmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                left, right = (argument.meta["val"] for argument in node.args)
                if left.device.type != "cpu":
                    continue
                rows, columns = left.shape[-2], right.shape[-1]
                with graph.inserting_before(node):
                    if 1 in (rows, columns):
                        node.replace_all_uses_with(written_out(graph, *node.args))
                    elif rows <= FEW and columns > 4 * rows and left.dtype == torch.float32 and right.stride(-2) == 1:
                        node.replace_all_uses_with(turned_round(graph, node.target, *node.args))
                    else:
                        continue
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """This file, by which inductor's cache on disk knows the pass."""
        return get_hash_for_files((__file__,))


def written_out(graph: Graph, left: Node, right: Node) -> Node:
    """`left @ right`, `(..., 1, k) @ (..., k, n)` or `(..., n, k) @ (..., k, 1)`, as a sum of products in float32."""
    dtype, shape = left.meta["val"].dtype, [*left.meta["val"].shape[:-1], right.meta["val"].shape[-1]]
    factors = [
        call(graph, prims.convert_element_type.default, x, torch.float32) for x in (left, transpose(graph, right))
    ]
    total = call(graph, aten.sum.dim_IntList, call(graph, aten.mul.Tensor, *factors), [-1])
    return call(graph, prims.convert_element_type.default, call(graph, aten.view.default, total, shape), dtype)


def turned_round(graph: Graph, product, left: Node, right: Node) -> Node:
    """`left @ right` as `(right.T @ left.T).T`."""
    return transpose(graph, call(graph, product, transpose(graph, right), transpose(graph, left)))


def transpose(graph: Graph, matrix: Node) -> Node:
    """The last two dimensions the other way round."""
    return call(graph, aten.permute.default, matrix, [1, 0] if matrix.meta["val"].dim() == 2 else [0, 2, 1])


def call(graph: Graph, function, *arguments) -> Node:
    """A new node, with the shape and the dtype of its result."""
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*(a.meta["val"] if isinstance(a, Node) else a for a in arguments))
    return node
