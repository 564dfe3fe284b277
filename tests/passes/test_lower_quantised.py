"""FP8 and FP4 experts through `deepgemm`, and Mega MoE, on stand-ins that keep the real kernels' contract."""

import types
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from external_kernels import BLACKWELL, DEEP_GEMM, write_local_kernel
from torch.library import opcheck
from torch.nn import functional

import moe_compile
from moe_compile.errors import BlockInputError, KernelResultError, RewriteError
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.external import loaded_kernels
from moe_compile.kernels.external import loading, megamoe
from moe_compile.kernels.external.loading import forget_kernel, load_kernel
from moe_compile.kernels.external.rows import quantise_rows
from moe_compile.kernels.quantised_linear import dequantise

BF16, FP8, UE8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
E, K, D, F = 4, 2, 256, 128


@pytest.fixture(autouse=True)
def local_kernel(tmp_path, monkeypatch):
    """A local kernel folder with DeepGEMM, on a machine that is said to be Blackwell."""
    pytest.importorskip("kernels")
    monkeypatch.setenv("LOCAL_KERNELS", write_local_kernel(tmp_path / "local", "deep_gemm", DEEP_GEMM))
    monkeypatch.setattr(loading, "describe_environment", lambda *_, loaders=frozenset(): BLACKWELL)
    for name in ("deepgemm", "deepgemm_megamoe"):
        monkeypatch.setitem(EXPERTS_BACKENDS, name, replace(EXPERTS_BACKENDS[name], reasons=lambda spec, situation: ()))
    yield
    megamoe.release_buffers()
    for name in ("deepgemm", "deepgemm_megamoe"):
        forget_kernel(name)


def quantised(kind, out, size, seed):
    """A weight (E, out, size) with scales, as checkpoints store it."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "fp4":
        weight = torch.randint(-128, 128, (E, out, size // 2), generator=generator, dtype=torch.int8)
        scale = torch.randint(119, 123, (E, out, size // 32), generator=generator, dtype=torch.uint8).view(UE8M0)
        return weight, scale
    weight = torch.randn(E, out, size, generator=generator).to(FP8)
    rows = out if kind == "fp8 rows" else out // 128
    scale = torch.rand(E, rows, size // 128, generator=generator) * 0.1 + 0.01
    return weight, torch.exp2(torch.round(torch.log2(scale))).to(UE8M0) if kind == "fp8 ue8m0" else scale


def silu_gate(hidden):
    gate, up = hidden.chunk(2, -1)
    return functional.silu(gate) * up


def clamped_gate(hidden):
    gate, up = hidden.chunk(2, -1)
    return functional.silu(gate.clamp(max=0.5)) * up.clamp(min=-0.5, max=0.5)


class Block(torch.nn.Module):
    def __init__(self, kind, gate=silu_gate, group=""):
        super().__init__()
        for name, out, size in (("up", 2 * F, D), ("down", D, F)):
            weight, scale = quantised(kind, out, size, len(name))
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", scale)
        self.gate, self.group = gate, group

    def forward(self, x, ids, weights):
        return moe_compile.experts_block(
            x, ids, weights, up=self.up, up_scale=self.up_scale, gate=self.gate, down=self.down,
            down_scale=self.down_scale, process_group=self.group,
        )  # fmt: skip

    def exact(self, x, ids, weights):
        """In float32, token by token; what the kernels lose by rounding rows to FP8 is not in it."""
        up, down = dequantise(self.up, self.up_scale), dequantise(self.down, self.down_scale)
        out = torch.zeros(x.shape)
        for t, (row, chosen, scales) in enumerate(zip(x.float(), ids.tolist(), weights.tolist(), strict=True)):
            for expert, scale in zip(chosen, scales, strict=True):
                if 0 <= expert < E:
                    out[t] += scale * (down[expert] @ self.gate(up[expert] @ row))
        return out


def inputs(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E + 1, (tokens, K), generator=generator)
    return torch.randn(tokens, D, generator=generator).to(BF16), ids, torch.rand(tokens, K, generator=generator)


def rounded(x, ids, weights):
    """The same inputs with tokens as Mega MoE's FP8 has them: what is left is the rounding of its output."""
    values, scales = quantise_rows(x, torch.zeros(x.shape[0], dtype=torch.int32), 32, power_of_two=True)
    return (values.float().view(x.shape[0], -1, 32) * scales.unsqueeze(-1)).view(x.shape), ids, weights


