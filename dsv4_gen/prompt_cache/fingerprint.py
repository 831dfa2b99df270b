"""What tells a model's weights from another's, wherever they are: whole, sharded over processes, or offloaded."""

import hashlib

import torch
from torch import Tensor, nn

from ..generation_deepseek_v4.devices import hooks_of

SAMPLES = 256  # values of each weight that the fingerprint looks at


def weights_fingerprint(model: nn.Module) -> str:
    """A hash that tells a model's weights from another's, without reading them all.

    Of every parameter and saved buffer it covers name, dtype, shape, and about `SAMPLES` values at even distances. So
    it tells another checkpoint, a finetuned one, another quantization; a change to a few single values it may miss.
    Weights that are sharded or offloaded have the fingerprint of the whole model; sharded ones are gathered one at a
    time, which every process must take part in.

    Raises:
        ValueError: weights that are not there (on the meta device).
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        tensor = whole(model, name, tensor)
        name = name.removeprefix("_orig_mod.")  # which `torch.compile` puts before all names
        step = max(1, tensor.numel() // SAMPLES) | 1  # odd, so as not to look at one column of a matrix only
        sample = tensor.flatten()[::step].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(bytes(sample.view(torch.uint8).tolist()))
    return digest.hexdigest()


def whole(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A weight with all of its values.

    Args:
        model: the model.
        name: the weight's, in its state dict.
        tensor: what stands there: the weight, this process's shard of it (a DTensor), or a tensor without values in
            place of one that accelerate has offloaded.

    Raises:
        ValueError: the values are nowhere.
    """
    if tensor.is_meta:
        owner, _, own_name = name.rpartition(".")
        for hook in hooks_of(model.get_submodule(owner)):
            offloaded = getattr(hook, "weights_map", None) or {}
            if own_name in offloaded:
                return offloaded[own_name]
        raise ValueError(
            f"The weight `{name}` is on the meta device and has no values, so this model's weights cannot be compared. "
            "Load them first, or leave out `model`."
        )
    if hasattr(tensor, "full_tensor"):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor
