"""Tiny models of random weights, in folders as they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_ALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def make(folder: Path, family: str = "llama", seed: int = 7, **own: Any) -> Path:
    """Write a model whose greedy tokens differ from prompt to prompt."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_ALL, **own}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """Returns the model in a folder."""
    return AutoModelForCausalLM.from_pretrained(folder)