def error(found, expected):
    return ((found.float() - expected).norm() / expected.norm()).item()


def compiled(module, experts):
    torch._dynamo.reset()
    return torch.compile(module, backend=moe_compile.backend(experts, compiler="aot_eager"), fullgraph=True)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "fp8 rows", "fp8 ue8m0", "fp4"])
def test_the_reference_runs_what_checkpoints_store(kind):
    module, given = Block(kind), inputs(9)
    assert error(module(*given), module.exact(*given)) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "fp8 rows", "fp8 ue8m0", "fp4"])
def test_deepgemm_rounds_rows_and_reads_scales(kind):
    module = Block(kind)
    call = compiled(module, "deepgemm")
    for tokens in (9, 20, 1):
        given = inputs(tokens, tokens)
        # e4m3 keeps three bits: half of 2**-3 at most per value, about a third of that on average, twice in a row.
        assert error(call(*given), module.exact(*given)) < 0.06
    (kernel,) = loaded_kernels()
    assert (kernel.name, kernel.source) == ("deepgemm", "kernels package")


@torch.no_grad()
def test_deepgemm_names_a_quantised_block_that_it_cannot_keep_padded():
    def counts(hidden):
        return silu_gate(hidden) + 0 * torch.arange(hidden.shape[0]).unsqueeze(1)

    with pytest.raises(RewriteError, match="depends on the number of rows"):
        compiled(Block("fp8", counts), "deepgemm")(*inputs(9))


