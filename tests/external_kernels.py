"""Stand-ins for kernels of other projects, which keep the contract of the real ones on any device.

They are as unforgiving as those: rows that the real kernel leaves uninitialised are NaN here, and a tile of rows takes
the expert of its first row. Each is a folder of sources, as it would lie in a kernel repository.
"""

import importlib.util
import json
import sys
from pathlib import Path

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
