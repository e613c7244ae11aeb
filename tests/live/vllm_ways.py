"""Ways in which vLLM serves a prompt whose times are taken: by one server, or by two halves."""

from __future__ import annotations

from tests.live.beside import Way
from tests.live.server import Server
from tests.live.vllm_client import ask_streamed, split_streamed, tokens_of


def one_server(server: Server, tokens: int) -> Way:
    """Returns the way of a plain server, which answers with so many tokens."""
    return Way([server], lambda prompt: ask_streamed(server, prompt, tokens), tokens_of)


def two_halves(prefill: Server, decode: Server, tokens: int) -> Way:
    """Returns the way of a prefill and a decode server; the decode's answer has so many tokens."""
    return Way([prefill, decode], lambda prompt: split_streamed(prefill, decode, prompt, tokens), tokens_of)
