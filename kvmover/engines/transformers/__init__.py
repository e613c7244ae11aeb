"""The transformers adapter: a model of Hugging Face transformers whose KV cache lies in pages that kvmover moves.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    with TransformersEngine(model, {"port": 14700}) as engine:
        engine.serve(prompt, "42")                                  # a prefill, for any engine that asks for "42"
        engine.generate(prompt, remote=Remote("", "42", host, port), max_new_tokens=16)  # a decode of another's prefill

`engine.cache(prompt)` lends a `Cache` of transformers for calls of your own. transformers is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.faces import public

if TYPE_CHECKING:
    from kvmover.engines.transformers.transformers_engine import TransformersEngine

_HOMES = {"TransformersEngine": "transformers_engine"}

__all__ = ["TransformersEngine"]


def __getattr__(name: str) -> object:
    return public(__name__, _HOMES, name)
