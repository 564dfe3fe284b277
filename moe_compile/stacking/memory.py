"""Lays parameters into one buffer and makes each of them a window of it.

    before    p0 -> [storage]   p1 -> [storage]   p2 -> [storage]
    after     p0 -> [window]    p1 -> [window]    p2 -> [window]      three storages over slices of the buffer's memory
              buffer = [   p0   |   p1   |   p2   ]

A window is a storage of its own, as long as the parameter and no longer. A plain view would be shorter to write, but it
shares the buffer's storage: saving one expert would then write all of them, safetensors refuses tensors that share
storage, and `deepcopy` of one parameter would copy the buffer. Each window keeps the buffer's memory alive.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

DEVICES = ("cpu", "cuda")


def mismatch(parameters: Sequence[Tensor]) -> str | None:
    """Why parameters cannot be stacked at all: what differs between them; None if nothing."""
    first = parameters[0]
    for number, other in enumerate(parameters):
        if (other.shape, other.dtype, other.device) != (first.shape, first.dtype, first.device):
            return f"expert {number} has {_describe(other)}, expert 0 {_describe(first)}"
    return None


def obstacle(parameters: Sequence[Tensor]) -> str | None:
    """Why the memory of parameters must stay where it is; None if they can become windows of one buffer."""
    for number, parameter in enumerate(parameters):
        reason = _obstacle(parameter)
        if reason is not None:
            return f"the weight of expert {number} {reason}"
    if len({parameter.data_ptr() for parameter in parameters}) < len(parameters):
        return "some experts share one weight"
    return None


def _obstacle(parameter: Tensor) -> str | None:
    if type(parameter) is not torch.nn.Parameter or type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data if type(parameter) is torch.nn.Parameter else parameter).__name__}"
    if parameter.device.type not in DEVICES:
        return f"is on the device {parameter.device.type}"
    if parameter.layout is not torch.strided or not parameter.is_contiguous():
        return "is not contiguous"
    if parameter.numel() < 2:
        return "has fewer than two elements"
    if parameter.is_inference():
        return "was made in inference mode"
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes:
        # A flat buffer of an optimizer or of a sharding wrapper, which would no longer see the parameter.
        return "is a view of a larger tensor"
    if parameter.device.type == "cpu" and storage.is_shared():
        return "lies in memory that is shared with other processes"
    return None


def lay_out(parameters: Sequence[Tensor]) -> Tensor:
    """Copies parameters into a new buffer and makes them windows of it.

    What a parameter held before is freed as soon as it is copied, if nobody else holds it. Somebody may, such as code
    that swaps a parameter's data and puts it back; hence a new buffer each time, never an old one overwritten.

    Args:
        parameters: E parameters without an `obstacle`, all of shape (...).

    Returns:
        (E, ...), of the parameters' dtype, on their device.
    """
    first = parameters[0]
    # Not an inference tensor, even if this runs in inference mode: training may follow.
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.empty((len(parameters), *first.shape), dtype=first.dtype, device=first.device)
        for parameter, window in zip(parameters, windows(buffer), strict=True):
            window.copy_(parameter)
            parameter.data = window
    return buffer


def convert(buffer: Tensor, parameters: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Takes a buffer and its windows to another dtype or device.

    Args:
        buffer: (E, ...).
        parameters: its windows.
        function: what `Module.to` and the like apply to each tensor.

    Returns:
        The new buffer; None, with nothing changed, if the function does something else, such as moving a tensor to
        shared memory, which must not happen to memory that has windows.
    """
    with torch.inference_mode(False), torch.no_grad():
        probe = buffer.new_empty(1)
        converted = function(probe)
        if (converted.dtype, converted.device) == (probe.dtype, probe.device) or function(converted) is not converted:
            return None
        if converted.device.type not in DEVICES:
            return None
        new = function(buffer.detach())
        for parameter, window in zip(parameters, windows(new), strict=True):
            parameter.data = window
    return new


def windows(buffer: Tensor) -> list[Tensor]:
    """The slices (...) of a buffer (E, ...), each with a storage of its own over the buffer's memory."""
    found = []
    for part in buffer.detach().flatten(1).view(torch.uint8):  # bytes: DLPack does not know every dtype
        found.append(from_dlpack(part).view(buffer.dtype).view(buffer.shape[1:]))
    return found


def take_out(parameters: Sequence[Tensor]) -> None:
    """Gives parameters memory of their own."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            parameter.data = parameter.data.clone()


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
