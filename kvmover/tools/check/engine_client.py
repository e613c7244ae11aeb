"""An EngineClient asks one server over HTTP: for what it says of itself, and for tokens.

It speaks OpenAI's completions to vLLM and to routers, and SGLang's own `/generate` to SGLang.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from kvmover.engines.common import EngineMake
from kvmover.errors import KvmoverError
from kvmover.foreign_text import printable
from kvmover.tools.check.pair_seen import KVMOVER, EngineAnswer, ServerSeen

#: Longest wait for a server's words about itself, s.
_LOOK_S = 5.0

#: Most bytes of an answer, and most characters of an error.
_MOST_BYTES, _MOST_ERROR = 64 << 20, 400

#: The exception that SGLang makes of kvmover's sentence.
_WRAPPED = re.compile(r"^.*KVTransferError\(bootstrap_room=-?\d+\): ", re.DOTALL)


class CallFailed(KvmoverError):
    """A call without a good answer. `status`: HTTP's, 0 where none came."""

    def __init__(self, words: str, status: int = 0) -> None:
        super().__init__(words)
        self.status = status


class HttpCall:
    """One request on a connection of its own, which another thread may end by `hang_up`."""

    def __init__(self, url: str, patience_s: float) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self.url, self._path = url, parts.path.rstrip("/")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        try:
            self._connection = kind(parts.hostname or "", parts.port, timeout=patience_s)
        except (ValueError, HTTPException) as error:
            raise CallFailed(f"{url} is no address of a server: {error}") from None

    def text(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Returns the answer to GET, or to POST of a body. Raises CallFailed, with the server's error in one line."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            sent = None if body is None else json.dumps(body)
            self._connection.request("GET" if body is None else "POST", self._path + path, sent, headers)
            answer = self._connection.getresponse()
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
        except TimeoutError:
            raise CallFailed(f"no answer from {self.url}{path} within {self._connection.timeout:g} s") from None
        except (OSError, HTTPException) as error:
            why = (isinstance(error, OSError) and error.strerror) or error or type(error).__name__
            raise CallFailed(f"{self.url}{path}: {why}") from error
        finally:
            self._connection.close()
        if answer.status != 200:
            raise CallFailed(f"HTTP {answer.status} {error_in(text)}".rstrip(), answer.status)
        return text

    def hang_up(self) -> None:
        """End the call: its thread gets CallFailed, and the server sees that its client has left."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)


def error_in(text: str) -> str:
    """Returns the sentence of an error's body, in one line.

    >>> error_in('{"error": {"message": "KVTransferError(bootstrap_room=7): peer holds weights a"}}')
    'peer holds weights a'
    """
    with suppress(ValueError):
        said: object = json.loads(text)
        while isinstance(said, dict):
            fields = cast("dict[str, object]", said)
            said = next((fields[name] for name in ("error", "message", "detail") if name in fields), str(fields))
        text = str(said)
    return printable(" ".join(_WRAPPED.sub("", text).split()), _MOST_ERROR)


@dataclass(frozen=True, slots=True)
class EngineClient:
    """A server, and how long an answer of tokens may take, s."""

    seen: ServerSeen
    patience_s: float

    @classmethod
    def look(cls, url: str, prompt: str, patience_s: float) -> EngineClient:
        """Ask a server what it is. One that does not answer is seen with its error."""
        try:
            return cls(_looked(ServerSeen(url), prompt), patience_s)
        except CallFailed as error:
            return cls(ServerSeen(url, str(error)), patience_s)

    def call(self) -> HttpCall:
        """Returns a call that is not yet made."""
        return HttpCall(self.seen.url, self.patience_s)

    def ask(
        self, prompt: str, tokens: int, said: Mapping[str, Any] | None = None, call: HttpCall | None = None
    ) -> EngineAnswer:
        """Returns the greedy tokens of a prompt. `said`: `kv_transfer_params` of vLLM, a bootstrap room of SGLang."""
        generate = _generated if self.seen.make is EngineMake.SGLANG else _completed
        try:
            return generate(call or self.call(), self.seen.model, prompt, tokens, said)
        except CallFailed as error:
            return EngineAnswer(str(error))
        except msgspec.MsgspecError as error:
            return EngineAnswer(f"{self.seen.url} answers in another form: {error}")


class _Listed(msgspec.Struct):
    id: str = ""


class _Models(msgspec.Struct):
    data: list[_Listed] = []


class _Version(msgspec.Struct):
    version: str


class _Info(msgspec.Struct):
    """SGLang's `/server_info`, of which a server of another make lacks the first field."""

    disaggregation_mode: str | None
    disaggregation_transfer_backend: str | None = None
    disaggregation_bootstrap_port: int | None = None


class _Ids(msgspec.Struct):
    tokens: list[int] = []


class _Best(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Best | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    kv_transfer_params: dict[str, Any] | None = None


class _Ended(msgspec.Struct):
    type: str = ""
    message: str | None = None


class _About(msgspec.Struct):
    finish_reason: _Ended | None = None
    output_top_logprobs: list[list[tuple[float, Any, Any]]] | None = None


class _Generated(msgspec.Struct):
    meta_info: _About
    output_ids: list[int] = []


# Made here, in one thread: two that make a decoder of one struct at a time see it half made, and msgspec crashes.
_MODELS, _VERSION = msgspec.json.Decoder(_Models), msgspec.json.Decoder(_Version)
_INFO, _IDS = msgspec.json.Decoder(_Info), msgspec.json.Decoder(_Ids)
_COMPLETION, _GENERATION = msgspec.json.Decoder(_Completion), msgspec.json.Decoder(_Generated)

Answer = TypeVar("Answer")


def _read(
    url: str, path: str, decoder: msgspec.json.Decoder[Answer], body: Mapping[str, Any] | None = None
) -> Answer | None:
    """Returns the JSON of a path; None if the server has nothing such there. Raises CallFailed without an answer."""
    try:
        return decoder.decode(HttpCall(url, _LOOK_S).text(path, body))
    except msgspec.MsgspecError:
        return None
    except CallFailed as error:
        if error.status:
            return None
        raise


def _looked(seen: ServerSeen, prompt: str) -> ServerSeen:
    models = _read(seen.url, "/v1/models", _MODELS) or _Models()
    seen = replace(seen, model=models.data[0].id if models.data else "")
    info = _read(seen.url, "/server_info", _INFO) or _read(seen.url, "/get_server_info", _INFO)
    if info is not None:
        mode = info.disaggregation_mode
        seen = replace(
            seen,
            make=EngineMake.SGLANG,
            mode="" if mode in (None, "null") else mode,
            mover=info.disaggregation_transfer_backend or "",
            bootstrap_port=info.disaggregation_bootstrap_port or 0,
        )
    elif _read(seen.url, "/version", _VERSION) is not None:
        seen = replace(seen, make=EngineMake.VLLM, mover=_connector(seen.url))
    else:
        return seen
    ids = _read(seen.url, "/tokenize", _IDS, {"model": seen.model, "prompt": prompt}) or _Ids()
    return replace(seen, prompt=tuple(ids.tokens))


def _connector(url: str) -> str | None:
    """Returns kvmover if vLLM's metrics count its requests, "" if they do not, None without metrics."""
    try:
        text = HttpCall(url, _LOOK_S).text("/metrics")
    except CallFailed:
        return None
    if "vllm:" not in text:
        return None
    return KVMOVER if "vllm:kvmover_received_bytes" in text else ""


def _completed(call: HttpCall, model: str, prompt: str, tokens: int, params: Mapping[str, Any] | None) -> EngineAnswer:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    said = _COMPLETION.decode(call.text("/v1/completions", {**body, **(params or {})}))
    choice = said.choices[0]
    best = (choice.logprobs and choice.logprobs.top_logprobs) or ()
    leads = tuple(_lead([*each.values()]) if each else None for each in best)
    return EngineAnswer("", tuple(choice.token_ids or ()), leads, said.kv_transfer_params)


def _generated(call: HttpCall, model: str, prompt: str, tokens: int, room: Mapping[str, Any] | None) -> EngineAnswer:
    body: dict[str, Any] = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    if room is None:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    said = _GENERATION.decode(call.text("/generate", {**body, **(room or {})}))
    ended = said.meta_info.finish_reason
    if ended and ended.type == "abort":
        return EngineAnswer(error_in(ended.message or "aborted"))
    leads = tuple(_lead([entry[0] for entry in best]) for best in said.meta_info.output_top_logprobs or ())
    return EngineAnswer("", tuple(said.output_ids), leads)


def _lead(logprobs: Sequence[float]) -> float | None:
    """Returns the distance of the two largest; None for fewer than two."""
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else None
