"""Products with few rows, on a CPU: a decode step is made of them, and reads its weights once for each.

With a few rows, a library's matrix product reaches a third to a half of the memory's bandwidth. Written out as multiply
and sum, row by row, it becomes a loop that inductor generates, vectorizes and fuses with what surrounds it, and that
reads the matrix once for all rows; and an expert's matrix, chosen by index, is then read in place instead of being
copied first. On other devices nothing is changed.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims

# With two rows to `FEW`, a product is written out if it has `COLUMNS_PER_ROW` columns for each: the weights of a small
# batch, and the entries that the heads of the indexer score. Others are small, or share their loads between the rows.
FEW = 16
COLUMNS_PER_ROW = 64


class FewRowProducts(CustomGraphPass):
    """A pass over inductor's graph that writes out products with few rows on a CPU."""

    def __call__(self, graph: Graph) -> None:
        for target in (aten.mm.default, aten.bmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                left, right = (argument.meta["val"] for argument in node.args)
                if left.device.type != "cpu":
                    continue
                rows, columns = left.shape[-2], right.shape[-1]
                few = rows <= FEW and columns >= COLUMNS_PER_ROW * rows and right.stride(-2) == 1
                with graph.inserting_before(node):
                    if rows == 1 or few:
                        node.replace_all_uses_with(written_out(graph, *node.args))
                    elif columns == 1:
                        turned = (transpose(graph, argument) for argument in reversed(node.args))
                        node.replace_all_uses_with(transpose(graph, written_out(graph, *turned)))
                    else:
                        continue
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """This file, by which inductor's cache on disk knows the pass."""
        return get_hash_for_files((__file__,))


def written_out(graph: Graph, left: Node, right: Node) -> Node:
    """`left @ right`, `(..., rows, k) @ (..., k, columns)`, as a sum of products in float32 for each row."""
    dtype, rows = left.meta["val"].dtype, left.meta["val"].shape[-2]
    left, matrix = in_float32(graph, left), in_float32(graph, transpose(graph, right))
    if rows > 1:  # a buffer of its own, or its conversion would be repeated for every column
        strides = list(left.meta["val"].contiguous().stride())
        left = call(graph, prims.inductor_force_stride_order.default, left, strides)
    sums = []
    for row in range(rows):
        factor = call(graph, aten.slice.Tensor, left, -2, row, row + 1)
        total = call(graph, aten.sum.dim_IntList, call(graph, aten.mul.Tensor, factor, matrix), [-1])
        sums.append(call(graph, aten.unsqueeze.default, total, -2))
    product = sums[0] if rows == 1 else call(graph, aten.cat.default, sums, -2)
    return call(graph, prims.convert_element_type.default, product, dtype)


def in_float32(graph: Graph, tensor: Node) -> Node:
    """`tensor` in float32."""
    return call(graph, prims.convert_element_type.default, tensor, torch.float32)


def transpose(graph: Graph, matrix: Node) -> Node:
    """The last two dimensions the other way round."""
    return call(graph, aten.permute.default, matrix, [1, 0] if matrix.meta["val"].dim() == 2 else [0, 2, 1])


def call(graph: Graph, function, *arguments) -> Node:
    """A new node, with the shape and the dtype of its result."""
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*torch.fx.node.map_arg(arguments, lambda argument: argument.meta["val"]))
    return node
