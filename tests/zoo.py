"""Tiny random MoE models of transformers: `build(model_type, dtype)` -> (model in eval mode, example arguments).

One row of ZOO per model type: module, config class, model class, config overrides, and the kind of inputs where it is
not a language model's. Sizes from GENERIC go to the fields that a config class declares, then the overrides. Hidden
size 64, two layers, 8 experts, top-2; the experts' inner size is 48, so that D, F and 2F are all different.
"""

import copy
import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass

import torch

import moe_compile

H, F, E, K, V, L = 64, 48, 8, 2, 256, 2

GENERIC = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "moe_num_experts": E,
    "num_experts_per_tok": K,
    "moe_topk": K,
    "moe_k": K,
    "top_k_experts": K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": F,
    "shared_intermediate_size": F,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "decoder_sparse_step": 1,
    "mlp_layer_types": ["sparse"] * L,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "sliding_window": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "d_rel": 8,
    "rel_extent": 16,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
MLA = {"num_key_value_heads": 4}  # multi-head latent attention: kv heads = heads
FULL = {"layer_types": ["full_attention"] * L}

ZOO = {
    # ---- users of @use_experts_implementation
    "afmoe": ("afmoe", "AfmoeConfig", "AfmoeForCausalLM", {}),
    "aria_text": ("aria", "AriaTextConfig", "AriaTextForCausalLM", {}),
    "axk1": ("axk1", "AXK1Config", "AXK1ForCausalLM", MLA),
    "axk2": ("axk2", "AXK2Config", "AXK2ForCausalLM", dict(MLA, head_dim=8)),
    "bailing_hybrid": (
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        dict(MLA, layer_group_size=2, q_lora_rank=None),
    ),
    "beam": ("beam", "BeamConfig", "BeamForCausalLM", {}),
    "cohere2_moe": ("cohere2_moe", "Cohere2MoeConfig", "Cohere2MoeForCausalLM", {}),
    "deepseek_ocr2_text": ("deepseek_ocr2", "DeepseekOcr2TextConfig", "DeepseekOcr2TextModel", MLA),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", dict(MLA, head_dim=8)),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", MLA),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", dict(MLA, head_dim=8)),
    "deepseek_v4": (
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "mlp_layer_types": ["hash_moe", "moe"],
        },
    ),
    "diffusion_gemma_text": ("diffusion_gemma", "DiffusionGemmaTextConfig", "DiffusionGemmaEncoderTextModel", {}),
    "dots1": ("dots1", "Dots1Config", "Dots1ForCausalLM", {"num_key_value_heads": 4}),
    "dots3_note_text": (
        "dots3_note",
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        dict(MLA, shared_experts_intermediate_size=F),
    ),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", {"moe_layer_start_index": 0}),
    "ernie4_5_vl_moe_text": (
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextConfig",
        "Ernie4_5_VLMoeTextModel",
        {
            "moe_intermediate_size": [F, F],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        "ernie_vl",
    ),
    "exaone_moe": ("exaone_moe", "ExaoneMoeConfig", "ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("flex_olmo", "FlexOlmoConfig", "FlexOlmoForCausalLM", {}),
    "flint": ("flint", "FlintConfig", "FlintForCausalLM", {"mlp_only_layers": []}),
    "gemma4_text": (
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": V},
    ),
    "glm4_moe": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", MLA),
    "glm4v_moe_text": (
        "glm4v_moe",
        "Glm4vMoeTextConfig",
        "Glm4vMoeTextModel",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        },
    ),
    "glm5_next_text": (
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        dict(MLA, hc_mult=2, hc_sinkhorn_iters=3, qk_rope_head_dim=0, head_dim=0, index_kpool=4),
    ),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", dict(MLA, head_dim=8)),
    "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssForCausalLM", {}),
    "granitemoe": ("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM", {}),
    "granitemoe_swa": ("granitemoe_swa", "GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    "granitemoeshared": ("granitemoeshared", "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {}),
    "hy_v3": ("hy_v3", "HYV3Config", "HYV3ForCausalLM", {}),
    "hy_v4": ("hy_v4", "HYV4Config", "HYV4ForCausalLM", dict(MLA, hc_mult=2)),
    "hy_v4_vl_text": (
        "hy_v4_vl",
        "HYV4VLTextConfig",
        "HYV4VLTextModel",
        dict(MLA, hc_mult=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}),
    ),
    "inkling_text": ("inkling", "InklingTextConfig", "InklingForCausalLM", {}),
    "inkling2_text": ("inkling2", "Inkling2TextConfig", "Inkling2ForCausalLM", {"unpadded_vocab_size": 250}),
    "inkling2_loop_text": (
        "inkling2_loop",
        "Inkling2LoopTextConfig",
        "Inkling2LoopForCausalLM",
        {
            "unpadded_vocab_size": 250,
            "num_hidden_layers": 3,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 8,
        },
    ),
    "jamba": (
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM", dict(MLA, q_lora_rank=None)),
    "kolibri1": ("kolibri1", "Kolibri1Config", "Kolibri1ForCausalLM", {}),
    "laguna": ("laguna", "LagunaConfig", "LagunaForCausalLM", {}),
    "lara_mini": ("lara_mini", "LaraMiniConfig", "LaraMiniForCausalLM", {}),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "mellum": ("mellum", "MellumConfig", "MellumForCausalLM", {}),
    "mimo_v2_flash": ("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", {}),
    "minimax": ("minimax", "MiniMaxConfig", "MiniMaxForCausalLM", {"block_size": 8}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2Config", "MiniMaxM2ForCausalLM", {}),
    "minimax_m3_vl_text": (
        "minimax_m3_vl",
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        {"dense_intermediate_size": F, "rotary_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
    ),
    "mistral4": ("mistral4", "Mistral4Config", "Mistral4ForCausalLM", MLA),
    "mistral_large4_text": (
        "mistral_large4",
        "MistralLarge4TextConfig",
        "MistralLarge4TextModel",
        dict(MLA, head_dim=8),
    ),
    "mixtral": ("mixtral", "MixtralConfig", "MixtralForCausalLM", {"sliding_window": None}),
    "muse_spark_text": ("muse_spark", "MuseSparkTextConfig", "MuseSparkTextModel", {"moe_hidden_size": H}),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": None,
            "use_mamba_kernels": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": F,
        },
    ),
    "olmoe": ("olmoe", "OlmoeConfig", "OlmoeForCausalLM", {}),
    "openai_privacy_filter": ("openai_privacy_filter", "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterModel", {}),
    "phimoe": ("phimoe", "PhimoeConfig", "PhimoeForCausalLM", {}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {}),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_omni_moe_thinker_text": ("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel", {}),
    "qwen3_omni_moe_talker": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeTalkerTextConfig",
        "Qwen3OmniMoeTalkerModel",
        {"shared_expert_intermediate_size": F},
        "embeds",
    ),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel", {}),
    "qwen4_exp_text": (
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "solar_open": ("solar_open", "SolarOpenConfig", "SolarOpenForCausalLM", {}),
    "unlimited_ocr_text": ("unlimited_ocr", "UnlimitedOcrTextConfig", "UnlimitedOcrTextModel", MLA),
    "zaya": ("zaya", "ZayaConfig", "ZayaForCausalLM", {"router_hidden_size": 32, "num_experts_per_tok": 1}),
    # ---- MoE models that do not use the decorator
    "dbrx": (
        "dbrx",
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            "d_model": H,
            "n_heads": 4,
            "n_layers": L,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"hidden_size": H, "ffn_hidden_size": F, "moe_num_experts": E, "moe_top_k": K},
        },
    ),
    "doge": ("doge", "DogeConfig", "DogeForCausalLM", {"is_moe": True, "num_experts": 16, "sliding_window": None}),
    "jetmoe": ("jetmoe", "JetMoeConfig", "JetMoeForCausalLM", {"kv_channels": 16}),
    "llama4_text": (
        "llama4",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": F, "attention_chunk_size": 64},
    ),
    "longcat_flash": (
        "longcat_flash",
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        dict(MLA, num_layers=L, ffn_hidden_size=F, expert_ffn_hidden_size=F, zero_expert_num=4, head_dim=8),
    ),
    "nllb-moe": (
        "nllb_moe",
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        {
            "d_model": H,
            "encoder_layers": L,
            "decoder_layers": L,
            "encoder_ffn_dim": F,
            "decoder_ffn_dim": F,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "expert_capacity": 8,
            "pad_token_id": 1,
            "bos_token_id": 0,
        },
        "encdec",
    ),
    "step3p5_text": ("step3p7", "Step3p7TextConfig", "Step3p7TextModel", {"share_expert_dim": F}),
    "switch_transformers": (
        "switch_transformers",
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {
            "d_model": H,
            "d_kv": 16,
            "d_ff": F,
            "num_layers": L,
            "num_decoder_layers": L,
            "num_heads": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 8,
        },
        "encdec",
    ),
    "vitpose_backbone": (
        "vitpose_backbone",
        "VitPoseBackboneConfig",
        "VitPoseBackbone",
        {"image_size": (32, 32), "part_features": 16, "mlp_ratio": 2},
        "vitpose",
    ),
}


