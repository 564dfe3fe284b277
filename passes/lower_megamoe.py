"""Lowers a canonical block whose experts are spread over a process group to DeepGEMM's Mega MoE.

    dispatch -> quantised_linear -> SwiGLU -> quantised_linear -> combine    ->    moe_megamoe::experts(x, ids, ...)

The projections say which process group (`group`), and the dispatch counts the experts of all its ranks.
"""

from torch import Tensor
from torch.fx import GraphModule

from moe_compile.errors import RewriteError
from moe_compile.kernels.external import megamoe
from moe_compile.kernels.external.loading import load_kernel
from moe_compile.passes.blocks import CanonicalBlock, Lowered, is_quantised, op_arguments
from moe_compile.passes.lower_with_kernel import erase_block, require_like
from moe_compile.passes.match_gate import match_gate
from moe_compile.passes.region import find_region
from moe_compile.passes.splice import replace_node, splice


def lower_megamoe(gm: GraphModule, block: CanonicalBlock) -> Lowered:
    """Replaces a block's canonical ops in place; the caller lints and recompiles.

    Args:
        gm: the root graph module.
        block: a block of it.

    Returns:
        The outcome "deepgemm_megamoe".

    Raises:
        RequirementError, KernelLoadError: if the kernel cannot be loaded, which happens here at first.
        RewriteError: if the block is not FP4 SwiGLU over a process group.
    """
    load_kernel(megamoe.NAME)
    region = find_region(block)
    gate = region if isinstance(region, str) else match_gate(gm, region)
    if isinstance(region, str) or isinstance(gate, str) or gate.kind != "silu" or not gate.concatenated:
        raise _refused(gate if isinstance(gate, str) else f"the gate is {gate}")
    (combine,) = block.combines
    if not all(map(is_quantised, block.linears)):
        raise _refused("its weights are not quantised")
    dispatch, up, down, last = map(op_arguments, (block.dispatch, region.up, region.down, combine))
    if not up["group"] or up["group"] != down["group"]:
        raise _refused("its experts are not spread over a process group")
    tensors = dispatch["x"], dispatch["ids"], last["weights"], *(p[k] for p in (up, down) for k in ("weight", "scale"))
    settings = {"group": up["group"], "limit": gate.limit, "dtype": last["dtype"]}
    (result,) = splice(gm, combine, _experts, tensors, **settings)
    require_like(megamoe.NAME, result, combine)
    replace_node(combine, result)
    erase_block(block, region.nodes)
    return Lowered(megamoe.NAME)


def _refused(found: str) -> RewriteError:
    return RewriteError(
        "lowering an experts block to deepgemm_megamoe", found, "Use deepgemm, which lowers projection by projection"
    )


def _experts(x: Tensor, ids: Tensor, weights: Tensor, *matrices: Tensor, **settings: object) -> Tensor:
    return megamoe.experts(x, ids, weights, *matrices, **settings)  # type: ignore[arg-type]
