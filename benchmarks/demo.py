"""A real MoE model with random weights, compiled with `moe_compile.backend("grouped_mm")`, from end to end.

Shows what plain `torch.compile` makes of the model, the blocks that moe_compile finds, the graph before and after, the
error against the uncompiled model, and the time of a call.
"""

import statistics
import time

import torch
from torch._dynamo.testing import CompileCounter
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_compile


def main() -> None:
    """Runs the demonstration; takes about a minute on two cores."""
    torch.manual_seed(0)
    device, dtype = ("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(device, dtype).eval()
    model.set_experts_implementation("eager")
    arguments = {"input_ids": torch.randint(1024, (1, 64), device=device), "use_cache": False}
    print(f"Qwen3-MoE, 2 layers of 16 experts, {dtype} on {device}, torch {torch.__version__}\n")

    with torch.no_grad():
        counter = CompileCounter()
        torch.compile(model, backend=counter)(**arguments)
        print(f"torch.compile alone: {counter.frame_count} graphs, the experts run as Python between them\n")
        torch._dynamo.reset()

        print(moe_compile.explain(model, **arguments, backend="grouped_mm"), "\n")
        torch._dynamo.reset()

        graphs = []
        backend = moe_compile.backend("grouped_mm", compiler=lambda gm, inputs: graphs.append(gm) or gm.forward)
        torch.compile(model, backend=backend, fullgraph=True)(**arguments)
        print("one experts block of the rewritten graph:")
        print("\n".join(f"    {line}" for line in experts_lines(graphs[0])), "\n")
        torch._dynamo.reset()

        start = time.perf_counter()
        compiled = torch.compile(model, backend=moe_compile.backend("grouped_mm"), fullgraph=True)
        output = compiled(**arguments).logits
        print(f"compiled with Inductor in {time.perf_counter() - start:.1f} s")

        expected = model(**arguments).logits
        oracle = model.float()(**arguments).logits
        model.to(dtype)
        for name, logits in (("uncompiled", expected), ("compiled", output)):
            error = ((logits.float() - oracle).norm() / oracle.norm()).item()
            print(f"relative error of the {name} model against fp32: {error:.4f}")
        before, after = milliseconds(model, arguments), milliseconds(compiled, arguments)
        print(f"one call: {before:.2f} ms uncompiled, {after:.2f} ms compiled, {before / after:.1f}x")


def experts_lines(gm: torch.fx.GraphModule) -> list[str]:
    """The operations of the first experts block, from the sort to the weighted sum."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    block = [node for node in nodes if "layers.0.mlp.experts" in str(node.meta.get("nn_module_stack", ""))]
    return [f"{node.name:28} {getattr(node.target, '__name__', node.target)}" for node in block]


def milliseconds(function, arguments: dict) -> float:  # type: ignore[no-untyped-def]
    """Median time of a call."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        function(**arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:]) * 1e3


if __name__ == "__main__":
    main()
