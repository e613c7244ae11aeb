"""TransformersEngine computes by a model of transformers over pages that other engines read and fill."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any

import torch

from kvmover.cache.prefix import chain
from kvmover.engines.common import (
    NO_VERSION,
    TOKENS_ALONE,
    EngineMake,
    FirstToken,
    LoneRank,
    PromptParts,
    Remote,
    RequestPages,
    adapter_parts,
    changes_of,
    content_of,
    identified,
    marks,
)
from kvmover.engines.transformers import transformers_api as api
from kvmover.engines.transformers.transformers_options import parse
from kvmover.errors import PlanError
from kvmover.transfer import Gate
from kvmover.transfer.result import ALL


class TransformersEngine(AbstractContextManager["TransformersEngine"]):
    """A model, and a rank with its pages. For one thread at a time; the model stays the caller's. Close it.

    `said`: options by name, see docs/transformers.md. Raises ConfigError for others and for weights that cannot be
    identified, EngineUnsupported for a cache that is not moved, StoreError, or TransportUnavailable.
    """

    def __init__(self, model: Any, said: Mapping[str, Any] | None = None) -> None:
        self._options, settings = parse(said or {})
        component, device = api.component_of(model)
        called = self._options.model or settings.exchange.model or model.name_or_path or type(model).__name__
        weights = identified(called, settings.exchange, lambda: api.digest_of_weights(model))
        self._model, self._stamp, self._mark = model, changes_of(model.parameters()), marks(device)
        self.rank = LoneRank(component, device, weights, self._options, settings, EngineMake.TRANSFORMERS)

    @contextmanager
    def cache(
        self, prompt: Sequence[int], remote: Remote | None = None, adapter: str = ""
    ) -> Generator[api.PromptCache]:
        """Lend a `past_key_values` for `prompt`, of which all rows that could be had but the last one's are there: from
        the page store, then of the engine at `remote`. What it lacks is computed by the call of the model.

        `adapter`: the folder of the LoRA adapter that is active in the model. Raises NoFreePages, and PlanError for
        an empty prompt and for an adapter that the model has not.
        """
        ids = [int(token) for token in prompt]
        parts = self._parts(adapter)
        if not ids:
            raise PlanError("a prompt of no tokens: KV is of one at least")
        if self._stamp != changes_of(self._model.parameters()):
            self.updated(None)
        page = self._options.page_tokens
        table = RequestPages(page, self.rank.pool.tensors[0].device, self.rank.pages.take)
        keys = chain(b"", ids, page) if self.rank.store and parts is TOKENS_ALONE else []
        cache = api.PromptCache(self.rank.pool, table, ids, content_of(ids, parts), keys)
        try:
            table.until(len(ids))
            self._fill(cache, remote)
            yield cache
        finally:
            self.rank.pages.give_back(table.leave(), cache.transfers)

    def generate(self, prompt: Sequence[int], remote: Remote | None = None, adapter: str = "", **how: Any) -> Any:
        """Returns what the model's `generate` returns for `prompt`; `how` are arguments of its own. The prompt's whole
        pages are stored afterwards, if there is a store.
        """
        with self.cache(prompt, remote, adapter) as cache:
            answer = self._generate(cache, **how)
            self._keep(cache)
            return answer

    def serve(
        self,
        prompt: Sequence[int],
        name: str,
        remote: Remote | None = None,
        adapter: str = "",
        top_logprobs: int = 0,
        **how: Any,
    ) -> FirstToken:
        """Compute `prompt`, offer its KV as `name` to the engine that asks for it, and return the first token, which
        goes with it. `how`: arguments of `generate` by which the token is sampled.

        The pages are free once an engine has them all, or `deadline_s` later. If it raises, the engine that asks is
        refused with the reason, but for PlanError: a name that is being offered already.
        """
        mover, sent = self.rank.mover, None
        try:
            with self.cache(prompt, remote, adapter) as cache:
                known, chunk = cache.get_seq_length(), self._options.chunk_tokens
                if not self.rank.weights.is_known:
                    mover.refuse(name, NO_VERSION)
                    return self._first(cache, known, top_logprobs, how)
                sent = mover.send(name, [cache.table.pages], [Gate(None, ALL, known)], content=cache.content)
                cache.transfers.append(sent)
                for stop in range(known + chunk, len(cache.prompt), chunk):
                    new = torch.tensor([cache.prompt[stop - chunk : stop]], device=self._model.device)
                    with torch.inference_mode():
                        self._model(input_ids=new, past_key_values=cache, use_cache=True)
                    mover.produced(sent, Gate(self._mark(), ALL, stop))
                first = self._first(cache, known, top_logprobs, how)
                mover.produced(sent, Gate(self._mark()))
                mover.attach(sent, first.encode())
                self._keep(cache)
                return first
        except BaseException as error:
            if sent is not None:
                mover.abort(sent, f"the prefill failed: {error}")
            elif not isinstance(error, PlanError):
                mover.refuse(name, f"the prefill failed: {error}")
            raise

    def updated(self, version: str | None) -> None:
        """See LoneRank.updated: call it after each change of the model's weights. A change without a call counts as
        `updated(None)`.
        """
        self._stamp = changes_of(self._model.parameters())
        self.rank.updated(version)

    def close(self) -> None:
        """End open transfers, and close store and ports."""
        self.rank.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self, adapter: str) -> PromptParts:
        has_one = bool(getattr(self._model, "peft_config", None))  # peft sets it on every model that it changes
        if adapter and not has_one:
            raise PlanError(f"adapter = {adapter!r}, and the model has none")
        if adapter:
            return adapter_parts(adapter, TOKENS_ALONE)
        return PromptParts(unknown="an adapter without a folder") if has_one else TOKENS_ALONE

    def _fill(self, cache: api.PromptCache, remote: Remote | None) -> None:
        """Get the rows that are elsewhere. Pages that a failed transfer may still write are replaced by others."""
        page, last, table = self._options.page_tokens, len(cache.prompt) - 1, cache.table
        cache.stored = self.rank.store.get(cache.keys[: last // page], table.pages) if self.rank.store else 0
        tokens = cache.stored * page
        if remote is not None:
            fetched = self.rank.fetch(remote, tokens, table.pages, cache.content)
            tokens, cache.reason = fetched.tokens, fetched.reason
            if fetched.transfer is not None and fetched.transfer.quarantined:
                self.rank.pages.give_back(table.leave(), [fetched.transfer])
                table.until(len(cache.prompt))
                tokens = cache.stored = 0
        cache.landed(min(tokens, last))

    def _generate(self, cache: api.PromptCache, **how: Any) -> Any:
        ids = torch.tensor([cache.prompt], device=self._model.device)
        return self._model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **how)

    def _first(self, cache: api.PromptCache, known: int, top_logprobs: int, how: Mapping[str, Any]) -> FirstToken:
        config = copy(how.get("generation_config") or self._model.generation_config)
        rest = config.update(**{**how, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True})
        answer = self._generate(cache, **{**rest, "generation_config": config})
        token, found = int(answer.sequences[0, -1]), answer.logits[0][0].float().log_softmax(-1)
        top = found.topk(top_logprobs)
        likely = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return FirstToken(token, known, float(found[token]), likely)

    def _keep(self, cache: api.PromptCache) -> None:
        """Store the whole pages of a prompt that were not there."""
        if self.rank.store and cache.get_seq_length() >= len(cache.prompt):
            self._mark().synchronize()
            self.rank.store.put(cache.keys[cache.stored :], cache.table.pages[cache.stored : len(cache.keys)])
