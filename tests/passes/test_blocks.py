"""Finding canonical blocks in graphs of every kind."""

import pytest
import torch
from reference import canonical, make_inputs, swiglu
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from moe_compile.errors import RewriteError
from moe_compile.passes.blocks import fake_value, find_canonical_blocks, is_canonical, needs_gradient, op_arguments

ops = torch.ops.moe


def dynamo_graph(function, *arguments) -> GraphModule:
    """What a backend is handed."""
    captured = []

    def capture(gm, _):
        captured.append(gm)
        return gm.forward

    torch.compile(function, backend=capture, fullgraph=True)(*arguments)
    return captured[0]


def aten_graph(function, *arguments) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)


def exported_graph(function, *arguments) -> GraphModule:
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    return torch.export.export(Module(), arguments).graph_module


def block_on(x, ids, weights, up, down, bias):
    return tagged_block(x, ids, weights, up, down, bias, "block")


def tagged_block(x, ids, weights, up, down, bias, tag):
    rows, offsets, order = ops.dispatch(x, ids, up.shape[0], tag)
    hidden = ops.grouped_linear(rows, up, bias, offsets, False)
    out = ops.grouped_linear(swiglu(hidden), down, None, offsets=offsets, transposed=False)
    return ops.combine(out, weights, order, dtype=x.dtype)


@pytest.fixture
def tensors():
    inputs = make_inputs(5, bias=True)
    return inputs.x, inputs.ids, inputs.weights, inputs.up, inputs.down, inputs.up_bias


@pytest.mark.parametrize("trace", [dynamo_graph, aten_graph, exported_graph])
def test_every_part_is_found(trace, tensors):
    gm = trace(block_on, *tensors)
    (block,) = find_canonical_blocks(gm)
    assert block.graph_module is gm
    assert block.tag == "block"
    parts = (block.rows, block.offsets, block.order, block.linears, block.combines)
    assert tuple(map(len, parts)) == (1, 1, 1, 2, 1)
    up, down = map(op_arguments, block.linears)
    assert fake_value(up["weight"]).shape == (4, 48, 16)
    assert fake_value(down["weight"]).shape == (4, 16, 24)
    assert down["bias"] is None
    assert all(needs_gradient(linear) for linear in block.linears)


@pytest.mark.parametrize("trace", [dynamo_graph, aten_graph])
def test_spec_says_what_the_ops_say(trace, tensors):
    spec = find_canonical_blocks(trace(block_on, *tensors))[0].spec()
    assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size) == (4, 2, 16, 24)
    assert spec.gated
    assert not spec.transposed
    assert spec.up_bias is not None
    assert spec.down_bias is None
    assert spec.weight_dtype == spec.activation_dtype == spec.routing_dtype == torch.float32


def test_blocks_keep_apart_and_in_order(tensors):
    x, *others = tensors

    def two(x):
        return tagged_block(tagged_block(x, *others, "first"), *others, "second")

    first, second = find_canonical_blocks(dynamo_graph(two, x))
    assert (first.tag, second.tag) == ("first", "second")
    assert not {*first.linears, *first.combines} & {*second.linears, *second.combines}


def test_blocks_under_activation_checkpointing_are_found(tensors):
    x, *others = tensors

    def checkpointed(x):
        return checkpoint(block_on, x, *others, use_reentrant=False)

    gm = dynamo_graph(checkpointed, x)
    (block,) = find_canonical_blocks(gm)
    assert block.graph_module is not gm
    assert block.dispatch.graph is block.graph_module.graph


def test_gradient_is_needed_only_where_one_is_recorded(tensors):
    def frozen(*arguments):
        with torch.no_grad():
            return block_on(*arguments)

    (block,) = find_canonical_blocks(dynamo_graph(frozen, *tensors))
    assert not any(needs_gradient(linear) for linear in block.linears)


def test_a_graph_without_blocks():
    assert find_canonical_blocks(dynamo_graph(lambda x: x * 2, torch.ones(3))) == []


@pytest.mark.parametrize("trace", [dynamo_graph, aten_graph])
def test_canonical_ops_outside_any_block_are_refused(trace, tensors):
    def alone(x, weight):
        return ops.grouped_linear(x, weight, None, torch.tensor([1, 2, 3, 5], dtype=torch.int32), False)

    with pytest.raises(RewriteError, match=r"no moe::dispatch in the same graph"):
        find_canonical_blocks(trace(alone, tensors[0], tensors[3]))


def test_graphs_after_autograd_are_refused():
    inputs = make_inputs(5)

    def step(x):
        inputs.x = x
        return torch.autograd.grad(canonical(inputs).sum(), x)

    with pytest.raises(RewriteError, match="before autograd"):
        find_canonical_blocks(make_fx(step)(inputs.x))


def test_a_node_without_a_fake_value_is_refused(tensors):
    gm = aten_graph(block_on, *tensors)
    (block,) = find_canonical_blocks(gm)
    assert is_canonical(block.dispatch)
    block.dispatch.meta.clear()
    with pytest.raises(RewriteError, match="no fake tensor"):
        fake_value(block.dispatch)
