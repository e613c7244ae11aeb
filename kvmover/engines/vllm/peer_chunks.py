"""PeerChunks lends chunks of an engine's host memory to other engines, and reads theirs into it, request by request.

One rank is enough: the memory has chunks of all ranks, in the order that vLLM calls canonical. A chunk is one page of a
prompt. Its bytes change when the memory is told so: `freed` comes before.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvmover.cache.peers import PeerPrefix, PeerRead, PeerTier
from kvmover.cache.prefix import DEFAULT_NAMESPACE, KeyUnits, RadixKey, chain
from kvmover.engines.common import EngineUnsupported
from kvmover.engines.vllm.scheduler import is_tokens_alone
from kvmover.layout import Component, Layout, Pool, PoolSpec
from kvmover.repeats import Repeats, form_of

if TYPE_CHECKING:
    from kvmover.transport import Memory

log = logging.getLogger(__name__)


class TokenOrder(StrEnum):
    """Which of tokens and heads is outside in a layer's part of a chunk, by vLLM's names of layouts."""

    TOKEN_FIRST = "LBNHC"
    HEAD_FIRST = "LBHNC"


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How a chunk lies in memory: `row_bytes` a chunk, in it layer after layer of `component`, K beside V of a head."""

    component: Component
    tokens: int
    row_bytes: int
    order: TokenOrder

    def pool(self, memory: Memory) -> Pool:
        """All chunks of `memory`, which stays its owner's and must outlive the pool. Raises EngineUnsupported."""
        import torch

        size, part = self.component.element_bytes, self.component
        content = part.kv * part.dim
        layer, rest = self.tokens * part.heads * content, self.row_bytes % size
        if rest or part.layers * layer * size > self.row_bytes:
            raise EngineUnsupported(
                f"{part.layers} layers of {self.tokens} tokens take {part.layers * layer * size} B; rows of vLLM's host"
                f" memory have {self.row_bytes} B: peers share attention over all tokens, of one cache group"
            )
        heads_out = self.order is TokenOrder.HEAD_FIRST
        token, head = (content, self.tokens * content) if heads_out else (part.heads * content, content)
        layout = Layout(
            ("page", "layer", "kv", "head", "token", "dim"),
            (memory.nbytes // self.row_bytes, part.layers, part.kv, part.heads, self.tokens, part.dim),
            (self.row_bytes // size, layer, part.dim, head, token, 1),
        )
        every = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)  # a view of the view would keep it alive
        return Pool(PoolSpec(part, layout), (torch.frombuffer(every, dtype=torch.uint8),))


@dataclass(slots=True, eq=False)
class PeerPrompt:
    """What peers were asked for of a request. `tokens`: how many first ones `source` offers, None until that is known.

    `hashes`: of its whole chunks, as far as anybody asked. `used`: the one read of it has begun, or is not wanted.
    """

    request: Any
    name: str
    asked: bool = False
    first: int = 0
    tokens: int | None = None
    source: int = 0
    used: bool = False
    hashes: list[bytes] = field(default_factory=list[bytes])

    def chunk_hashes(self, chunk_tokens: int) -> list[bytes]:
        """Of all chunks of tokens that are known by now."""
        done, tokens = len(self.hashes), self.request.all_token_ids
        if (whole := len(tokens) // chunk_tokens) > done:
            more = tokens[done * chunk_tokens : whole * chunk_tokens]
            self.hashes += chain(self.hashes[-1] if done else b"", list(more), chunk_tokens)
        return self.hashes


@dataclass(slots=True, eq=False)
class PeerJob:
    """Chunks of a request to read: `rows` by the number of the chunk in the prompt. `done`: those that are here."""

    number: int
    prompt: PeerPrompt
    rows: Mapping[int, int]
    began_s: float
    read: PeerRead | None = None
    run: range = range(0)
    outcome: int | BaseException | None = None
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether its rows are nobody's but the engine's."""
        return self.outcome is not None and (self.read is None or self.read.over)

    @property
    def done(self) -> range:
        """Chunks of the prompt that are whole in their rows."""
        return self.run if isinstance(self.outcome, int) else range(0)


@dataclass(slots=True)
class PeerChunks:
    """Methods are for vLLM's scheduler, and wait for nothing but `freed`, `settle` and `close`.

    `counts`: chunks by how their reads ended, and those that came to be lent.
    """

    tier: PeerTier
    chunk_tokens: int
    ended: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    _jobs: list[PeerJob] = field(default_factory=list[PeerJob])
    _serial: int = 0
    _repeats: Repeats = field(default_factory=Repeats)

    def prompt(self, request: Any) -> PeerPrompt | None:
        """Of a request that is new; None where other things than tokens make its KV."""
        if not is_tokens_alone(request):
            return None
        self._serial += 1
        return PeerPrompt(request, f"{self._serial}-{request.request_id}"[:128])

    # What others have

    def has(self, prompt: PeerPrompt, end: int) -> bool | None:
        """Whether a peer offers the chunk up to token `end`; None: they are asked, and have not answered."""
        if prompt.used:
            return False
        if not prompt.asked:
            self._ask(prompt, end - self.chunk_tokens)
        if prompt.tokens is None:
            self.tier.poll()
        return None if prompt.tokens is None else prompt.first < end <= prompt.tokens

    def _ask(self, prompt: PeerPrompt, first: int) -> None:
        request = prompt.request
        prompt.asked, prompt.first = True, first
        limit = request.num_tokens // self.chunk_tokens * self.chunk_tokens
        key = RadixKey.of(list(request.all_token_ids[:limit]), DEFAULT_NAMESPACE, KeyUnits.PLAIN)

        def answered(tokens: Sequence[int]) -> None:
            most = max(tokens, default=0)
            prompt.source = list(tokens).index(most) if tokens else 0
            prompt.tokens = most // self.chunk_tokens * self.chunk_tokens
            if prompt.tokens <= first:
                self.give_up(prompt)

        self.tier.look(prompt.name, PeerPrefix(key, first, limit), answered)

    def give_up(self, prompt: PeerPrompt) -> None:
        """What was offered for a request will not be read, if it is not being read."""
        if prompt.asked and not prompt.used:
            prompt.used = True
            self.tier.decline(prompt.name)

    def load(self, number: int, prompt: PeerPrompt, rows: Mapping[int, int]) -> None:
        """Read chunks of the prompt, by their numbers, into rows: one run of them, the others are missed."""
        job = PeerJob(number, prompt, rows, self.clock())
        self._jobs.append(job)
        first = min(rows)
        stop = next(chunk for chunk in range(first, first + len(rows) + 1) if chunk not in rows)
        if prompt.used or prompt.tokens is None:
            job.outcome = LookupError("what was offered was read, or given up")
            return
        prompt.used, job.run = True, range(first, stop)

        def ended(outcome: int | BaseException) -> None:
            job.outcome, job.seconds = outcome, self.clock() - job.began_s
            if isinstance(outcome, BaseException):
                self._unread(f"{len(rows)} chunks for {prompt.request.request_id}", outcome)

        job.read = PeerRead(lambda: False, ended)
        positions = range(first * self.chunk_tokens, stop * self.chunk_tokens)
        table = [0] * first + [rows[chunk] for chunk in job.run]
        self.tier.read(prompt.name, prompt.source, positions, [table], job.read)

    def _unread(self, chunks: str, error: BaseException) -> None:
        """Write why chunks were not read, once a minute of those for the same reason."""
        if (more := self._repeats.more(form_of(str(error)), self.clock())) is not None:
            log.warning("%s were not read: %s%s", chunks, error, more)

    def finished(self) -> list[PeerJob]:
        """Jobs that have ended since the last call; what they read is lent on."""
        self.tier.poll()
        over = [job for job in self._jobs if job.over]
        self._jobs = [job for job in self._jobs if not job.over]
        for job in over:
            hashes = job.prompt.chunk_hashes(self.chunk_tokens)
            self.tier.came([hashes[chunk] for chunk in job.done], [job.rows[chunk] for chunk in job.done])
            self.counts += Counter(read=len(job.done), failed=len(job.rows) - len(job.done), lent=len(job.done))
        return over

    # What this engine has

    def came(self, prompt: PeerPrompt, rows: Mapping[int, int]) -> None:
        """Chunks of a prompt, by their numbers, are whole in these rows."""
        hashes = prompt.chunk_hashes(self.chunk_tokens)
        known = {chunk: row for chunk, row in rows.items() if chunk < len(hashes)}
        self.tier.came([hashes[chunk] for chunk in known], list(known.values()))
        self.counts["lent"] += len(known)

    def freed(self, rows: Iterable[int]) -> None:
        """Rows are about to be used for something else."""
        self.tier.freed(list(rows))

    def take_counts(self) -> Counter[str]:
        """Those since the last call."""
        taken, self.counts = self.counts, Counter[str]()
        return taken

    def settle(self) -> None:
        """Wait until no row is written any more."""
        while not all(job.over for job in self._jobs):
            self.tier.poll()
            self.tier.wait(0.01)

    def close(self) -> None:
        """Lend and read nothing any more. What was being read has failed."""
        self.ended()
        self.tier.close()
