"""Makes a tiny model of random weights and a tokenizer of bytes, in an engine's environment: `models.py NAME DIR`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

#: Tokens: 256 bytes, three special ones, and names for the rest.
VOCABULARY = 512

#: Four layers of 8 heads of 32 over 4 KV heads, unless a model says otherwise.
_ALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}

_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "first_k_dense_replace": 99,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
}

#: As DeepSeek's own models have it; SGLang's CPU engine turns latents in no other way.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}

_WINDOWS = {
    "head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}

#: Tokens of images: a prompt has the last one of them where an image is, as often as its pixels fill squares of 28.
_VISION_IDS = {name: 259 + at for at, name in enumerate(("vision_start", "vision_end", "video_pad", "image_pad"))}

#: Names of them in a text.
_VISION = {f"<|{name}|>": number for name, number in _VISION_IDS.items()}

_IMAGES = {
    "text_config": {**_ALL, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "rope_theta": 10000.0},
    "vision_config": {
        "depth": 2,
        "in_channels": 3,
        "in_chans": 3,
        "embed_dim": 64,
        "hidden_size": _ALL["hidden_size"],
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    **{f"{name.replace('_pad', '')}_token_id": number for name, number in _VISION_IDS.items()},
    "tie_word_embeddings": False,
}

#: As an engine reads it. Its own class, which would write it, imports torchvision.
_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 4 * 28 * 28,
    "max_pixels": 64 * 28 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

#: A message is a text, and where there are images a list of texts and images.
_CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
_CHAT_OF_IMAGES = (
    "{% for message in messages %}{% for part in message.content %}{{ part.text if part.type == 'text' else"
    " '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endfor %}"
)

#: Two short convolutions for each layer of attention. A block's parts are as wide as they are said to be.
_CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"],
    "num_hidden_layers": 6,
    "conv_L_cache": 3,
    **dict.fromkeys(("conv_dim", "block_dim", "block_multiple_of"), 256),
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}

#: 16 heads of 32 channels, whose states are of 16 numbers a channel: two of three layers are Mamba-2's.
_SCANS = {
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "mamba", "attention"] * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 512,
    "position_embedding_type": "rope",
    "attention_multiplier": 32**-0.5,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}

#: Three gated delta networks for each layer of attention: 4 heads of keys, 8 of values.
_DELTAS = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}

#: By name: the family as transformers calls it, what is its own, and the dtype of its weights.
MODELS: Mapping[str, tuple[str, Mapping[str, Any], torch.dtype]] = {
    "qwen3": ("qwen3", {"head_dim": 32}, torch.float32),
    # A draft that guesses what "qwen3" says: the same model, of which every KV head is there twice.
    "qwen3-doubled": ("qwen3", {"head_dim": 32, "num_key_value_heads": 8}, torch.float32),
    # Large enough that a prompt of a thousand tokens takes this machine longer than a request takes beside it.
    "qwen3-large": (
        "qwen3",
        {"head_dim": 32, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6},
        torch.float32,
    ),
    # Keys and values of its one layer are of tokens alone, whatever the cache of an attention before them rounds.
    "qwen3-shallow": ("qwen3", {"head_dim": 32, "num_hidden_layers": 1}, torch.float32),
    "qwen3-other": ("qwen3", {"head_dim": 32, "num_hidden_layers": 6}, torch.float32),
    "qwen3-bf16": ("qwen3", {"head_dim": 32}, torch.bfloat16),
    "llama": ("llama", {"head_dim": 32}, torch.float32),
    "llama-doubled": ("llama", {"head_dim": 32, "num_key_value_heads": 8}, torch.float32),
    "llama-other": ("llama", {"head_dim": 32, "num_hidden_layers": 6}, torch.float32),
    "llama-bf16": ("llama", {"head_dim": 32}, torch.bfloat16),
    "images": ("qwen2_vl", _IMAGES, torch.float32),
    "latent": ("deepseek_v2", _LATENT, torch.float32),
    "latent-yarn": ("deepseek_v2", {**_LATENT, "rope_parameters": _YARN}, torch.float32),
    "windows": ("gemma3_text", _WINDOWS, torch.float32),
    "convolutions": ("lfm2", _CONVOLUTIONS, torch.float32),
    "scans": ("granitemoehybrid", {**_SCANS, "mamba_n_groups": 1}, torch.float32),
    "scans-of-two-groups": ("granitemoehybrid", {**_SCANS, "mamba_n_groups": 2}, torch.float32),
    "deltas": ("qwen3_next", _DELTAS, torch.float32),
    # Each of two pipeline stages has a layer of both kinds.
    "windows-by-turns": (
        "gemma3_text",
        {**_WINDOWS, "layer_types": ["sliding_attention", "full_attention"] * 2},
        torch.float32,
    ),
}


def make(name: str, folder: Path) -> None:
    """Write a model folder as the engines load it. The same name gives the same weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if MODELS[name][1] is _IMAGES:
        _tokenizer(_VISION, _CHAT_OF_IMAGES).save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_PIXELS))
    else:
        _tokenizer({}, _CHAT).save_pretrained(folder)
    model = _model(name)
    if name.endswith("-doubled"):
        model.load_state_dict(_doubled(_model(name.removesuffix("-doubled")).state_dict()))
    model.save_pretrained(folder, safe_serialization=True)


def make_adapter(name: str, folder: Path) -> None:
    """Write a LoRA adapter of "qwen3", as strong as the model's own weights. `name` ends with the seed of its own."""
    rank, generator = 8, torch.Generator().manual_seed(int(name.rpartition("-")[2]))
    weights = dict[str, torch.Tensor]()
    for layer in range(4):
        for module, columns, rows in (("q_proj", 256, 256), ("k_proj", 256, 128), ("v_proj", 256, 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.1
            weights[f"{at}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**said, "base_model_name_or_path": "qwen3"}))


def _model(name: str) -> Any:
    family, own, dtype = MODELS[name]
    of_text = own is not _IMAGES
    config = AutoConfig.for_model(family, **{**(_ALL if of_text else {}), **own, "dtype": dtype})
    torch.manual_seed(7)
    model = (AutoModelForCausalLM if of_text else AutoModelForImageTextToText).from_config(config, dtype=dtype)
    # Gemma multiplies its embeddings by 16 and has them as its head, too: with wide ones the last token is the next.
    embedding = 1 / 64 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # so wide that greedy tokens differ from prompt to prompt
                parameter.normal_(0, embedding if "embed" in parameter_name else 0.09)
    return model


def _doubled(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with every KV head, of 32 rows, twice in a row: a model that computes the same."""
    split = ("k_proj.weight", "v_proj.weight")
    return {
        name: weight.unflatten(0, (-1, 32)).repeat_interleave(2, 0).flatten(0, 1) if name.endswith(split) else weight
        for name, weight in weights.items()
    }


def _tokenizer(special: Mapping[str, int], chat: str) -> PreTrainedTokenizerFast:
    names = {number: name for name, number in special.items()}
    words = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words |= {"<s>": 256, "</s>": 257, "<pad>": 258}
    words |= {names.get(number, f"<x{number}>"): number for number in range(259, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=[*special],
        chat_template=chat,
    )


if __name__ == "__main__":
    (make_adapter if sys.argv[1].startswith("adapter-") else make)(sys.argv[1], Path(sys.argv[2]))
