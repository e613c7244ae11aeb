"""A picture of a plan has source ranks left, destination ranks right, and a ribbon for every leg.

A card is the whole model, heads across and layers down. The rank's part is filled, in the colour of the source that
sends it. Where ranks share the positions out, a bar shows the first tokens of the request. Of large fleets one pattern
of ranks is drawn, and a note lists the ranks alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap

from kvmover.layout import Coordinate, Fleet, Positions, Shard, Span, common
from kvmover.observe.formats import bytes_in_words
from kvmover.plan.cost import Route
from kvmover.plan.explain import Explained
from kvmover.plan.fleet_text import FleetText
from kvmover.plan.legs import Leg, Plan
from kvmover.tools.plan_views import svg
from kvmover.tools.plan_views.plan_words import cache_in_words, fleet_in_words, ranks_in_words, span_in_words

WIDTH = 960
_MARGIN, _CARD, _PAD = 24, 252, 12
_TOP, _FOOT, _GAP = 92, 76, 14
_INNER = _CARD - 2 * _PAD
_SLOT, _THICKEST, _THINNEST = 15, 18, 2.5
_LANE = 10
_PALE, _GREY = 0.22, "#8d96a0"
_LINE, _LETTERS = 18, 150

#: Most ranks of both fleets drawn in full; beyond that, ranks drawn of each kind.
_MOST_RANKS, _MOST_ALIKE = 24, 4


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scale of all cards: layer bands, heads, tokens that a bar shows (0: no bars), and each source's colour."""

    bands: tuple[Span, ...]
    heads: int
    window: int
    paints: Mapping[int, str]

    @property
    def indent(self) -> float:
        return 44 if len(self.bands) > 1 else 0

    @property
    def pitch(self) -> float:
        return min(25, (_INNER - self.indent) / self.heads)

    @property
    def gap(self) -> float:
        return min(3, self.pitch / 6)

    @property
    def row(self) -> float:
        return max(10, min(22, 96 / len(self.bands)))


@dataclass(frozen=True, slots=True)
class _Mark:
    """A span of tokens on a bar."""

    positions: Positions
    paint: str
    opacity: float = 1


@dataclass(frozen=True, slots=True)
class _Card:
    """A rank: the paints of each (band, head) it holds, the lanes of its bar, and its legs by index."""

    rank: int
    place: str
    squares: dict[tuple[int, int], list[tuple[str, float]]]
    lanes: list[list[_Mark]]
    legs: list[int]

    def height(self, scale: _Scale) -> float:
        content = 30 + len(scale.bands) * (scale.row + 3)
        if scale.window:
            content += 3 + _LANE * max(1, len(self.lanes))
        return max(content + 8, len(self.legs) * _SLOT + 12)


