"""A `torch.compile` backend that rewrites Mixture-of-Experts blocks to the kernel you choose.

model = torch.compile(model, backend=moe_compile.backend("grouped_mm"))
"""

from moe_compile.backend import backend
from moe_compile.capture.experts_block import experts_block
from moe_compile.capture.install import install
from moe_compile.capture.registered import register_experts
from moe_compile.errors import MoeCompileError
from moe_compile.explain import explain
from moe_compile.register_backend import register_backend, unregister_backend
from moe_compile.rewrite import rewrite
from moe_compile.spec import ExpertsSpec

__version__ = "0.1.0"

__all__ = [
    "ExpertsSpec",
    "MoeCompileError",
    "backend",
    "experts_block",
    "explain",
    "register_backend",
    "register_experts",
    "rewrite",
    "unregister_backend",
]

install()  # by name, no function of ours is called before Dynamo traces
