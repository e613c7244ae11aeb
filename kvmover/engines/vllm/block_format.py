"""Block formats describe the strided segments of a layer's blocks, which another TP or block size cuts.

vLLM gives each layer as [block, head, token, content], where the content may be opaque: keys of a block before all its
scales, or the states of a recurrent layer one behind the other. A segment is a part with regular rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from kvmover.engines.common import EngineUnsupported
from kvmover.layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class PageView:
    """A page of a layer as vLLM views it: `heads` x `rows` of `content` elements, strides in elements of `dtype`."""

    heads: int
    rows: int
    content: int
    strides: tuple[int, int, int]
    dtype: str


@dataclass(frozen=True, slots=True)
class BlockSegment:
    """Rows in every page of a layer: `kv` x `held` heads x the page's rows of `dim` elements.

    This rank has `held` of the model's `heads`. `start_bytes` counts from the beginning of the page. `strides` are
    those of kv, head and row, in elements. `states` is as in a Component.
    """

    name: str
    heads: int
    held: int
    kv: int
    dim: int
    dtype: str
    start_bytes: int
    strides: tuple[int, int, int]
    states: int = 0


class BlockFormat(Protocol):
    """The format of a page. Frozen, so that layers of equal format are grouped."""

    def segments(self, page: PageView) -> list[BlockSegment]:
        """Returns all segments of a page on this rank. Raises EngineUnsupported for a page of another format."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """A format whose row is all content of a token and head: K and V, a latent, or a latent with its scales.

    `heads` counts those of the whole model. `quantised` names the format of a byte, if a byte is an element.
    """

    heads: int
    quantised: str = ""

    def segments(self, page: PageView) -> list[BlockSegment]:
        """Returns one segment."""
        _, head, row = (0, *page.strides[:2])
        said = self.quantised if DTYPE_BYTES[page.dtype] == 1 else ""
        return [BlockSegment(said, self.heads, page.heads, 1, page.content, page.dtype, 0, (0, head, row))]


@dataclass(frozen=True, slots=True)
class PlanarRows:
    """A format in which one part of all tokens of a page precedes the next part: index keys before their scales.

    `parts` has the name of each part and its bytes for a token. `rows` is the page size of a kernel that supports only
    one. Keys of 128 B and a scale of 4 B in pages of 64 rows: scales begin at byte 8,192.
    """

    parts: tuple[tuple[str, int], ...]
    rows: int | None = None

    def segments(self, page: PageView) -> list[BlockSegment]:
        """Returns one segment a part."""
        content = sum(width for _, width in self.parts)
        _require_bytes(page, content)
        if page.heads != 1 or page.strides[1] != content or self.rows not in (None, page.rows):
            names = ", ".join(name for name, _ in self.parts)
            raise EngineUnsupported(
                f"pages of {page.heads} x {page.rows} rows, a row every {page.strides[1]} B; those of {names} have"
                f" 1 x {self.rows or page.rows}, a row every {content} B"
            )
        made: list[BlockSegment] = []
        start = 0
        for name, width in self.parts:
            made.append(BlockSegment(name, 1, 1, 1, width, "uint8", start, (0, width, width)))
            start += width * page.rows
        return made


@dataclass(frozen=True, slots=True)
class TokenRing:
    """A format of a request's last tokens, in one page at their position modulo its rows, equal on every rank.

    The content of a row is opaque: keys in one head slot and their scores in another are both moved.
    """

    def segments(self, page: PageView) -> list[BlockSegment]:
        """Returns one segment a head slot, its rows as planes of one state."""
        head, row, _ = page.strides
        name, size = f"ring of {page.rows}", DTYPE_BYTES[page.dtype]
        return [
            BlockSegment(
                f"{name}, {slot}", 1, 1, page.rows, page.content, page.dtype, slot * head * size, (row, 0, 0), 1
            )
            for slot in range(page.heads)
        ]


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A format with keys of a page, their scales, values, their scales: NVFP4, a scale of 8 bits for every 16 values of
    4.

    vLLM has one slot for a head's keys and one for its values. `heads` counts those of the whole model. A head of 128
    values has 64 B of keys and 8 B of scales a token: with 2 heads and 16 rows in a page, the four parts begin at 0,
    2,048, 2,304 and 4,352.
    """

    heads: int

    def segments(self, page: PageView) -> list[BlockSegment]:
        """Returns a segment of values and one of scales; K and V are their two planes."""
        held, odd = divmod(page.heads, 2)
        data = page.content * 8 // 9
        _require_bytes(page, data + data // 8)
        head_first = page.strides == (page.rows * page.content, page.content, 1)
        token_first = page.strides == (page.content, page.heads * page.content, 1)
        if odd or not (head_first or token_first):
            raise EngineUnsupported(
                f"NVFP4 pages of {page.heads} slots, {page.rows} rows and strides of {page.strides} B are not dense"
            )
        side = held * page.rows * page.content
        made: list[BlockSegment] = []
        for name, width, start in (("values", data, 0), ("scales", page.content - data, held * page.rows * data)):
            strides = (side, page.rows * width, width) if head_first else (side, width, held * width)
            made.append(BlockSegment(f"nvfp4 {name}", self.heads, held, 2, width, "uint8", start, strides))
        return made


@dataclass(frozen=True, slots=True)
class Channels:
    """Adjacent channels of a state: `heads` in the whole model, `held` on this rank, of `channels` each."""

    name: str
    heads: int
    held: int
    channels: int


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state: `parts` side by side, each channel with `steps` elements.

    With `steps_first`, steps are outermost, as in vLLM's SD layout of convolution states: a plane a step.
    """

    parts: tuple[Channels, ...]
    steps: int
    dtype: str
    steps_first: bool = False

    @property
    def channels(self) -> int:
        """Returns the number of channels of all parts on this rank."""
        return sum(part.held * part.channels for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of this rank's share."""
        return self.channels * self.steps * DTYPE_BYTES[self.dtype]

    def segments(self, start_bytes: int) -> list[BlockSegment]:
        """Returns one segment a part. `start_bytes` is the tensor's place in the page."""
        made: list[BlockSegment] = []
        channel = 0
        for part in self.parts:
            if self.steps_first:
                kv, dim, strides = self.steps, part.channels, (self.channels, part.channels, 0)
                start = channel
            else:
                kv, dim, strides = 1, part.channels * self.steps, (0, part.channels * self.steps, 0)
                start = channel * self.steps
            at = start_bytes + start * DTYPE_BYTES[self.dtype]
            made.append(BlockSegment(part.name, part.heads, part.held, kv, dim, self.dtype, at, strides, 1))
            channel += part.held * part.channels
        return made


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """A format with the states of a recurrent layer one behind the other: a convolution's, then the recurrence's."""

    states: tuple[StateTensor, ...]

    def segments(self, page: PageView) -> list[BlockSegment]:
        """Returns the segments of every state, in order."""
        nbytes = sum(state.nbytes for state in self.states)
        _require_bytes(page, nbytes)
        made: list[BlockSegment] = []
        start = 0
        for state in self.states:
            made += state.segments(start)
            start += state.nbytes
        return made


def _require_bytes(page: PageView, content: int) -> None:
    given = page.content * DTYPE_BYTES[page.dtype]
    if given != content or DTYPE_BYTES[page.dtype] != 1:
        raise EngineUnsupported(f"rows of {page.content} elements of {page.dtype}; {content} bytes were expected")


#: The kind of a recurrent layer whose states are whole on every rank.
REPLICATED = "REPLICATED"


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """A recurrent layer by vLLM's spec: its `kind`, and `shapes` and `dtypes` of its states on one rank.

    `steps_first` is for convolutions. `groups` counts those of B and C in the whole model for Mamba-2, 0 if ranks share
    them.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    tp: int
    steps_first: bool
    groups: int = 0


def states_of(said: RecurrentKind) -> RecurrentStates:
    """Returns the format of a recurrent layer's states. Raises EngineUnsupported for an unknown kind or shape.

    Convolutions hold sub-projections side by side, each split over the ranks on its own: x, B and C of Mamba-2; q, k
    and v of gated delta networks and Kimi's, whose v has the recurrence's heads, and q and k half of the remaining
    channels each.
    """
    if said.kind == REPLICATED:
        return RecurrentStates(
            tuple(_on_every_rank(shape, dtype) for shape, dtype in zip(said.shapes, said.dtypes, strict=True))
        )
    if said.kind not in _CUTS:
        raise EngineUnsupported(f"recurrent layers of kind {said.kind}; those of {', '.join(_CUTS)} are moved")
    wanted, cut = _CUTS[said.kind]
    if len(said.shapes) != wanted:
        raise EngineUnsupported(
            f"a layer of kind {said.kind} with {len(said.shapes)} states {said.shapes}; not {wanted}"
        )
    return RecurrentStates(tuple(cut(said)))


def _on_every_rank(shape: tuple[int, ...], dtype: str) -> StateTensor:
    name = f"{' x '.join(map(str, shape))} on every rank"
    return StateTensor((Channels(name, 1, 1, prod(shape)),), 1, dtype)


def _whole_rows(name: str, said: RecurrentKind, number: int) -> StateTensor:
    """Returns a state split by its first axis."""
    held, *rest = said.shapes[number]
    return StateTensor((Channels(name, held * said.tp, held, prod(rest)),), 1, said.dtypes[number])


def _convolution(said: RecurrentKind, parts: Sequence[Channels]) -> StateTensor:
    shape = said.shapes[0]
    steps, channels = shape if said.steps_first else shape[::-1]
    state = StateTensor(tuple(parts), steps, said.dtypes[0], said.steps_first)
    if len(shape) != 2 or state.channels != channels:
        held = " + ".join(f"{part.name} {part.held * part.channels}" for part in parts)
        raise EngineUnsupported(f"a convolution state of shape {shape} is not of {held} channels")
    return state


def _channels(said: RecurrentKind) -> int:
    return said.shapes[0][1 if said.steps_first else 0]


def _x_only(said: RecurrentKind) -> Channels:
    """Returns channels without heads, which may be cut anywhere."""
    return Channels("x", _channels(said) * said.tp, _channels(said), 1)


def _mamba1(said: RecurrentKind) -> list[StateTensor]:
    return [_convolution(said, [_x_only(said)]), _whole_rows("state", said, 1)]


def _short_convolution(said: RecurrentKind) -> list[StateTensor]:
    return [_convolution(said, [_x_only(said)])]


def _linear(said: RecurrentKind) -> list[StateTensor]:
    return [_whole_rows("state", said, 0)]


def _mamba2(said: RecurrentKind) -> list[StateTensor]:
    """Returns Mamba-2's states: x has the recurrence's heads; B and C have groups, replicated by vLLM if ranks are
    more.
    """
    heads, head_dim, state_dim = said.shapes[1]
    held = (_channels(said) - heads * head_dim) // 2 // state_dim
    x = Channels("x", heads * said.tp, heads, head_dim)
    b, c = (Channels(name, said.groups or held * said.tp, held, state_dim) for name in ("B", "C"))
    return [_convolution(said, [x, b, c]), _whole_rows("state", said, 1)]


def _delta(said: RecurrentKind) -> list[StateTensor]:
    heads, value_dim, key_dim = said.shapes[1]
    held = (_channels(said) - heads * value_dim) // 2 // key_dim
    q, k = (Channels(name, held * said.tp, held, key_dim) for name in ("q", "k"))
    v = Channels("v", heads * said.tp, heads, value_dim)
    return [_convolution(said, [q, k, v]), _whole_rows("state", said, 1)]


#: By vLLM's names of recurrent layers: the number of states, and the function that cuts them.
_CUTS = {
    "MAMBA1": (2, _mamba1),
    "MAMBA2": (2, _mamba2),
    "GDN_ATTN": (2, _delta),
    "LINEAR": (1, _linear),
    "SHORT_CONV": (1, _short_convolution),
}
