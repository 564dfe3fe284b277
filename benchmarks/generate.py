"""Tokens per second of transformers' `generate`: a model of Qwen3-30B-A3B's shape with random weights.

    python benchmarks/generate.py [--batches 1 8] [--contenders ...] [--new-tokens 256] [--json FILE]
    python benchmarks/generate.py --tiny     # a small model on the CPU, to see that it works

Contenders share one model, a static cache and greedy decoding. `hf NAME` is transformers alone, set to that experts
implementation, with its own compile (reduce-overhead); transformers switches grouped_mm to batched_mm for decoding.
The others are `CompileConfig(backend=moe_compile.backend(NAME))` in the same mode. Figures are per sequence: `tokens/s`
of the whole call, prefill included, and `decode tokens/s` from the difference between a long call and a short one.
`floor` reads every weight that a step needs once, at the measured copy bandwidth; `agree` is the share of tokens equal
to the first contender's, which roundings of random weights keep below one.
"""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate

import moe_compile

PROMPT = 16
CONTENDERS = ("hf batched_mm", "hf grouped_mm", "auto")


def make_model(tiny: bool, device: str) -> transformers.PreTrainedModel:
    """The model, made on its device in bf16, so that no copy of it is ever elsewhere."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "vocab_size": 151936,
    }  # fmt: skip
    if tiny:
        shape |= {
            "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "intermediate_size": 96, "vocab_size": 256,
        }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape))
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None  # random weights would end a sequence anywhere
    return model.eval().requires_grad_(False)


def copy_bandwidth(device: str) -> float:
    """Measured bytes/s of a copy, read and write."""
    source = torch.empty(1 << (32 if device == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() / statistics.median(times)


def floor(model: transformers.PreTrainedModel, batch: int, bandwidth: float) -> float:
    """Most tokens/s per sequence: every weight of a decoding step read once, experts as random routing hits them."""
    config = model.config
    missed = (1 - config.num_experts_per_tok / config.num_experts) ** batch
    num_bytes = 0.0
    for name, parameter in model.named_parameters():
        share = 1 - missed if ".experts." in name else 0.0 if "embed_tokens" in name else 1.0
        num_bytes += share * parameter.numel() * parameter.element_size()
    return bandwidth / num_bytes


def seconds(function: Callable[[], object], device: str) -> float:
    """Wall time of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def contend(
    name: str, model: transformers.PreTrainedModel, batch: int, new_tokens: int, rounds: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures of one contender, and the tokens that it generated."""
    device = model.device.type
    torch._dynamo.reset()
    own = not name.startswith("hf ")
    model.set_experts_implementation("grouped_mm" if own else name.removeprefix("hf "))
    backend = moe_compile.backend(name) if own else "inductor"
    config = transformers.CompileConfig(backend=backend, mode="reduce-overhead", fullgraph=own)
    config._compile_all_devices = True
    generator = torch.Generator(device).manual_seed(1)
    prompt = torch.randint(model.config.vocab_size, (batch, PROMPT), device=device, generator=generator)

    def call(tokens: int) -> torch.Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            compile_config=config,
        )

    short = max(new_tokens // 4, 2)
    compile_seconds = seconds(lambda: call(new_tokens), device)
    tokens = call(new_tokens)
    call(short)
    long_time = statistics.median(seconds(lambda: call(new_tokens), device) for _ in range(rounds))
    short_time = statistics.median(seconds(lambda: call(short), device) for _ in range(rounds))
    figures = {
        "experts": name,
        "batch": batch,
        "tokens/s": new_tokens / long_time,
        "decode tokens/s": (new_tokens - short) / (long_time - short_time),
        "first call [s]": compile_seconds,
        "runs": ", ".join(sorted({str(block.chosen) for block in backend.blocks.values()})) if own else "",
    }
    return figures, tokens


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--json", type=Path, help="where to write the rows, after each of them")
    arguments = parser.parse_args()

    device = "cpu" if arguments.tiny else "cuda"
    model = make_model(arguments.tiny, device)
    bandwidth = copy_bandwidth(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f}e9 parameters, copy {bandwidth / 1e12:.3f} TB/s")
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches:
        expected = None
        for name in arguments.contenders:
            figures, tokens = contend(name, model, batch, arguments.new_tokens, arguments.rounds)
            expected = tokens if expected is None else expected
            most = floor(model, batch, bandwidth)
            figures |= {
                "floor": most,
                "ratio": figures["decode tokens/s"] / most,
                "agree": (tokens == expected)[:, PROMPT:].float().mean().item(),
            }
            rows.append(figures)
            print(tabulate([figures], headers="keys", floatfmt=".3g"), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(record(rows, bandwidth, device), indent=1) + "\n")
    print(tabulate(rows, headers="keys", floatfmt=".3g"))


def record(rows: list[dict[str, Any]], bandwidth: float, device: str) -> dict[str, Any]:
    """The rows, with what they were measured on."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "bandwidth": bandwidth,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