def _fields(cls):
    names = set()
    for k in cls.__mro__:
        if k.__module__.startswith("transformers.models"):
            names |= set(getattr(k, "__annotations__", {}))
    return names


def make_config(model_type):
    mod, cfg_name, _, over = ZOO[model_type][:4]
    m = importlib.import_module(f"transformers.models.{mod}.configuration_{mod}")
    cls = getattr(m, cfg_name)
    fields = _fields(cls)
    kw = {k: v for k, v in GENERIC.items() if k in fields}
    kw.update(over)
    kw = {k: v for k, v in kw.items() if not (k == "num_hidden_layers" and v is None)}
    return cls(**kw)


def _inputs(kind, seed=0, batch=2, seq=8):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V - 10, (batch, seq), generator=g)
    if kind == "encdec":
        return {
            "input_ids": ids,
            "decoder_input_ids": torch.randint(3, V - 10, (batch, seq), generator=g),
            "use_cache": False,
        }
    if kind == "vitpose":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g), "dataset_index": torch.tensor([0, 1])}
    if kind == "embeds":
        return {"inputs_embeds": torch.randn(batch, seq, H, generator=g), "use_cache": False}
    if kind == "ernie_vl":
        t = torch.zeros(batch, seq, dtype=torch.int32)
        t[:, 2:5] = 1  # some 'vision' tokens, so both sets of experts run
        pos = torch.arange(seq)[None, None].expand(3, batch, seq).clone()
        return {"input_ids": ids, "moe_mm_token_type_ids": t, "position_ids": pos, "use_cache": False}
    return {"input_ids": ids, "use_cache": False}


