"""The demo's model is a transformer, sharded over TP and PP, whose only state is the KV cache it is given.

Its weights are drawn from a seed, or a Llama's, mapped from a checkpoint. Drawn ones are float64: another sharding
sums in another order, which moves a logit by 1e-14, far below its gap to the next. Keys are cached unrotated, and
rotated by their row number when read, so that a misplaced page gives wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] (public by its docs)
from torch.nn.functional import rms_norm, silu

from kvmover.errors import LayoutError
from kvmover.tools.demo.llama_checkpoint import LLAMA_NAMES, mapped
from kvmover.tools.demo.stored_plane import StoredPlane, Where

_QUERY_CHUNK = 64  # queries attended at once: bounds the scores of a long prompt, and keeps them in the core's cache
#: Sums and hand-overs among the ranks of a fleet: every rank calls the same methods in the same order.
Collective: TypeAlias = "Alone | Gloo"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. A cached row is [kv, kv_heads, head_dim]: plane 0 is the key, the last plane begins with the value.

    kv=2 and value_dim=head_dim is grouped-query attention; kv=1, kv_heads=1 and value_dim < head_dim is absorbed MLA.
    `sharpness` makes drawn weights attend as sharply as trained ones: rows mixed evenly would hide a wrong row.
    `checkpoint`: a file of a Llama's weights in safetensors; empty: weights drawn from `seed`. Raises LayoutError for
    sizes that do not fit together.
    """

    name: str = "gqa"
    layers: int = 4
    hidden: int = 64
    query_heads: int = 8
    kv_heads: int = 2
    kv: int = 2
    head_dim: int = 16
    value_dim: int = 16
    vocab: int = 512
    mlp: int = 128
    seed: int = 0
    rope_base: float = 1000.0
    sharpness: float = 3.0
    norm_eps: float | None = None
    dtype: str = "float64"
    checkpoint: str = ""

    def __post_init__(self) -> None:
        if min(astuple(self)[1:10]) < 1 or self.vocab < 2 or self.query_heads % self.kv_heads:
            raise LayoutError(f"a model needs positive sizes, and query heads that share its kv heads evenly: {self}")
        if self.head_dim % 2 or self.value_dim > self.head_dim:
            raise LayoutError(f"head_dim {self.head_dim} must be even and hold value_dim {self.value_dim}")


