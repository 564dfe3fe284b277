"""Stand-ins for kernels of other projects, which keep the contract of the real ones on any device.

They are as unforgiving as those: rows that the real kernel leaves uninitialised are NaN here, and a tile of rows takes
the expert of its first row. Each is a folder of sources, as it would lie in a kernel repository.
"""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

from moe_compile.kernels.external.environment import Environment, Toolkit

HOPPER = Environment(
    cuda=True,
    capability=(9, 0),
    toolkit=Toolkit("/opt/cuda", "CUDA_HOME", True, (12, 4)),
    distributions={"kernels": "0.17.2", "nvidia-cutlass-dsl": "4.6.0", "apache-tvm-ffi": "0.1.11"},
)
BLACKWELL = replace(HOPPER, capability=(10, 0), toolkit=Toolkit("/opt/cuda", "CUDA_HOME", True, (12, 9)))

DEEP_GEMM = {
    "__init__.py": """
import torch

ALIGNMENT = 16
CALLS = []


def get_mk_alignment_for_contiguous_layout():
    return ALIGNMENT


def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False):
    assert a.is_contiguous() and d.is_contiguous() and grouped_layout.dtype == torch.int32
    assert a.dtype == b.dtype == d.dtype == torch.bfloat16 and a.shape[0] == d.shape[0]
    CALLS.append((tuple(a.shape), tuple(b.shape), b.data_ptr()))
    d.fill_(float("nan"))
    if use_psum_layout:
        rows = torch.arange(a.shape[0], device=a.device)
        layout = torch.searchsorted(grouped_layout, rows.int(), right=True)
        layout = torch.where(layout < b.shape[0], layout, -1)
    else:
        layout = grouped_layout
    for first in range(0, a.shape[0], ALIGNMENT):
        expert = int(layout[first])
        if expert >= 0:
            d[first : first + ALIGNMENT] = a[first : first + ALIGNMENT] @ b[expert].T


def m_grouped_bf16_gemm_nn_contiguous(a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False):
    m_grouped_bf16_gemm_nt_contiguous(a, b.transpose(1, 2), d, grouped_layout, compiled_dims, use_psum_layout)
""",
}

# DeepGEMM with the quantised product and Mega MoE. Its weights are rearranged, as the real one's are, and its buffer
# belongs to a process group of one rank.
DEEP_GEMM["utils.py"] = """
import torch


def per_token_cast_to_fp8(x, use_ue8m0, gran_k=128, use_packed_ue8m0=False):
    values = x.float().view(x.shape[0], -1, gran_k)
    scales = values.abs().amax(2).clamp(1e-4) / 448
    scales = torch.exp2(torch.ceil(torch.log2(scales))) if use_ue8m0 else scales
    cast = (values / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape)
    if not use_packed_ue8m0:
        return cast, scales
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return cast, exponents.view(torch.int32)


def unpacked(packed):
    return (packed.contiguous().view(torch.uint8).int() << 23).view(torch.float32)


def spread(values, scales):
    height, width = values.shape[-2] / scales.shape[-2], values.shape[-1] / scales.shape[-1]
    return values.float() * scales.repeat_interleave(int(height), -2).repeat_interleave(int(width), -1)


def fp4(packed):
    code = torch.stack((packed & 15, (packed >> 4) & 15), -1).flatten(-2).long()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[code & 7]
    return torch.where(code > 7, -values, values)
"""
DEEP_GEMM["__init__.py"] += """

from . import utils
from .utils import fp4, spread, unpacked


def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None, use_psum_layout=False):
    (rows, row_scales), (weight, scales) = a, b
    assert rows.dtype == torch.float8_e4m3fn and row_scales.dtype == scales.dtype == torch.float32
    assert recipe is None or recipe == (1, 1, rows.shape[1] // row_scales.shape[1])
    assert (recipe is not None) == (scales.shape[1] == weight.shape[1])
    d.fill_(float("nan"))
    weight = spread(fp4(weight) if weight.dtype == torch.int8 else weight, scales)
    values = spread(rows, row_scales)
    for first in range(0, rows.shape[0], ALIGNMENT):
        expert = int(grouped_layout[first])
        if expert >= 0:
            d[first : first + ALIGNMENT] = (values[first : first + ALIGNMENT] @ weight[expert].T).to(d.dtype)


class SymmBuffer:
    made = []

    def __init__(self, group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden):
        self.group, self.num_experts, self.num_max_tokens_per_rank = group, num_experts, num_max_tokens_per_rank
        tokens = num_max_tokens_per_rank
        self.x = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn)
        self.x_sf = torch.zeros(tokens, hidden // 128, dtype=torch.int32)
        self.topk_idx = torch.full((tokens, num_topk), 10**6)
        self.topk_weights = torch.zeros(tokens, num_topk)
        self.destroyed = False
        SymmBuffer.made.append(self)

    def destroy(self):
        self.destroyed = True


def get_symm_buffer_for_mega_moe(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden):
    return SymmBuffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)


def transform_sf_into_required_layout(sf, mn, k, recipe, num_groups):
    assert tuple(sf.shape) == (num_groups, mn, k // recipe[1])
    return sf.flip(1)


TRANSFORMED = []


def transform_weights_for_mega_moe(l1_weights, l2_weights):
    TRANSFORMED.append(1)
    (up, up_sf), (down, down_sf) = l1_weights, l2_weights
    return (up.flip(1), up_sf), (down.flip(1), down_sf)


def fp8_fp4_mega_moe(y, l1_weights, l2_weights, sym_buffer, activation_clamp=None):
    assert not sym_buffer.destroyed
    up, down = (spread(fp4(weight.flip(1)), sf.flip(1)) for weight, sf in (l1_weights, l2_weights))
    tokens = y.shape[0]
    x = spread(sym_buffer.x[:tokens], unpacked(sym_buffer.x_sf[:tokens]))
    y.zero_()
    for token in range(tokens):
        total = torch.zeros(y.shape[1])
        for expert, weight in zip(sym_buffer.topk_idx[token].tolist(), sym_buffer.topk_weights[token].tolist()):
            if expert >= 0:
                gate, linear = (up[expert] @ x[token]).chunk(2)
                if activation_clamp is not None:
                    gate = gate.clamp(max=activation_clamp)
                    linear = linear.clamp(-activation_clamp, activation_clamp)
                total += weight * (down[expert] @ (torch.nn.functional.silu(gate) * linear))
        y[token] = total.to(y.dtype)
"""