@torch.no_grad()
def _reinit(model, seed=0):
    """Random values for every >=2-d floating parameter, so that experts matter and biases are not zero."""
    g = torch.Generator().manual_seed(seed)
    for n, p in model.named_parameters():
        if p.is_floating_point() and p.dim() >= 2:
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
        elif not torch.isfinite(p).all():
            raise ValueError(f"non-finite parameter after init: {n}")


@torch.no_grad()
def cast(model, dtype):
    """The dtypes that from_pretrained(dtype=...) gives: parameters and saved buffers take it, except those that the
    model's _keep_in_fp32_modules(_strict) name; unsaved buffers (inv_freq) stay as the constructor made them."""
    if dtype is torch.float32:
        return model
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    alt = build_glob_alternation(list(plan))[0] if plan else None
    saved = set(model.state_dict())
    for n, p in list(model.named_parameters()) + list(model.named_buffers()):
        if n in saved and p.is_floating_point():
            p.data = p.data.to(torch.float32 if alt is not None and alt.search(n) else dtype)
    return model


def build(model_type, dtype=torch.float32, experts_implementation=None, seq=8):
    mod, _, cls_name = ZOO[model_type][:3]
    kind = ZOO[model_type][4] if len(ZOO[model_type]) > 4 else "lm"
    cfg = make_config(model_type)
    m = importlib.import_module(f"transformers.models.{mod}.modeling_{mod}")
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # as from_pretrained does: unsaved buffers made without a dtype take it
    try:
        model = getattr(m, cls_name)(cfg)
    finally:
        torch.set_default_dtype(torch.float32)
    _reinit(model)
    for n, b in model.named_buffers():
        if n.endswith("tid2eid"):  # deepseek_v4's frozen token -> experts table: distinct random experts
            g = torch.Generator().manual_seed(1)
            b.copy_(torch.stack([torch.randperm(E, generator=g)[: b.shape[1]] for _ in range(b.shape[0])]))
    model = cast(model, dtype).eval()
    if experts_implementation is not None:
        model.set_experts_implementation(experts_implementation)
    ex = _inputs(kind, seq=seq)
    if kind != "vitpose":
        sig = inspect.signature(model.forward).parameters
        has_kw = any(p.kind is p.VAR_KEYWORD for p in sig.values())
        ex = {k: v for k, v in ex.items() if k in sig or has_kw}
    ex = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in ex.items()}
    return model, ex