GQA = ModelConfig()
LATENT = ModelConfig("latent", kv_heads=1, kv=1, head_dim=40, value_dim=32)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """A rank's part of the model: spans of layers, KV heads, query heads and MLP columns."""

    layers: range
    kv_heads: range
    query_heads: range
    mlp: range

    @classmethod
    def of_rank(cls, config: ModelConfig, tp: int, pp: int, tp_rank: int, pp_rank: int) -> ModelShard:
        """Compute a rank's even share. With fewer KV heads than ranks, neighbours hold the same one.

        Raises LayoutError if the model does not split so.
        """
        if config.query_heads % tp or max(config.kv_heads, tp) % min(config.kv_heads, tp) or config.layers < pp:
            raise LayoutError(f"{config} does not split over TP{tp} x PP{pp}")
        shares = (config.layers, pp, pp_rank), (config.query_heads, tp, tp_rank), (config.mlp, tp, tp_rank)
        layers, queries, mlp = (range(size * n // parts, size * (n + 1) // parts) for size, parts, n in shares)
        first, last = (query * config.kv_heads // config.query_heads for query in (queries[0], queries[-1]))
        return cls(layers, range(first, last + 1), queries, mlp)


class Cache(Protocol):
    """The cached rows of a request on a rank: local KV heads only, layers numbered in the whole model."""

    def write(self, layer: int, positions: range, rows: Tensor) -> None:
        """Store rows [kv, token, head, dim] of a layer at `positions`."""
        ...

    def read(self, layer: int, tokens: int) -> Tensor:
        """Returns rows [kv, token, head, dim] of the first `tokens` tokens of a layer."""
        ...


@dataclass(slots=True)
class ContiguousCache:
    """A cache of consecutive rows of a request: the reference for a paged cache."""

    rows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def write(self, layer: int, positions: range, rows: Tensor) -> None:
        """Append rows after the stored ones, or replace some. AssertionError for a hole."""
        held = self.rows.get(layer, rows[:, :0])
        assert positions.start <= held.shape[1], "a contiguous cache has no holes"
        self.rows[layer] = torch.cat([held[:, : positions.start], rows, held[:, positions.stop :]], dim=1)

    def read(self, layer: int, tokens: int) -> Tensor:
        """Returns the first `tokens` rows of a layer, a view."""
        return self.rows[layer][:, :tokens]


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A cache of a request's rows in a paged pool, through views whose axes were permuted to one order.

    `layers[n]` is [page, token, kv, head, dim] in any strides or, where K and V are separate allocations, one
    [page, token, head, dim] a plane. The pool owns them. `page_ids`, in order of position, may grow with the request.
    """

    layers: Mapping[int, Tensor | Sequence[Tensor | StoredPlane]]
    page_ids: list[int]
    page_tokens: int

    def write(self, layer: int, positions: range, rows: Tensor) -> None:
        """Write rows into the pages of their positions. Raises LayoutError beyond the pages."""
        planes, where = self._at(layer, positions)
        for plane, row in zip(planes, rows, strict=True):
            plane[where] = row.to(plane.device)

    def read(self, layer: int, tokens: int) -> Tensor:
        """Gather a copy of the first rows of a layer on the CPU, where the model computes."""
        planes, where = self._at(layer, range(tokens))
        return torch.stack([plane[where].cpu() for plane in planes])

    def _at(self, layer: int, positions: range) -> tuple[Sequence[Tensor | StoredPlane], Where]:
        """Returns the planes of `layer`, and the page id and token in the page of each position."""
        if positions.stop > len(self.page_ids) * self.page_tokens:
            raise LayoutError(f"{positions.stop} tokens do not fit {len(self.page_ids)} pages of {self.page_tokens}")
        held, token = self.layers[layer], torch.arange(positions.start, positions.stop)
        pages = torch.tensor(self.page_ids)[token // self.page_tokens]
        return held.unbind(2) if isinstance(held, Tensor) else held, (pages, token % self.page_tokens)


class Alone:
    """The collective of a process that holds the whole model."""

    def add_up(self, part: Tensor) -> Tensor:
        """Returns `part`, which is the sum."""
        return part

    def receive(self, like: Tensor) -> Tensor:
        """Raises LayoutError: there is no other stage."""
        raise LayoutError(f"no previous stage to receive {list(like.shape)} from: a model alone holds every layer")

    def hand_on(self, activations: Tensor) -> None:
        """Raises LayoutError: there is no other stage."""
        raise LayoutError(f"no next stage for {list(activations.shape)}: a model alone holds every layer")

    def share(self, values: Tensor) -> Tensor:
        """Returns `values`, already the last rank's."""
        return values


@dataclass(frozen=True, slots=True)
class Gloo:
    """The collective of a rank of a fleet, TP fastest."""

    group: dist.ProcessGroup
    tp: int

    @classmethod
    def join(cls, store: Store, rank: int, tp: int, pp: int) -> Gloo:
        """Meet the tp * pp ranks of this fleet in `store`, which must be unused by any other or earlier fleet."""
        # Not new_group: it needs every rank of a world, or (local) ranks with equally many earlier groups.
        group = dist.ProcessGroupGloo(store, rank, tp * pp, timedelta(seconds=60))
        return cls(cast(dist.ProcessGroup, group), tp)  # the stub of a Gloo group lacks its methods

    def add_up(self, part: Tensor) -> Tensor:
        """Returns the sum over the tensor-parallel ranks of this stage."""
        # A star: Gloo's ring of tiny messages takes 4.4 ms among four processes on two cores, the star 0.5 ms.
        first = self.group.rank() // self.tp * self.tp
        others = range(first + 1, first + self.tp)
        if self.group.rank() != first:
            self._send(part, [first])
            return self._receive(part, [first])[0]
        part = sum(self._receive(part, others), part)
        self._send(part, others)
        return part

    def receive(self, like: Tensor) -> Tensor:
        """Receive the previous stage's activations, of the shape and dtype of `like`."""
        return self._receive(like, [self.group.rank() - self.tp])[0]

    def hand_on(self, activations: Tensor) -> None:
        """Send activations to the same rank of the next stage."""
        self._send(activations, [self.group.rank() + self.tp])

    def share(self, values: Tensor) -> Tensor:
        """Returns the last rank's values, on every rank."""
        last = self.group.size() - 1
        if self.group.rank() != last:
            return self._receive(values, [last])[0]
        self._send(values, range(last))
        return values

    def _send(self, values: Tensor, ranks: Sequence[int]) -> None:
        for sent in [self.group.send([values], rank, 0) for rank in ranks]:
            sent.wait()

    def _receive(self, like: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        received = [torch.empty_like(like) for _ in ranks]
        for arrival in [self.group.recv([values], rank, 0) for values, rank in zip(received, ranks, strict=True)]:
            arrival.wait()
        return received


class Transformer:
    """A rank of the model. `gaps`: the lead of each chosen token's logit over the second best.

    A wrong row seldom changes the text, but always the gaps, which agree to 1e-9 where the rows do.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard, comm: Collective) -> None:
        self.config, self.shard, self.comm = config, shard, comm
        self.gaps: list[float] = []
        local = [n * config.kv_heads // config.query_heads - shard.kv_heads.start for n in shard.query_heads]
        if min(local) < 0 or max(local) >= len(shard.kv_heads):
            raise LayoutError(f"query heads {shard.query_heads} need other kv heads than {shard.kv_heads}")
        self._kv_head_of_query = torch.tensor(local)
        draw = _drawn(config) if not config.checkpoint else _trained(config)
        self._embedding = draw(-1, "embedding", 1, config.vocab, config.hidden)
        self._words = draw(-1, "words", config.hidden, config.hidden, config.vocab)
        self._last_norm = draw(-1, "norm", 0, config.hidden)
        self._layers = {layer: _layer_weights(config, shard, partial(draw, layer)) for layer in shard.layers}
        halves = torch.arange(config.head_dim // 2, dtype=torch.float64)
        self._frequency = config.rope_base ** (-halves * 2 / config.head_dim)

    @classmethod
    def alone(cls, config: ModelConfig) -> Transformer:
        """Make the whole model in one process."""
        return cls(config, ModelShard.of_rank(config, 1, 1, 0, 0), Alone())

    def prefill(self, tokens: Sequence[int], cache: Cache, start: int = 0) -> int:
        """Compute the token after `tokens`; `cache` holds rows [0, start), and on return those of all `tokens`.

        Raises LayoutError unless 0 <= start < len(tokens).
        """
        if not 0 <= start < len(tokens):
            raise LayoutError(f"prefill from {start} leaves nothing to compute of {len(tokens)} tokens")
        return self._forward(tokens[start:], start, cache)

    def decode(self, token: int, position: int, cache: Cache) -> int:
        """Compute the token after `token`, which is at `position`; `cache` holds the rows of [0, position)."""
        return self._forward([token], position, cache)

    def generate(self, prompt: Sequence[int], count: int, cache: Cache, start: int = 0) -> list[int]:
        """Compute `count` tokens that follow `prompt`. The last one is not cached."""
        answer = [self.prefill(prompt, cache, start)]
        while len(answer) < count:
            answer.append(self.decode(answer[-1], len(prompt) + len(answer) - 1, cache))
        return answer

    def score(self, tokens: Sequence[int], start: int, cache: Cache) -> Iterator[list[float]]:
        """Compute the surprise of each of tokens[start + 1:], the negative logarithm of its probability, in parts.

        `cache` holds rows [0, start), and at the end those of all `tokens` but the last.
        """
        for first in range(start, len(tokens) - 1, _QUERY_CHUNK):
            following = tokens[first + 1 : first + 1 + _QUERY_CHUNK]
            hidden = self._hidden(tokens[first : first + len(following)], first, cache)
            said = torch.zeros(len(following), dtype=torch.float64)
            if self._is_last:
                said[:] = torch.log_softmax(self._logits(hidden), -1).gather(1, torch.tensor([following]).T)[:, 0]
            yield [-float(each) for each in self.comm.share(said)]

    @property
    def _is_last(self) -> bool:
        return self.shard.layers.stop == self.config.layers

    def _forward(self, tokens: Sequence[int], start: int, cache: Cache) -> int:
        hidden = self._hidden(tokens, start, cache)
        choice = torch.zeros(2, dtype=torch.float64)  # a token id is exact in float64
        if self._is_last:
            best, words = torch.topk(self._logits(hidden[-1]), 2)
            choice[0], choice[1] = words[0], best[0] - best[1]
        token, gap = (float(value) for value in self.comm.share(choice))
        self.gaps.append(gap)
        return int(token)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._normed(hidden, self._last_norm) @ self._words

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, [self.config.hidden], weight, self.config.norm_eps)

    def _hidden(self, tokens: Sequence[int], start: int, cache: Cache) -> Tensor:
        """Returns this stage's activations [token, hidden], handed on to the next stage if there is one."""
        hidden = self._embedding[torch.tensor(tokens)]
        if self.shard.layers.start:
            hidden = self.comm.receive(hidden)
        for layer in self.shard.layers:
            weights = self._layers[layer]
            inner = self._normed(hidden, weights["attention_norm"])
            hidden = hidden + self.comm.add_up(self._attention(layer, inner, start, cache))
            inner = self._normed(hidden, weights["mlp_norm"])
            inner = silu(inner @ weights["gate"]) * (inner @ weights["up"])
            hidden = hidden + self.comm.add_up(inner @ weights["down"])
        if not self._is_last:
            self.comm.hand_on(hidden)
        return hidden

    def _attention(self, layer: int, hidden: Tensor, start: int, cache: Cache) -> Tensor:
        """Returns this rank's part of the attention output [token, hidden]; caches the rows of `hidden`."""
        config, weights, count = self.config, self._layers[layer], len(hidden)
        rows = (hidden @ weights["rows"]).view(count, config.kv, -1, config.head_dim)
        cache.write(layer, range(start, start + count), rows.transpose(0, 1))
        planes = cache.read(layer, start + count).to(hidden.dtype)  # rows of fp8 are read in float64
        keys = self.rotated(planes[0], 0)[:, self._kv_head_of_query].permute(1, 2, 0)  # [head, dim, token]
        values = planes[-1][:, self._kv_head_of_query, : config.value_dim].transpose(0, 1)  # [head, token, dim]
        queries = self.rotated((hidden @ weights["query"]).view(count, -1, config.head_dim), start).transpose(0, 1)
        queries = queries * (config.sharpness / config.head_dim**0.5)
        mixed: list[Tensor] = []
        for first in range(0, count, _QUERY_CHUNK):
            scores = queries[:, first : first + _QUERY_CHUNK] @ keys[:, :, : start + first + _QUERY_CHUNK]
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(start + first + 1)
            mixed.append(scores.masked_fill_(later, -torch.inf).softmax(-1) @ values[:, : scores.shape[2]])
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1) @ weights["out"]

    def rotated(self, rows: Tensor, start: int) -> Tensor:
        """Rotate `rows` [token, head, dim] by their positions, from `start` (rotary embedding)."""
        angles = torch.arange(start, start + len(rows), dtype=torch.float64)[:, None, None] * self._frequency
        (left, right), cos, sin = rows.chunk(2, dim=-1), angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def generate_alone(config: ModelConfig, prompt: Sequence[int], count: int) -> list[int]:
    """Compute the reference answer: the whole model in one process, over a contiguous cache."""
    return Transformer.alone(config).generate(prompt, count, ContiguousCache())


class Draw(Protocol):
    """The weights of a model: matrices [in, out], norms [hidden]."""

    def __call__(self, layer: int, name: str, inputs: int, *shape: int) -> Tensor:
        """Returns a whole matrix of a layer (-1: of none) by its name; a sum over `inputs` keeps unit variance."""
        ...


def _layer_weights(config: ModelConfig, shard: ModelShard, draw: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Returns a rank's slices of one layer's matrices, all [in, out], and its norms."""
    hidden, queries, kv_heads = config.hidden, config.query_heads, config.kv_heads
    of_queries, of_kv_heads, of_mlp = (slice(s.start, s.stop) for s in (shard.query_heads, shard.kv_heads, shard.mlp))
    return {
        "attention_norm": draw("attention_norm", 0, hidden),
        "mlp_norm": draw("mlp_norm", 0, hidden),
        "query": draw("query", hidden, hidden, queries, config.head_dim)[:, of_queries].flatten(1),
        "rows": draw("rows", hidden, hidden, config.kv, kv_heads, config.head_dim)[:, :, of_kv_heads].flatten(1),
        "out": draw("out", queries * config.value_dim, queries, config.value_dim, hidden)[of_queries].flatten(0, 1),
        "gate": draw("gate", hidden, hidden, config.mlp)[:, of_mlp],
        "up": draw("up", hidden, hidden, config.mlp)[:, of_mlp],
        "down": draw("down", config.mlp, config.mlp, hidden)[of_mlp],
    }


def _drawn(config: ModelConfig) -> Draw:
    """Returns the weights of a seed: each a function of (seed, layer, name) only, norms of ones."""
    dtype = getattr(torch, config.dtype)

    def draw(layer: int, name: str, inputs: int, *shape: int) -> Tensor:
        if not inputs:
            return torch.ones(shape, dtype=dtype)
        generator = torch.Generator().manual_seed(Random(f"{config.seed}/{layer}/{name}").getrandbits(60))
        return torch.randn(shape, dtype=torch.float64, generator=generator).div_(inputs**0.5).to(dtype)

    return draw


def _trained(config: ModelConfig) -> Draw:
    """Returns the weights of a Llama's checkpoint, views of the mapped file where its order allows."""
    tensors, dtype = mapped(Path(config.checkpoint)), getattr(torch, config.dtype)

    def draw(layer: int, name: str, inputs: int, *shape: int) -> Tensor:
        parts = [tensors[part.format(layer=layer)].to(dtype) for part in LLAMA_NAMES[name]]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole if name == "embedding" or whole.ndim == 1 else whole.t().reshape(shape)

    return draw
