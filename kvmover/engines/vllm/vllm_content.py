"""The parts of a vLLM request that its KV depends on, by content: vLLM's own ids are names of paths and requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvmover.cache.prefix import chain
from kvmover.engines.common import PromptHasher, PromptInput, PromptParts, adapter_parts, content_of, digest_of_tensors
from kvmover.transfer.protocol.content import Content

#: Prefixes of a decoding request, the latest ones, which are offered again after a preemption.
MOST_GROWN = 64


def parts_of(request: Any) -> PromptParts:
    """Returns a request's parts beside its token ids; `unknown` is set if a part's bytes are not in this process."""
    parts = PromptParts(salt=request.cache_salt or "")
    if request.lora_request is not None:
        parts = adapter_parts(request.lora_request.lora_path, parts)
    inputs = [_input(feature) for feature in request.mm_features]
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds
        inputs.append(PromptInput(0, len(embeds), digest_of_tensors([("prompt_embeds", embeds)])))
    known = tuple(each for each in inputs if isinstance(each, PromptInput))
    parts = replace(parts, inputs=known)
    return parts if len(known) == len(inputs) else replace(parts, unknown=next(e for e in inputs if isinstance(e, str)))


def _leaves(name: str, data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a processed input, which nests them in lists and maps."""
    if isinstance(data, Mapping):
        data = data.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    elif isinstance(data, list | tuple):
        data = enumerate(data)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    else:
        yield name, data
        return
    for key, each in data:  # pyright: ignore[reportUnknownVariableType]
        yield from _leaves(f"{name}/{key}", each)


def _input(feature: Any) -> PromptInput | str:
    """Returns an image or the like; a sentence if its tensors are in another process."""
    import torch

    elements: Mapping[str, Any] = feature.data or {}
    named = [leaf for name, element in elements.items() for leaf in _leaves(name, element.data)]
    at = feature.mm_position
    if not named or not all(isinstance(data, torch.Tensor) for _, data in named):
        return f"the tensors of the {feature.modality} at token {at.offset} are not in the scheduler's process"
    return PromptInput(at.offset, at.length, digest_of_tensors(named))


class RequestContent:
    """The content of a request at arrival, and of its prefixes as it is decoded here."""

    def __init__(self, request: Any) -> None:
        self._request, self._parts = request, parts_of(request)
        self._hasher = PromptHasher(self._parts)
        self.whole = self._hasher.content(request.all_token_ids, request.num_prompt_tokens)
        self._grown = self.whole.tokens
        self._latest: deque[Content] = deque(maxlen=MOST_GROWN)

    def of_first(self, tokens: int) -> Content:
        """Returns the content of the request's first `tokens` tokens, by hashing all of them."""
        return content_of(self._request.all_token_ids[:tokens], self._parts.before(tokens))

    def grown_to(self, tokens: int) -> tuple[Content, ...]:
        """Returns the contents of prefixes longer than the prompt and the last call's, the latest 64."""
        token_ids = self._request.all_token_ids
        new = [self._hasher.content(token_ids, each) for each in range(self._grown + 1, tokens + 1)]
        self._grown = max(self._grown, tokens)
        self._latest.extend(new)
        return tuple(new[-MOST_GROWN:])

    @property
    def latest(self) -> tuple[Content, ...]:
        """Returns the contents of the last `grown_to`, for a request that is offered again after a preemption."""
        return tuple(self._latest)


def is_tokens_alone(request: Any) -> bool:
    """Returns True if a request's KV depends on its token ids only: no images, adapters, embeddings or salt."""
    beside = (getattr(request, name, None) for name in ("mm_features", "lora_request", "cache_salt"))
    return not any(beside) and getattr(request, "prompt_embeds", None) is None


class Hashed(Protocol):
    """A vLLM request, and the hashes of its pages so far."""

    request: Any
    hashes: list[bytes]


def token_hashes(known: Hashed, block_tokens: int) -> Sequence[bytes]:
    """Returns the page hashes that engines of any make compute from the same tokens, SGLang among them; () for a
    request whose KV depends on more than tokens.
    """
    if not is_tokens_alone(known.request):
        return ()
    done, tokens = len(known.hashes), known.request.all_token_ids
    if (whole := len(tokens) // block_tokens) > done:
        more = tokens[done * block_tokens : whole * block_tokens]
        known.hashes += chain(known.hashes[-1] if done else b"", more, block_tokens)
    return known.hashes
