"""Small random models of the families that the patched attention promises to serve, and inputs for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    T5Config,
)

VOCABULARY = 120
WINDOW = 8
CHUNK = 16
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    **_IDS,
}
_SIZED = {**_SIZES, "head_dim": 16}
_LAYERS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    name: str
    config: Callable[[], PreTrainedConfig]
    auto: type = AutoModelForCausalLM

    def build(self, attn_implementation: str = "eager") -> PreTrainedModel:
        """The same weights every time, large enough that a wrong mask shows."""
        torch.manual_seed(1)
        model = self.auto.from_config(self.config(), attn_implementation=attn_implementation).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.15)
                elif "sinks" in name:
                    parameter.normal_()
        return model


def _deepseek_v3() -> PreTrainedConfig:
    return DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 4}, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip


def _qwen2_moe() -> PreTrainedConfig:
    """Its window is part of its mask alone, as PhiMoE's is."""
    return Qwen2MoeConfig(
        **_SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        use_sliding_window=True, sliding_window=WINDOW, layer_types=_LAYERS,
    )  # fmt: skip


CAUSAL = [
    Family("llama", lambda: LlamaConfig(**_SIZED)),
    Family("mistral", lambda: MistralConfig(**_SIZED, sliding_window=WINDOW)),
    Family("qwen3", lambda: Qwen3Config(**_SIZED)),
    Family(
        "gemma2",
        lambda: Gemma2Config(**_SIZED, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    ),
    Family(
        "gemma3",
        lambda: Gemma3TextConfig(**_SIZED, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_LAYERS),
    ),
    Family(
        "gpt_oss", lambda: GptOssConfig(**_SIZED, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    ),
    Family("phi3", lambda: Phi3Config(**_SIZES)),
    Family("olmo2", lambda: Olmo2Config(**_SIZES)),
    Family("gpt2", lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512, **_IDS)),
    Family(
        "llama4",
        lambda: Llama4TextConfig(
            **_SIZED,
            intermediate_size_mlp=96,
            num_local_experts=2,
            attention_chunk_size=CHUNK,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            floor_scale=7,  # so that the temperature of the layer without positions changes early, and much
            attn_scale=1.0,
        ),
    ),
    Family("deepseek_v3", _deepseek_v3),
    Family("qwen2_moe", _qwen2_moe),
    Family("phimoe", lambda: PhimoeConfig(**_SIZES, sliding_window=WINDOW, num_local_experts=4)),
]
ENCODERS = [
    Family(
        "bert",
        lambda: BertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
        ),
        AutoModel,
    ),
    Family(
        "modernbert",
        lambda: ModernBertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            local_attention=16,
            layer_types=_LAYERS,
            cls_token_id=1,
            sep_token_id=2,
            **_IDS,
        ),
        AutoModel,
    ),
]
SEQ2SEQ = [
    Family(
        "bart",
        lambda: BartConfig(
            vocab_size=VOCABULARY,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=512,
        ),
        AutoModelForSeq2SeqLM,
    ),
    Family(
        "t5",
        lambda: T5Config(
            vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        AutoModelForSeq2SeqLM,
    ),
]
BY_NAME = {family.name: family for family in [*CAUSAL, *ENCODERS, *SEQ2SEQ]}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Token ids without special ones."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padding(batch: int, length: int, side: str) -> Tensor:
    """A 2-D mask with a row without padding and rows with different amounts of it on the left or right."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 4 * row + 1] = 0
    return mask if side == "left" else mask.flip(1)