def available(*model_types):
    """Those of the model types that the installed transformers has; all of them under the pinned version."""
    return [name for name in model_types if importlib.util.find_spec(f"transformers.models.{ZOO[name][0]}")]


def experts_modules(model):
    """Modules that the decorator dressed, in order."""
    return [(n, m) for n, m in model.named_modules() if hasattr(m, "is_concatenated")]


def first_output(output):
    """The logits of a model's output, else its first tensor."""
    value = output.logits if hasattr(output, "logits") else output[0]
    return value[0] if isinstance(value, tuple | list) else value


def standalone(model_type, dtype=torch.float32, tokens=7, device="cpu"):
    """The first experts module of a model, set to eager, and hidden states, expert ids and routing weights for it."""
    model, _ = build(model_type, dtype, "eager")
    _, module = experts_modules(model)[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator).to(device, dtype)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator).to(device, dtype)
    return module.to(device), (hidden, ids.to(device), weights)


@dataclass(frozen=True)
class Outcome:
    """What became of one model under one experts backend.

    Attributes:
        graphs: graphs of one forward.
        break_line: `file.py:line: code` of what keeps the model from being one graph, "" if nothing does.
        dressed: experts modules that the decorator dressed.
        rewritten: experts blocks that were rewritten.
        error: relative error of the compiled model, against eager in fp32, against an fp32 run of the model else.
        budget: what the error may be.
    """

    graphs: int
    break_line: str
    dressed: int
    rewritten: int
    error: float
    budget: float


def check_model(model_type, dtype, implementation, experts) -> Outcome:
    """Compiles a model with fullgraph=True, or as parts where that breaks, and compares it with what it computes alone.

    In fp32 the compiled model must agree with eager up to rounding. In bf16 an fp32 run of the same weights is the
    oracle: the compiled model may be at most half again as far from it as the model itself is in bf16.
    """
    model, arguments = build(model_type, dtype, implementation)
    dressed = len(experts_modules(model))
    with torch.no_grad():
        own = first_output(model(**arguments)).float()
        if dtype is torch.float32:
            oracle, budget = own, 1e-5
        else:
            wide = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}
            oracle = first_output(copy.deepcopy(model).float()(**wide)).float()
            budget = 1.5 * relative_error(own, oracle) + torch.finfo(dtype).eps
        break_line = ""
        for fullgraph in (True, False):
            torch._dynamo.reset()
            backend = moe_compile.backend(experts, compiler="aot_eager")
            backend.tells_modules_apart = True  # otherwise layers that share code are seen once
            try:
                output = torch.compile(model, backend=backend, fullgraph=fullgraph)(**arguments)
                break
            except torch._dynamo.exc.TorchDynamoException as error:
                if not fullgraph or isinstance(error, moe_compile.MoeCompileError):
                    raise
                break_line = innermost_line(str(error))
    chosen = [block.chosen for block in backend.blocks.values()]
    rewritten = sum(name not in (None, "eager") for name in chosen)
    error = relative_error(first_output(output).float(), oracle)
    return Outcome(len(backend.graphs), break_line, dressed, rewritten, error, budget)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the reference's."""
    return ((value - reference).norm() / reference.norm()).item()


def innermost_line(message: str) -> str:
    """The user's line that Dynamo's message ends its stack with."""
    places = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s+(.+)', message)
    return f"{places[-1][0].rpartition('/')[2]}:{places[-1][1]}: {places[-1][2]}" if places else message.splitlines()[0]