SONIC_MOE = {
    "__init__.py": "from . import functional\n",
    "functional/__init__.py": "from . import backward, forward\n",
    "functional/forward.py": '''
import torch

from .gates import GATES


def interleaved(b, concat_layout):
    """(E, in, 2F) whose halves are concatenated, as the kernel reads them: parts alternate."""
    assert b.stride(-1) != 1, "only strided columns can be read as interleaved"
    gate, up = b.chunk(2, -1)
    return torch.stack((gate, up), -1).flatten(-2)


def groups(bounds):
    bounds = bounds.tolist()
    return list(enumerate(zip(bounds, bounds[1:])))


def gemm_gated(A, B, activation, cu_seqlens_m, A_idx, preact_out, postact_out, store_preact, bias=None, tuned=True,
               concat_layout=None):
    postact_out.fill_(float("nan"))
    if concat_layout:
        B = interleaved(B, concat_layout)
    for expert, (start, end) in groups(cu_seqlens_m):
        h = A[A_idx[start:end].long()].float() @ B[expert].float()
        if bias is not None:
            b = bias[expert].float()
            h = h + (torch.stack(b.chunk(2, -1), -1).flatten() if "bias" in (concat_layout or ()) else b)
        if store_preact:
            preact_out[start:end] = h.to(preact_out.dtype)
        postact_out[start:end] = GATES[activation](h[:, ::2], h[:, 1::2]).to(postact_out.dtype)
    return preact_out, postact_out


def gemm(A, B, out, bias=None, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, dynamic_scheduler=False, tuned=True,
         concat_layout=None):
    if concat_layout and "B" in concat_layout:
        B = interleaved(B.transpose(1, 2), concat_layout).transpose(1, 2)
    if cu_seqlens_m is not None:
        out.fill_(float("nan"))
        for expert, (start, end) in groups(cu_seqlens_m):
            y = A[start:end].float() @ B[expert].float()
            out[start:end] = (y if bias is None else y + bias[expert].float()).to(out.dtype)
        return out
    for expert, (start, end) in groups(cu_seqlens_k):
        part = A[:, A_idx[start:end].long()] if A_idx is not None else A[:, start:end]
        product = part.float() @ B[start:end].float()
        if concat_layout and "out" in concat_layout:
            product = torch.cat((product[:, ::2], product[:, 1::2]), 1)
        out[expert] = product.to(out.dtype)
    return out
''',
    "functional/backward.py": """
import torch

from .forward import groups
from .gates import GATES


def gemm_dgated(A, B, PreAct, activation, dx_out, postact_out, colvec_scale, colvec_reduce, cu_seqlens_m, A_idx,
                dynamic_scheduler=True, tuned=True):
    dx_out.fill_(float("nan")), postact_out.fill_(float("nan"))
    reduced = torch.full_like(colvec_scale, float("nan"))
    for expert, (start, end) in groups(cu_seqlens_m):
        grad = A[A_idx[start:end].long()].float() @ B[expert].float()
        with torch.enable_grad():
            h = PreAct[start:end].float().detach().requires_grad_()
            act = GATES[activation](h[:, ::2], h[:, 1::2])
            (dh,) = torch.autograd.grad(act, h, grad * colvec_scale[start:end, None])
        dx_out[start:end] = dh.to(dx_out.dtype)
        postact_out[start:end] = (act.detach() * colvec_scale[start:end, None]).to(postact_out.dtype)
        reduced[start:end] = (grad * act.detach()).sum(1)
    return dx_out, postact_out, reduced
""",
    "functional/gates.py": """
from torch.nn import functional as F

GATES = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
}
""",
}

REPOSITORIES = {"deep_gemm": "kernels-community/deep-gemm", "sonicmoe": "kernels-community/sonic-moe"}


def write_package(folder: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def import_package(folder: Path, name: str):
    """Imports a folder of sources as a package of its own."""
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[module]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def write_local_kernel(folder: Path, name: str, sources: dict[str, str]) -> str:
    """Writes a local kernel folder for the `kernels` package; returns what `LOCAL_KERNELS` has to say."""
    for variant, backend in (("torch-cpu", "cpu"), ("torch-cuda", "cuda")):
        build = write_package(folder / "build" / variant, sources)
        about = {"id": f"{name}_{folder.name}", "name": REPOSITORIES[name].split("/")[1], "version": 2}
        about |= {"license": "Apache-2.0", "python-depends": [], "backend": {"type": backend}}
        (build / "metadata.json").write_text(json.dumps(about))
    return f"{REPOSITORIES[name]}={folder}"