def draw(plan: Plan, src: FleetText, dst: FleetText, legs: Sequence[Explained]) -> str:
    """Return the plan as a standalone SVG document."""
    shown = _shown(plan, legs)
    paints = {rank: svg.colour(index) for index, rank in enumerate(shown.sources)}
    scale = _Scale(_bands(plan), plan.component.heads, _window(plan, [each.leg for each in legs]), paints)
    body = [*_heading(plan, src, dst, legs)]
    hidden = [each for each in legs if each.leg.src_rank not in paints and each.leg.dst_rank in shown.targets]
    legs = shown.legs
    sources = [_source(plan, rank, scale, legs) for rank in shown.sources]
    targets = [_target(plan, rank, scale, legs, hidden) for rank in shown.targets]
    tall = max(_stacked(cards, scale) for cards in (sources, targets))
    left = _spread(sources, scale, tall)
    right = _spread(targets, scale, tall)
    ports = _ports(sources, left, scale), _ports(targets, right, scale)
    body += _ribbons(legs, *ports, len(targets) >= len(sources), paints)
    for cards, tops, x in ((sources, left, _MARGIN), (targets, right, WIDTH - _MARGIN - _CARD)):
        for card, top in zip(cards, tops, strict=True):
            body += _draw_card(card, x, top, scale)
    height = _TOP + tall + _FOOT
    body += _legend(scale, plan.stop, height)
    notes = [*shown.notes, *(["Grey: sent by ranks that are not drawn."] if hidden else [])]
    notes = [line for note in notes for line in wrap(note, _LETTERS)]
    body += [svg.text(_MARGIN, height + _LINE * line, words) for line, words in enumerate(notes)]
    height += _LINE * len(notes)
    return svg.document(WIDTH, height, f"{fleet_in_words(src)} to {fleet_in_words(dst)}", body)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Ranks and legs that are drawn, and a note for each group of ranks left out."""

    sources: list[int]
    targets: list[int]
    legs: list[Explained]
    notes: list[str]


def _shown(plan: Plan, legs: Sequence[Explained]) -> _Shown:
    """Choose the ranks and legs to draw: all of small plans, else a pattern of each kind.

    A pattern is a set of ranks that legs connect only with each other. Patterns are of one kind if their legs connect
    as many ranks in the same way, with as many bytes by the same route: TP64 to TP8, of 8 heads, is 8 of one kind. A
    large pattern has `_MOST_ALIKE` ranks of each kind.
    """
    if plan.src.size + plan.dst.size <= _MOST_RANKS:
        return _Shown([*range(plan.src.size)], [*range(plan.dst.size)], [*legs], [])
    kinds: defaultdict[Hashable, list[_Pattern]] = defaultdict(list)
    for pattern in _patterns(plan, legs):
        kinds[pattern.kind()].append(pattern)
    shown = _Shown([], [], [], [])
    for first, *others in kinds.values():
        drawn, notes = first.few()
        shown.sources.extend(drawn.sources)
        shown.targets.extend(drawn.targets)
        shown.legs.extend(drawn.legs)
        shown.notes.extend(notes)
        if others:
            sources = sorted(rank for each in others for rank in each.sources)
            targets = sorted(rank for each in others for rank in each.targets)
            shown.notes.append(f"Not drawn: {_ends(sources, targets)}, as {_ends(first.sources, first.targets)}.")
    return shown


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Ranks of both fleets, ascending, and all legs from and to them."""

    sources: list[int]
    targets: list[int]
    legs: list[Explained]

    def kind(self) -> Hashable:
        """Returns a key, equal for patterns that differ only in rank numbers."""
        at_source = {rank: index for index, rank in enumerate(self.sources)}
        at_target = {rank: index for index, rank in enumerate(self.targets)}
        lines = ((at_source[e.leg.src_rank], at_target[e.leg.dst_rank], *_load(e)) for e in self.legs)
        return len(self.sources), len(self.targets), tuple(sorted(lines))

    def few(self) -> tuple[_Pattern, list[str]]:
        """Returns the pattern with a few ranks of those whose legs are alike, and notes on the ranks left out."""
        if len(self.sources) + len(self.targets) <= _MOST_RANKS:
            return self, []
        to, of = defaultdict[int, list[Hashable]](list), defaultdict[int, list[Hashable]](list)
        for each in self.legs:
            to[each.leg.src_rank].append((each.leg.dst_rank, *_load(each)))
            of[each.leg.dst_rank].append((each.leg.src_rank, *_load(each)))
        sources, notes = _few(to, "source")
        targets, more = _few(of, "destination")
        legs = [each for each in self.legs if each.leg.src_rank in sources and each.leg.dst_rank in targets]
        return _Pattern(sources, targets, legs), notes + more


def _load(each: Explained) -> tuple[int, str, int]:
    return each.nbytes, each.choice.route.value, each.choice.runs


def _few(legs: Mapping[int, Sequence[Hashable]], side: str) -> tuple[list[int], list[str]]:
    """Returns the first few ranks of each kind, by their legs, and notes on the other ranks of the side."""
    kinds: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank in sorted(legs):
        kinds[frozenset(legs[rank])].append(rank)
    shown = sorted(rank for ranks in kinds.values() for rank in ranks[:_MOST_ALIKE])
    others = [(ranks[0], ranks[_MOST_ALIKE:]) for ranks in kinds.values() if ranks[_MOST_ALIKE:]]
    return shown, [f"Not drawn: {side} {_ranks(rest)}, as {side} rank {first}." for first, rest in others]


