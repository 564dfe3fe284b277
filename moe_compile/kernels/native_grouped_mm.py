"""What `torch.nn.functional.grouped_mm` really asks of its operands, as data.

The kernel, its meta function and its derivative formula each have conditions of their own, and the error that a
violation raises deep inside the compiler names neither the weight nor the backward call that it comes from. They are:

    forward   rows (N, in)    @ weight (E, in, out)
    d rows    grad (N, out)   @ weight^T                   formula `_grouped_mm_mat1_backward`
    d weight  rows^T (in, N)  @ grad (N, out)              formula `_grouped_mm_mat2_backward`

Of each operand's last two dimensions one must have stride 1, and the other a stride that spans it and is a multiple
of 16 bytes (`check_valid_strides_and_return_transposed` in ATen's GroupedMMUtils.h, `_meta_grouped_mm_common`). Rows
and gradients are contiguous in our lowering, so their conditions become ones on the sizes: `in` always, `out` as soon
as there is a backward. The number of rows is free, zero included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

ALIGNMENT_BYTES = 16
_MIN_CPU_VERSION = (2, 11)  # before, the CPU kernel wanted 16-byte data pointers, which memory-mapped weights lack
_MIN_CUDA_VERSION = (2, 9)  # before, SM90 alone
_MIN_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class GroupedMMCall:
    """Everything that decides whether one grouped_mm runs natively.

    Sizes and strides may be symbolic; what is not known of them at compile time counts as not fulfilled.

    Attributes:
        dtype: of rows and weight, after the rows were cast to the weight's.
        weight_shape: (E, in, out), as the kernel sees it: the stored (E, out, in) is handed over as a view.
        weight_stride: strides of that view, in elements.
        weight_offset: storage offset of the weight, in elements.
        device_type: "cpu", "cuda", ...
        capability: CUDA compute capability, None elsewhere.
        torch_version: (major, minor).
        compiled: traced by torch.compile or torch.export, where the meta function decides as well.
        training: a gradient of rows or weight will be asked for.
        hip: torch is built for ROCm.
    """

    dtype: torch.dtype
    weight_shape: tuple[int | torch.SymInt, int | torch.SymInt, int | torch.SymInt]
    weight_stride: tuple[int | torch.SymInt, int | torch.SymInt, int | torch.SymInt]
    weight_offset: int | torch.SymInt = 0
    device_type: str = "cpu"
    capability: tuple[int, int] | None = None
    torch_version: tuple[int, int] = (2, 11)
    compiled: bool = True
    training: bool = False
    hip: bool = False


def describe_call(weight: torch.Tensor, *, transposed: bool, training: bool, compiled: bool = True) -> GroupedMMCall:
    """Describes the grouped_mm of contiguous rows, in the weight's dtype, with a real or fake weight.

    Args:
        weight: (E, out, in), or (E, in, out) when transposed.
        transposed: which of the two.
        training: whether gradients will be asked for.
        compiled: whether it will be traced by the compiler.
    """
    view = weight if transposed else weight.transpose(1, 2)
    on_cuda = weight.device.type == "cuda"
    major, minor = torch.__version__.split(".")[:2]
    return GroupedMMCall(
        dtype=weight.dtype,
        weight_shape=_three(view.shape),
        weight_stride=_three(view.stride()),
        weight_offset=view.storage_offset(),
        device_type=weight.device.type,
        capability=torch.cuda.get_device_capability(weight.device) if on_cuda else None,
        torch_version=(int(major), int(minor)),
        compiled=compiled,
        training=training,
        hip=torch.version.hip is not None,
    )


def native_reasons(call: GroupedMMCall) -> tuple[str, ...]:
    """Why the native kernel cannot run this call, forward or backward; empty if it can.

    A pure function of the description: it can be asked about hardware that is not here.
    """
    return (*_platform_reasons(call), *_dtype_reasons(call), *_layout_reasons(call))


def _platform_reasons(call: GroupedMMCall) -> tuple[str, ...]:
    version = ".".join(map(str, call.torch_version))
    if call.device_type == "cpu":
        if call.torch_version < _MIN_CPU_VERSION:
            return (f"grouped_mm on CPU needs torch 2.11, this is {version}",)
        return ()
    if call.device_type != "cuda":
        return (f"grouped_mm has no kernel for {call.device_type}",)
    if call.hip:
        return ("grouped_mm was not tried with ROCm",)
    if call.torch_version < _MIN_CUDA_VERSION:
        return (f"grouped_mm needs torch 2.9, this is {version}",)
    if call.capability is None or call.capability < _MIN_CAPABILITY:
        found = "an unknown one" if call.capability is None else "sm_{}{}".format(*call.capability)
        return (f"grouped_mm needs compute capability 8.0, this is {found}",)
    return ()


def _dtype_reasons(call: GroupedMMCall) -> tuple[str, ...]:
    name = str(call.dtype).removeprefix("torch.")
    if call.dtype not in _DTYPES:
        return (f"grouped_mm has no {name} kernel",)
    if call.compiled and call.dtype != torch.bfloat16:
        return (f"grouped_mm compiles in bfloat16 only, the weight is {name}",)
    return ()


def _layout_reasons(call: GroupedMMCall) -> tuple[str, ...]:
    unit = ALIGNMENT_BYTES // call.dtype.itemsize
    _, size_in, size_out = call.weight_shape
    reasons = []
    if not _is_positive_multiple(size_in, unit):
        reasons.append(f"the rows' stride, {size_in} elements, is no multiple of 16 bytes")
    if call.training and not _is_positive_multiple(size_out, unit):
        reasons.append(f"the backward reads gradients with a stride of {size_out} elements, no multiple of 16 bytes")
    weight_reason = _matrix_reason((size_in, size_out), call.weight_stride[1:], unit)
    if weight_reason is not None:
        reasons.append(weight_reason)
    # The CUDA kernel loads 16 bytes at a time. The allocator aligns storages, so the offset into one decides.
    if call.device_type == "cuda" and not statically_known_true(call.weight_offset % unit == 0):
        reasons.append(f"the weight starts {call.weight_offset} elements into its storage, not at 16 bytes")
    return tuple(reasons)


def _matrix_reason(shape: Sequence[int | torch.SymInt], stride: Sequence[int | torch.SymInt], unit: int) -> str | None:
    """The kernel's test of one operand's last two dimensions, in the order in which it makes it."""
    for dense, strided in ((0, 1), (1, 0)):
        is_dense = statically_known_true(stride[dense] == 1)
        if is_dense and statically_known_true(stride[strided] >= shape[dense]):
            if _is_positive_multiple(stride[strided], unit):
                return None
            return f"the weight's stride, {stride[strided]} elements, is no multiple of 16 bytes"
    return f"neither of the weight's last two dimensions is dense: sizes {tuple(shape)}, strides {tuple(stride)}"


def _is_positive_multiple(size: int | torch.SymInt, unit: int) -> bool:
    return statically_known_true(size > 0) and statically_known_true(size % unit == 0)


def _three(values: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, int | torch.SymInt, int | torch.SymInt]:
    first, second, third = values
    return first, second, third
