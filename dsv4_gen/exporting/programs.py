"""An exported program at work: it reads the state of a cache and writes it back where it was.

The state lives in the tensors of a `DeepseekV4StaticCache`, which the runtimes take as their own buffers. A program of
`torch.export` or AOTInductor writes into them. A program of ONNX Runtime or OpenVINO gives every state back as a new
output; where nothing but the scatter that makes the output reads the input, both are the same buffer and the scatter
copies nothing. What is read elsewhere too gets a buffer beside it, which is copied back after the run.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.exporters.base import ExportedComponent
from transformers.exporters.runners.base import ModelRunner

from ..conventions import CACHE_NAME
from ..generation_deepseek_v4.static_cache import DeepseekV4StaticCache

# What upstream's exporters put before the name of a state.
INPUT, OUTPUT = f"input.{CACHE_NAME}.", f"output.{CACHE_NAME}."


class TorchProgram:
    """A program of `torch.export` or AOTInductor."""

    def __init__(self, component: ExportedComponent, runner: ModelRunner, vocab_size: int):
        self.runner = runner

    def __call__(self, input_ids: Tensor, token_mask: Tensor, cache: DeepseekV4StaticCache) -> Tensor:
        """Run a call over the state of `cache`, in place.

        Args:
            input_ids: `(batch, columns)` of the program.
            token_mask: `(batch, columns)` bool, False for padding.
            cache: allocated, of the program's sizes.

        Returns:
            `(batch, 1, vocab_size)`, the logits of the last column.
        """
        return self.runner(input_ids=input_ids, token_mask=token_mask, **{CACHE_NAME: cache}).logits

    def bytes_copied(self, cache: DeepseekV4StaticCache) -> int:
        """Bytes of state that a run over `cache` copies: it writes in place."""
        return 0


class Buffers:
    """What a program reads and writes for one cache, by the names that the program has for it.

    Attributes:
        inputs, outputs: tensors; a state that is written in place is the same one in both.
        state: the state's own tensors.
    """

    def __init__(self, cache: DeepseekV4StaticCache, columns: int, vocab_size: int, in_place: set[str]):
        self.state = cache.tensors()
        beside = {name: torch.empty_like(tensor) for name, tensor in self.state.items() if name not in in_place}
        calls = torch.zeros(cache.batch_size, columns, dtype=torch.long)
        self.inputs = {"input_ids": calls, "token_mask": calls.bool()}
        self.inputs |= {INPUT + name: tensor for name, tensor in self.state.items()}
        self.outputs = {"logits": torch.empty(cache.batch_size, 1, vocab_size, dtype=cache.dtype)}
        self.outputs |= {OUTPUT + name: beside.get(name, tensor) for name, tensor in self.state.items()}
        self.copied_back = [(self.state[name], tensor) for name, tensor in beside.items()]


class BufferedProgram:
    """A program of a runtime that reads and writes buffers which it is given once per cache."""

    def __init__(self, component: ExportedComponent, runner: ModelRunner, vocab_size: int):
        self.vocab_size = vocab_size
        self.columns = component.metadata.kwargs["input_ids"]["shape"][1]
        self.runner = runner
        self.in_place = {name.removeprefix(INPUT) for name in self.read_by_scatter_alone(component.program)}
        self.bound: WeakKeyDictionary[DeepseekV4StaticCache, tuple[Buffers, object]] = WeakKeyDictionary()

    def __call__(self, input_ids: Tensor, token_mask: Tensor, cache: DeepseekV4StaticCache) -> Tensor:
        """As `TorchProgram.__call__`."""
        if cache not in self.bound:
            buffers = Buffers(cache, self.columns, self.vocab_size, self.in_place)
            self.bound[cache] = buffers, self.bind(buffers)
        buffers, binding = self.bound[cache]
        buffers.inputs["input_ids"].copy_(input_ids)
        buffers.inputs["token_mask"].copy_(token_mask)
        self.run(binding)
        for state, beside in buffers.copied_back:
            state.copy_(beside)
        return buffers.outputs["logits"].clone()

    def bytes_copied(self, cache: DeepseekV4StaticCache) -> int:
        """Bytes of state that a run over `cache` copies, once there was one."""
        buffers, _ = self.bound[cache]
        return sum(tensor.nbytes for tensor, _ in buffers.copied_back)


class OnnxProgram(BufferedProgram):
    """A program of ONNX Runtime, its inputs and outputs bound (`IOBinding`)."""

    @staticmethod
    def read_by_scatter_alone(program) -> list[str]:
        readers = {value.name: [use.node.op_type for use in value.uses()] for value in program.graph.inputs}
        return written_alone(readers)

    def bind(self, buffers: Buffers):
        binding = self.runner.session.io_binding()
        for tensors, bind in ((buffers.inputs, binding.bind_input), (buffers.outputs, binding.bind_output)):
            for name, tensor in tensors.items():
                bind(name, "cpu", 0, numpy_dtype(tensor), list(tensor.shape), tensor.data_ptr())
        return binding

    def run(self, binding) -> None:
        self.runner.session.run_with_iobinding(binding)


class OpenVINOProgram(BufferedProgram):
    """A program of OpenVINO, with an infer request for each cache."""

    @staticmethod
    def read_by_scatter_alone(program) -> list[str]:
        return written_alone(
            {
                port.any_name: [use.get_node().get_type_name() for use in port.get_target_inputs()]
                for port in program.inputs
            }
        )

    def bind(self, buffers: Buffers):
        import openvino

        request = self.runner.compiled_model.create_infer_request()
        for name, tensor in (buffers.inputs | buffers.outputs).items():
            request.set_tensor(name, openvino.Tensor(tensor.numpy(), shared_memory=True))
        return request

    def run(self, request) -> None:
        request.infer()


def written_alone(readers: dict[str, list[str]]) -> list[str]:
    """The inputs, of those whose readers are given by type, that a scatter alone reads, beside what asks the shape."""
    readers = {name: [kind for kind in kinds if kind not in ("Shape", "ShapeOf")] for name, kinds in readers.items()}
    return [name for name, kinds in readers.items() if len(kinds) == 1 and kinds[0].startswith("Scatter")]


def numpy_dtype(tensor: Tensor):
    """A tensor's dtype as numpy names it."""
    return tensor.numpy().dtype


PROGRAMS = {"onnx": OnnxProgram, "openvino": OpenVINOProgram, "dynamo": TorchProgram, "aoti": TorchProgram}
