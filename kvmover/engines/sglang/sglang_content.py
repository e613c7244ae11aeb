"""RequestReader reads the content of SGLang's requests, the same on prefill and decode although their ids differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvmover.engines.common import (
    TOKENS_ALONE,
    PromptHasher,
    PromptInput,
    PromptParts,
    adapter_parts,
    digest_of_tensors,
)
from kvmover.transfer import Content

if TYPE_CHECKING:
    import torch

#: Suffix of an extra key with elastic experts: their number, which may differ between prefill and decode.
_EXPERTS = re.compile(r"(\|?elastic_ep_size=\d+)+$")


class LoadedAdapters:
    """The LoRA adapters of this process by SGLang's ids. Each is read when SGLang loads it: its files may change later.

    `folder_of` finds the files of a path as an operator writes it, or raises OSError or ValueError.
    """

    def __init__(self, folder_of: Callable[[str], str] = str) -> None:
        self._folder_of = folder_of
        self._parts: dict[str, PromptParts] = {}

    def load(self, lora_id: str, path: str) -> None:
        """Read an adapter's files; an unreadable adapter is unknown from then on."""
        try:
            self._parts[lora_id] = adapter_parts(self._folder_of(path), TOKENS_ALONE)
        except (OSError, ValueError) as error:
            self._parts[lora_id] = PromptParts(unknown=f"adapter in {path}: {error}")

    def parts(self, lora_id: str | None) -> PromptParts:
        """Returns the adapter of a request as prompt parts. `lora_id` None: the request has no adapter."""
        if lora_id is None:
            return TOKENS_ALONE
        return self._parts.get(lora_id) or PromptParts(unknown=f"adapter {lora_id} was not loaded from files")


@dataclass(frozen=True, slots=True)
class RequestReader:
    """A reader of the content of SGLang's requests.

    `adapters`: loaded in this process. `unhashed`: reason why SGLang's hash of an image does not identify it; empty if
    it does.
    """

    adapters: LoadedAdapters
    unhashed: str = ""

    def content(self, req: Any) -> Content:
        """Returns the content of the prompt that a prefill computes for SGLang's `Req`.

        After a retraction for other weights it includes the generated tokens but the last.
        """
        after = req.output_ids if getattr(req, "pd_rebootstrap_in_progress", False) else ()
        # SGLang overwrites the ids of images with its hashes: the same on both halves, but no token ids.
        has_media = req.multimodal_inputs is not None
        ids: Sequence[int] = req.origin_input_ids_unpadded if has_media else req.origin_input_ids
        return PromptHasher(self._parts(req)).content(
            [*ids, *after] if len(after) else ids, len(req.origin_input_ids) + len(after)
        )

    def _parts(self, req: Any) -> PromptParts:
        adapter = self.adapters.parts(req.lora_id)
        salt, unknown = req.cache_salt or "", adapter.unknown
        if any(0xD800 <= ord(each) < 0xE000 for each in salt):
            salt, unknown = "", unknown or "the salt is no Unicode text"
        if self.unhashed and req.multimodal_inputs is not None:
            unknown = unknown or self.unhashed
        try:
            inputs = tuple(_inputs_of(req))
        except _NoContentId as error:
            inputs, unknown = (), unknown or str(error)
        return PromptParts(adapter.adapter, salt, inputs, unknown)


class _NoContentId(Exception):
    """The error for an input without an id by its content."""


def _inputs_of(req: Any) -> Iterator[PromptInput]:
    """Yield all inputs beside tokens, adapter and salt, in SGLang's order. Raises _NoContentId."""
    if extra := _EXPERTS.sub("", _without(req.extra_key or "", req.lora_id)):
        yield PromptInput(0, 0, _digest("extra key", extra))
    for item in req.multimodal_inputs.mm_items if req.multimodal_inputs is not None else ():
        digest = _digest_of_item(item)
        for first, last in item.offsets or ((0, -1),):
            yield PromptInput(int(first), int(last) - int(first) + 1, digest)
    if req.input_embeds is not None:
        rows = np.asarray(req.input_embeds, np.float32)
        yield PromptInput(0, len(rows), _digest("embeddings", rows.shape, rows.tobytes()))
    if req.positional_embed_overrides is not None:
        at = [int(each) for each in req.positional_embed_overrides.positions]
        rows = digest_of_tensors([("", _tensor(req.positional_embed_overrides.embeds))])
        yield PromptInput(min(at, default=0), len(at), _digest("placed embeddings", at, rows))
    for name in ("token_type_ids", "multi_item_delimiter_indices"):
        if (numbers := getattr(req, name)) is not None:
            yield PromptInput(0, 0, _digest(name, [int(each) for each in numbers]))


def _without(extra_key: str, lora_id: str | None) -> str:
    """Returns the client's part of an extra key: SGLang appends an adapter's id, and the number of experts to that."""
    head, found, tail = extra_key.rpartition(lora_id) if lora_id else (extra_key, "", "")
    return head + tail if found else extra_key


def _digest_of_item(item: Any) -> bytes:
    """Returns the digest of an image or other input. Raises _NoContentId without a hash of SGLang's.

    It covers SGLang's hash of the features, which keys KV too, and the tensors beside them on the host, like an image's
    grid.
    """
    hashed = item.identity or (None if item.hash is None else int(item.hash).to_bytes(8, "big"))
    if hashed is None:
        raise _NoContentId(f"an input of kind {item.modality.name} has no hash")
    beside = [(name, tensor) for name, value in item.model_specific_data.items() for tensor in _on_host(value)]
    return _digest(item.modality.name, hashed, digest_of_tensors(beside))


def _on_host(value: Any) -> Iterable[torch.Tensor]:
    import torch

    value = torch.as_tensor(value) if hasattr(value, "__array_interface__") else value
    return [value] if isinstance(value, torch.Tensor) and value.device.type == "cpu" else []


def _tensor(value: Any) -> torch.Tensor:
    import torch

    if not isinstance(value, torch.Tensor):
        raise _NoContentId(f"embeddings of some tokens are in another process: {type(value).__name__}")
    return value


def _digest(*parts: Any) -> bytes:
    said = [each.encode("utf-8", "surrogatepass") if isinstance(each, str) else each for each in parts]
    return sha256(msgspec.msgpack.encode(said)).digest()