@pytest.fixture(scope="module")
def group():
    if not dist.is_available():
        pytest.skip("torch without distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@torch.no_grad()
@pytest.mark.parametrize("gate", [silu_gate, clamped_gate])
def test_megamoe_runs_the_whole_block(gate, group):
    module = Block("fp4", gate, group)
    call = compiled(module, "deepgemm_megamoe")
    for tokens in (5, 17, 3):
        given = inputs(tokens, tokens)
        assert error(call(*given), module.exact(*rounded(*given))) < 0.01
    kernel = load_kernel("deepgemm_megamoe").module
    assert len(kernel.TRANSFORMED) == 1, "weights are transformed once"
    assert [buffer.num_max_tokens_per_rank for buffer in kernel.SymmBuffer.made] == [8, 32], "one buffer, then a larger"
    assert [buffer.destroyed for buffer in kernel.SymmBuffer.made] == [True, False]
    module.up_scale.copy_(module.up_scale.view(torch.uint8).add(1).view(UE8M0))
    given = inputs(3)
    assert error(call(*given), module.exact(*rounded(*given))) < 0.01
    assert len(kernel.TRANSFORMED) == 2, "and again once they have changed"
    megamoe.release_buffers()
    assert all(buffer.destroyed for buffer in kernel.SymmBuffer.made)


@torch.no_grad()
def test_layers_of_one_shape_share_the_buffer(group):
    layers = [Block("fp4", silu_gate, group) for _ in range(3)]

    def run(x, ids, weights):
        for layer in layers:
            x = layer(x, ids, weights) * 0.01
        return x

    compiled(run, "deepgemm_megamoe")(*inputs(4))
    kernel = load_kernel("deepgemm_megamoe").module
    assert len(kernel.SymmBuffer.made) == 1
    assert len(kernel.TRANSFORMED) == 3


@torch.no_grad()
def test_ids_are_counted_over_all_ranks(monkeypatch):
    monkeypatch.setattr(megamoe, "_resolve", lambda group: types.SimpleNamespace(size=lambda: 2))
    module, (x, ids, weights) = Block("fp4"), inputs(6)
    ids[:, 0] = torch.tensor([0, E - 1, E, 2 * E - 1, 2 * E, -1])
    ids[:, 1] = -1
    kernel = load_kernel("deepgemm_megamoe")
    run = lambda out, first, second, buffer, activation_clamp: out.zero_()  # noqa: E731
    monkeypatch.setitem(
        loading._loaded, kernel.report.name, replace(kernel, functions={**kernel.functions, "fp8_fp4_mega_moe": run})
    )
    matrices = module.up, module.up_scale, module.down, module.down_scale
    megamoe.experts(x, ids, weights, *matrices, group="two", limit=None, dtype=BF16)
    (buffer,) = kernel.module.SymmBuffer.made
    assert buffer.num_experts == 2 * E
    assert buffer.topk_idx[:6, 0].tolist() == [0, E - 1, E, 2 * E - 1, -1, -1]


@torch.no_grad()
def test_megamoe_refuses_other_blocks(group):
    for module, words in (
        (Block("fp4", silu_gate), "not spread over a process group"),
        (Block("fp4", lambda h: h.chunk(2, -1)[0].relu() * h.chunk(2, -1)[1], group), "the gate is"),
        (Block("fp4", lambda h: functional.silu(h[..., ::2]) * h[..., 1::2], group), "the gate is"),
        (Block("fp4", lambda h: silu_gate(h) + 1, group), "not in a product"),
    ):
        with pytest.raises(RewriteError, match=words):
            compiled(module, "deepgemm_megamoe")(*inputs(3))


@torch.no_grad()
def test_the_op_keeps_its_contract(group):
    module, given = Block("fp4"), inputs(4)
    matrices = module.up, module.up_scale, module.down, module.down_scale
    arguments = (*given, *matrices, group, None, BF16, megamoe.DIGEST)
    # `test_schema` compares scales by arithmetic that float8_e8m0fnu does not have.
    opcheck(torch.ops.moe_megamoe.experts, arguments, test_utils="test_faketensor")
    with pytest.raises(BlockInputError, match="no process group 'nobody'"):
        megamoe.experts(*given, *matrices, group="nobody", limit=None, dtype=BF16)
    with pytest.raises(BlockInputError, match="UE8M0"):
        megamoe.experts(*given, module.up, module.up_scale.float(), *matrices[2:], group=group, limit=None, dtype=BF16)


@torch.no_grad()
@pytest.mark.parametrize(
    ("symbol", "wrong"),
    [
        ("per_token_cast_to_fp8", lambda x, **_: (x, x)),
        ("transform_weights_for_mega_moe", lambda first, second: ((first[0].float(), first[1]), second)),
        ("fp8_fp4_mega_moe", lambda y, *_, **__: y.float()),
    ],
)
def test_a_kernel_that_answers_wrongly_is_forgotten_and_the_next_attempt_works(symbol, wrong, group):
    module, given = Block("fp4", silu_gate, group), inputs(4)
    settings = {"group": group, "limit": None, "dtype": BF16}
    matrices = module.up, module.up_scale, module.down, module.down_scale
    loaded = load_kernel("deepgemm_megamoe")
    name = next(name for name in loaded.functions if name.endswith(symbol))
    loading._loaded["deepgemm_megamoe"] = replace(loaded, functions={**loaded.functions, name: wrong})
    with pytest.raises(KernelResultError, match=f"{symbol} of deepgemm_megamoe"):
        megamoe.experts(*given, *matrices, **settings)
    assert loaded_kernels() == ()
    assert error(megamoe.experts(*given, *matrices, **settings), module.exact(*rounded(*given))) < 0.01
