"""The rule that stands in for a measured table: what each experts backend costs at least, from its bytes and flops.

    time = launches + max(bytes / bandwidth, flops / (rate * share of the rate that is reached))

with M the elements of one expert's matrices, N = T*K rows, and the experts hit by random routing,
E * (1 - (1 - K/E)^T):

    grouped_mm   hit * M weights, the rows sorted and back       native grouped GEMM
    triton       hit * M weights, rows read in place             own kernels, slower where flops decide
    batched_mm   N * M weights, gathered: written and read back  products of one row are bound by bytes

The figures of a device are rough on purpose: they only have to order backends whose costs differ by the number of
matrices they read.
"""

from dataclasses import dataclass

from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec
from moe_compile.tables import size_of


@dataclass(frozen=True)
class Device:
    """Rough figures of a kind of device.

    Attributes:
        bandwidth: bytes/s.
        rate: dense matrix products, flops/s, in 16 bit.
        launch: seconds per kernel outside CUDA graphs.
        fuses_gather: Inductor reads gathered weights in place at one token, so that they are never written.
    """

    bandwidth: float
    rate: float
    launch: float
    fuses_gather: bool


_DEVICES = {
    "cuda": Device(3e12, 6e14, 4e-6, False),
    "cpu": Device(6e10, 8e11, 2e-6, True),
}
_LAUNCHES = {"grouped_mm": 12, "triton": 8, "batched_mm": 5}
_REACHED = {"grouped_mm": 0.7, "triton": 0.6, "batched_mm": 0.5}


def estimate(name: str, spec: ExpertsSpec, situation: Situation, tokens: int) -> float | None:
    """Seconds of a call by the roofline.

    Args:
        name: an experts backend.
        spec: the block.
        situation: what surrounds it.
        tokens: T.

    Returns:
        None for a backend whose costs are not known, or a block whose sizes are not.
    """
    if name not in _LAUNCHES:
        return None
    size = size_of(spec)
    if size is None or spec.weight_dtype is None:
        return None
    experts, top_k, hidden, inner = size.num_experts, size.top_k, size.hidden_size, size.intermediate_size
    device = _DEVICES.get(situation.device_type, _DEVICES["cuda"])
    itemsize = spec.weight_dtype.itemsize
    matrix = (3 if spec.gated else 2) * hidden * inner
    rows = tokens * top_k
    if name == "batched_mm":
        passes = 1 if device.fuses_gather and tokens == 1 else 3
        elements = float(passes * rows * matrix)
    else:
        hit = experts * (1 - max(0.0, 1 - top_k / experts) ** tokens)
        elements = hit * matrix + (4 * rows * hidden if name == "grouped_mm" else rows * hidden)
    rate = device.rate * _REACHED[name] * (2 / itemsize)
    work = max(elements * itemsize / device.bandwidth, 2 * rows * matrix / rate)
    launches = 0 if situation.settings.cuda_graphs else _LAUNCHES[name] * device.launch
    return (3 if situation.training else 1) * (work + launches)