def _patterns(plan: Plan, legs: Sequence[Explained]) -> Iterator[_Pattern]:
    """Yield patterns that together have each rank once; a rank without legs is one by itself."""
    of_source = {rank: _Pattern([rank], [], []) for rank in range(plan.src.size)}
    of_target = {rank: _Pattern([], [rank], []) for rank in range(plan.dst.size)}
    for each in legs:
        one, other = of_source[each.leg.src_rank], of_target[each.leg.dst_rank]
        if one is not other:
            one, other = sorted((one, other), key=lambda found: -len(found.sources) - len(found.targets))
            one.sources.extend(other.sources)
            one.targets.extend(other.targets)
            one.legs.extend(other.legs)
            of_source |= dict.fromkeys(other.sources, one)
            of_target |= dict.fromkeys(other.targets, one)
        one.legs.append(each)
    for found in {id(each): each for each in (*of_source.values(), *of_target.values())}.values():
        yield _Pattern(sorted(found.sources), sorted(found.targets), found.legs)


def _ends(sources: Sequence[int], targets: Sequence[int]) -> str:
    if sources and targets:
        return f"{_ranks(sources)} to {_ranks(targets)}"
    return f"source {_ranks(sources)}" if sources else f"destination {_ranks(targets)}"


def _ranks(ranks: Sequence[int]) -> str:
    """Write ranks; of many that are not consecutive the first three, the last and the count."""
    words = ranks_in_words(ranks).split(", ")
    if len(words) > 6:
        words = [*words[:3], f"... {words[-1]} ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def _bands(plan: Plan) -> tuple[Span, ...]:
    """Cut the layers wherever a stage of either fleet begins."""
    shards = [plan.src_shard(rank) for rank in range(plan.src.size)]
    shards += [plan.dst_shard(rank) for rank in range(plan.dst.size)]
    cuts = sorted({0, plan.component.layers} | {shard.layers.start for shard in shards})
    return tuple(Span(low, high - low) for low, high in pairwise(cuts))


def _window(plan: Plan, legs: Sequence[Leg]) -> int:
    """Returns the tokens a bar shows: 0 if each rank has all positions, all if positions are not interleaved.

    Otherwise two rounds of the pattern, with 16 to 48 of the narrowest runs.
    """
    stripes = {stripe for leg in legs for stripe in leg.positions}
    if all(stripe.tokens == plan.stop for stripe in stripes):
        return 0
    dealt = [stripe for stripe in stripes if stripe.count > 1]
    if not dealt:
        return plan.stop
    finest = min(stripe.width for stripe in dealt)
    return min(plan.stop, finest * 48, max(finest * 16, 2 * max(stripe.step for stripe in dealt)))


def _covered(leg: Leg | Shard, scale: _Scale) -> Iterator[tuple[int, int]]:
    """Yield the (band, head) squares of a leg or a shard."""
    for band, layers in enumerate(scale.bands):
        if layers & leg.layers:
            yield from ((band, head) for head in leg.heads)


def _source(plan: Plan, rank: int, scale: _Scale, legs: Sequence[Explained]) -> _Card:
    """Make a source rank's card: bright the part it sends, pale the part it leaves to a replica."""
    shard, paint = plan.src_shard(rank), scale.paints[rank]
    mine = [number for number, each in enumerate(legs) if each.leg.src_rank == rank]
    held = shard.positions.clip(0, plan.stop) if shard.positions else ()
    squares = {square: [(paint, _PALE)] for square in _covered(shard, scale)} if held else {}
    squares |= {square: [(paint, 1.0)] for number in mine for square in _covered(legs[number].leg, scale)}
    marks = [_Mark(held, paint, _PALE), *(_Mark(legs[number].leg.positions, paint) for number in mine)]
    return _Card(rank, _place(plan.src, rank), squares, [marks], mine)


def _target(plan: Plan, rank: int, scale: _Scale, legs: Sequence[Explained], hidden: Sequence[Explained]) -> _Card:
    """Make a destination rank's card. Squares of several sources are cut into their colours; grey: not drawn."""
    mine = [number for number, each in enumerate(legs) if each.leg.dst_rank == rank]
    squares: dict[tuple[int, int], list[tuple[str, float]]] = {}
    lanes: list[list[_Mark]] = []
    for number in mine:
        leg = legs[number].leg
        mark = _Mark(leg.positions, scale.paints[leg.src_rank])
        for square in _covered(leg, scale):
            squares.setdefault(square, []).append((mark.paint, 1.0))
        free = next((lane for lane in lanes if not any(_overlap(mark, other) for other in lane)), None)
        if free is None:
            lanes.append([mark])
        else:
            free.append(mark)
    greys = (each.leg for each in hidden if each.leg.dst_rank == rank)
    squares = {square: [(_GREY, 1.0)] for leg in greys for square in _covered(leg, scale)} | squares
    return _Card(rank, _place(plan.dst, rank), squares, lanes, mine)


def _overlap(left: _Mark, right: _Mark) -> bool:
    return any(common(left.positions, stripe) for stripe in right.positions)


def _place(fleet: Fleet, rank: int) -> str:
    """Returns the rank's coordinate along the axes of size above one: `tp 1, pp 0`."""
    at: Coordinate = fleet.coordinate(rank)
    axes = (("tp", fleet.tp, at.tp), ("pp", fleet.pp, at.pp), ("cp", fleet.cp, at.cp))
    return ", ".join(f"{name} {index}" for name, size, index in axes if size > 1)


def _stacked(cards: Sequence[_Card], scale: _Scale) -> float:
    return sum(card.height(scale) + _GAP for card in cards) - _GAP


def _spread(cards: Sequence[_Card], scale: _Scale, tall: float) -> list[float]:
    """Returns the top of each card, with the shorter column spread over the height of the taller one."""
    spare = (tall - _stacked(cards, scale)) / len(cards)
    tops: list[float] = []
    y = _TOP + spare / 2
    for card in cards:
        tops.append(y)
        y += card.height(scale) + _GAP + spare
    return tops


def _ports(cards: Sequence[_Card], tops: Sequence[float], scale: _Scale) -> dict[int, tuple[float, float]]:
    """Returns for each leg the height of the middle of its end at the card, and its room."""
    ports: dict[int, tuple[float, float]] = {}
    for card, top in zip(cards, tops, strict=True):
        room = (card.height(scale) - 12) / max(1, len(card.legs))
        for place, number in enumerate(card.legs):
            ports[number] = (top + 6 + (place + 0.5) * room, room)
    return ports


def _heading(plan: Plan, src: FleetText, dst: FleetText, legs: Sequence[Explained]) -> Iterator[str]:
    model = plan.component
    total = bytes_in_words(sum(each.nbytes for each in legs))
    yield svg.text(
        _MARGIN, 32, f"{model.name}: {cache_in_words(model)}, {model.layers} layers, {model.dtype}", "ink title"
    )
    yield svg.text(WIDTH - _MARGIN, 32, f"{plan.stop:,} tokens, {total}", "soft", "end")
    yield svg.text(_MARGIN, 74, f"from  {fleet_in_words(src)}", "ink strong")
    yield svg.text(WIDTH - _MARGIN, 74, f"to  {fleet_in_words(dst)}", "ink strong", "end")


def _ribbons(
    legs: Sequence[Explained],
    left: dict[int, tuple[float, float]],
    right: dict[int, tuple[float, float]],
    label_right: bool,
    paints: Mapping[int, str],
) -> Iterator[str]:
    """Yield all ribbons, then all labels, at the side with more ranks."""
    most = max(each.nbytes for each in legs)
    thickest = min(_THICKEST, *(room - 3 for _, room in (*left.values(), *right.values())))
    x0, x1 = _MARGIN + _CARD, WIDTH - _MARGIN - _CARD
    labels: list[str] = []
    for number, each in enumerate(legs):
        thickness = max(_THINNEST, thickest * each.nbytes / most)
        threads = 3 if each.choice.route is Route.DIRECT else 1
        paint = paints[each.leg.src_rank]
        start, end = (x0, left[number][0]), (x1, right[number][0])
        hint = f"{each.leg.src_rank} to {each.leg.dst_rank}: {each.choice.why()}"
        yield svg.group(hint, [svg.ribbon(start, end, thickness, paint, threads)])
        x, anchor = (x1 - 10, "end") if label_right else (x0 + 10, "start")
        y = (end if label_right else start)[1] + 4
        labels.append(svg.text(x, y, f"{bytes_in_words(each.nbytes)} {each.choice.route}", "label", anchor))
    yield from labels


def _draw_card(card: _Card, x: float, top: float, scale: _Scale) -> Iterator[str]:
    yield svg.rect(x, top, _CARD, card.height(scale), style="card", radius=6)
    yield svg.text(x + _PAD, top + 19, f"rank {card.rank}", "ink strong")
    place = card.place if card.squares else f"{card.place}, holds none".lstrip(", ")
    yield svg.text(x + _CARD - _PAD, top + 19, place, "soft", "end")
    y = top + 30
    for band, layers in enumerate(scale.bands):
        if scale.indent:
            yield svg.text(x + _PAD, y + scale.row / 2 + 4, span_in_words(layers), "soft")
        yield from _draw_row(card, band, x + _PAD + scale.indent, y, scale)
        y += scale.row + 3
    if scale.window:
        for lane in card.lanes or [[]]:
            y += _LANE
            yield svg.rect(x + _PAD, y - 5, _INNER, _LANE - 2, style="hole")
            for mark in lane:
                yield from _draw_mark(mark, x + _PAD, y - 5, scale)


def _draw_row(card: _Card, band: int, x: float, y: float, scale: _Scale) -> Iterator[str]:
    side = scale.pitch - scale.gap
    for head in range(scale.heads):
        at = x + head * scale.pitch
        paints = card.squares.get((band, head), [])
        if not paints:
            yield svg.rect(at, y, side, scale.row, style="hole", radius=scale.gap)
        for piece, (paint, opacity) in enumerate(paints):
            width = side / len(paints)
            corner = scale.gap if len(paints) == 1 else 0
            yield svg.fill(at + piece * width, y, width, scale.row, paint, opacity, corner)


def _draw_mark(mark: _Mark, x: float, y: float, scale: _Scale) -> Iterator[str]:
    token = _INNER / scale.window
    for stripe in mark.positions:
        for piece in stripe.clip(0, scale.window):
            for start in piece.starts:
                yield svg.fill(x + start * token, y, piece.width * token, _LANE - 2, mark.paint, mark.opacity)


def _legend(scale: _Scale, tokens: int, height: float) -> Iterator[str]:
    y = height - 40
    lines = ["A card is the whole model: heads across" + (", layers down" if scale.indent else "") + "."]
    lines.append("Filled: held by the rank, in the colour of the source that sends it; pale: left to a replica.")
    yield svg.text(_MARGIN, y, " ".join(lines), "soft")
    y += 20
    if scale.window:
        part = f"tokens 0-{scale.window - 1:,} of {tokens:,}" if scale.window < tokens else f"all {tokens:,} tokens"
        yield svg.text(WIDTH - _MARGIN, y, f"Bars: {part}.", "soft", "end")
    for x, threads, words in (
        (_MARGIN, 1, "packed: gathered, one write a chunk, scattered"),
        (_MARGIN + 330, 3, "direct: written from pool to pool, run by run"),
    ):
        yield svg.ribbon((x, y - 4), (x + 34, y - 4), 10, svg.colour(0), threads)
        yield svg.text(x + 42, y, words, "soft")
