"""Two devices that are not there: they compute as the CPU does, and refuse tensors of another device, as GPUs do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _DummyDeviceGuard

KIND = "privateuseone"  # a kind of device that torch leaves to others
CPU, FIRST, SECOND = torch.device("cpu"), torch.device(KIND, 0), torch.device(KIND, 1)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Simulated(Tensor):
    """A tensor on a simulated device, whose values are `on_cpu`."""

    def __new__(cls, on_cpu: Tensor, device: torch.device):
        like = {"strides": on_cpu.stride(), "dtype": on_cpu.dtype, "device": device}
        return Tensor._make_wrapper_subclass(cls, on_cpu.shape, **like)

    def __init__(self, on_cpu: Tensor, device: torch.device):
        self.on_cpu = on_cpu

    def __repr__(self, **kwargs) -> str:
        return f"Simulated({self.on_cpu}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("A tensor of a simulated device is for use within `simulated_devices()`.")


class RunOnCPU(TorchDispatchMode):
    """Runs every operation on the CPU, sees that its tensors are on one device, and notes what moves to another."""

    def __init__(self):
        super().__init__()
        self.moves: list[tuple[torch.device, torch.device]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = self.device_of_result(function, tensors, kwargs.get("device"))
        if device.type == KIND and "device" in kwargs:
            kwargs["device"] = CPU
        given = {id(tensor.on_cpu): tensor for tensor in tensors if isinstance(tensor, Simulated)}
        output = function(*tree_map_only(Simulated, lambda tensor: tensor.on_cpu, args), **kwargs)
        if device.type != KIND:
            return output
        # What is changed in place comes back as it went in.
        return tree_map_only(Tensor, lambda values: given.get(id(values), Simulated(values, device)), output)

    def device_of_result(self, function, tensors: list[Tensor], wanted: torch.device | None) -> torch.device:
        """Where the result is, or a `RuntimeError` for tensors that are not together."""
        if function in COPIES:
            target = wanted if wanted is not None else tensors[0].device
            if tensors[-1].device != target:
                self.moves.append((tensors[-1].device, target))
            return target
        # Numbers and indices may be on the CPU.
        devices = {t.device for t in tensors if t.device != CPU or (t.dim() > 0 and "index" not in function.__name__)}
        if len(devices) > 1:
            raise RuntimeError(f"{function} expects all tensors on one device, but found {sorted(map(str, devices))}.")
        return wanted if wanted is not None else next(iter(devices), CPU)


class ListsByCopy(TorchFunctionMode):
    """What becomes a tensor, or is made of one, where no dispatch mode sees it: it goes by way of the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") is not None:
            return torch.tensor(*args, **kwargs | {"device": CPU}).to(kwargs["device"])
        if function is Tensor.tolist:
            return args[0].cpu().tolist()
        return function(*args, **kwargs)


@contextmanager
def simulated_devices() -> Iterator[list[tuple[torch.device, torch.device]]]:
    """While it lasts, tensors can be on `FIRST` and `SECOND`.

    Yields:
        From where to where something has been moved so far.
    """
    if not hasattr(torch, KIND):
        torch._register_device_module(KIND, _DummyBackendModule())
        torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())
    with ListsByCopy(), RunOnCPU() as mode:
        yield mode.moves
