"""The state of an exported OpenVINO program, for any model.

`OpenVINOConfig` by default folds a cache that goes in and comes out into the program, as variables. Upstream's runner
feeds no variables and misses the cache among the outputs, so that no such program runs.
"""

import openvino
import torch
from transformers.exporters.runners.runner_openvino import OpenVINOModelRunner, openvino_output_tensor
from transformers.exporters.utils import get_leaf_tensors, openvino_feed


class OpenVINORunnerWithState(OpenVINOModelRunner):
    """Runs a program with variables as if the cache went in and came out: it does, through the variables."""

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs):
        given = get_leaf_tensors(kwargs)
        variables = {leaf_of(variable.name): variable for variable in self.request.query_state()}
        for leaf, variable in variables.items():
            if leaf in given:
                dtype = torch.from_numpy(variable.state.data).dtype  # int64 became int32
                variable.state = openvino.Tensor(given[leaf].to("cpu", dtype).contiguous().numpy())
            else:
                variable.reset()
        feed = openvino_feed(self.compiled_model, kwargs)
        outputs = self.request.infer(feed, share_inputs=share_inputs, share_outputs=share_outputs)
        returned = {
            name.removeprefix("output."): openvino_output_tensor(outputs[port], port)
            for port in self.compiled_model.outputs
            for name in port.get_names()
        }
        for leaf, variable in variables.items():
            state = torch.from_numpy(variable.state.data).clone()
            returned[leaf] = state.to(given[leaf].dtype) if leaf in given else state
        return self.unflatten([returned[leaf] for leaf in self.returned_leaves()])

    def returned_leaves(self) -> list[str]:
        """Names of the tensors that the model returned when it was exported, in their order."""
        count = self.out_spec.num_leaves - len(self.out_constants)
        return list(get_leaf_tensors(self.unflatten([torch.empty(0) for _ in range(count)])))


def leaf_of(variable: str) -> str:
    """The leaf that became a variable, whose name is `input.<leaf>output.<leaf>`."""
    return variable[: len(variable) // 2].removeprefix("input.")
