"""A prompt's prefix from another engine's host, beside its own host, storage, and computing it again, in one run.

`python -m perf.bench_peer [FOLDER of the store] [--rounds N] [--out FOLDER]`. Three fleets of the demo's model, in
processes over NIXL: two compute a prompt, one of another TP, page size and axis order than the third, one of the same.
The third is asked for it, and timed from then until the prefix is on its device, on the slowest rank. `recompute` is
the forward pass over the same tokens, of the demo's small model on the CPU, to the first token. Every case once a
round, after one round unmeasured. Bytes are compared by `kvmover demo --scenario peer`, here the next token is.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvmover.cache.prefix import FULL, Tier
from kvmover.config.settings import Settings
from kvmover.tools.demo.crew import Crew, Member, ask, ask_all
from kvmover.tools.demo.model import GQA
from kvmover.tools.demo.run import MOVER
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.tiered_rank import TieredRank, TieredSeat
from perf.record import RESULTS, Spread, write

TOKENS = (256, 1024, 2048)
SCENARIO = Scenario.lent(
    "peer", "", replace(GQA, kv_heads=8), "tp=4,page=16,order=NHD", "tp=2,page=32,order=HND", "tp=2,page=32,order=HND"
)
#: Tokens of each fleet's pool on the device: two of the longest prompts.
POOL_TOKENS = 4096 + 64
UNLIKE, ALIKE, OWN = range(3)
PEER, EQUAL = "peer, TP4 page 16 NHD to TP2 page 32 HND", "peer, equal shape"
HOST, STORAGE, RECOMPUTE = "own host", "storage", "recompute"


@dataclass(frozen=True, slots=True)
class TimedSeat(TieredSeat):
    """A rank that times what it does."""

    def sit(self) -> TimedRank:
        return TimedRank(self)


class TimedRank(TieredRank):
    """Without the demo's digests, which take longer than what is timed."""

    def timed(self, prompt: tuple[int, ...]) -> tuple[float, float, str, int]:
        """Seconds to restore and to compute the rest, the tier that most came from, and the first token."""
        controller = self._controller
        began = time.perf_counter()
        restore = controller.restore(prompt)
        controller.wait(restore)
        restored = time.perf_counter()
        found: list[int] = restore.page_ids.tolist()
        fresh = controller.take(-(-len(prompt) // self._page) - len(found))
        assert fresh is not None
        pages = [*found, *fresh]
        (token,) = self._model.generate(prompt, 1, self._cache(pages), restore.tokens)
        computed = time.perf_counter()
        whole = len(prompt) // self._page
        controller.keep(prompt, pages[len(found) : whole], first_page=len(found))
        controller.give(pages[whole:])
        controller.release(restore)
        controller.wait()
        credit = restore.credit
        tiers = ("device", "host", "storage", "peer")
        most = max(tiers, key=lambda tier: getattr(credit, f"{tier}_tokens")) if restore.tokens else RECOMPUTE
        return restored - began, computed - restored, most, token

    def forget(self, *tiers: str) -> None:
        """Give up all that is on these tiers."""
        controller = self._controller
        controller.wait()
        if "device" in tiers:
            controller.evict(1 << 20)
        if "host" in tiers:
            controller.allocator.evict(FULL, Tier.HOST, 1 << 20)


class Bench:
    """The fleets, seated and connected."""

    def __init__(self, crew: Crew, folder: Path, store: Path) -> None:
        self.random = random.Random(0)
        settings, at = Settings(mover=MOVER), 0
        self.fleets: list[list[Member]] = []
        names = ("unlike", "alike", "own")
        for number, (name, fleet) in enumerate(zip(names, SCENARIO.lenders, strict=True)):
            size, pages = fleet.fleet.size, POOL_TOKENS // fleet.fleet.page_tokens
            root = store if number == OWN else None
            peers, meet = (("unlike", "alike") if number == OWN else ("own",)), str(folder / name)
            seats = [
                TimedSeat(SCENARIO, fleet, rank, pages, meet, root, "bench", settings, name, peers)
                for rank in range(size)
            ]
            self.fleets.append(list(crew.members[at : at + size]))
            ask(self.fleets[-1], "seat", [(seat,) for seat in seats])
            at += size
        cards = [card for lender in (UNLIKE, ALIKE) for card in ask_all(self.fleets[lender], "card")]
        ask_all(self.fleets[OWN], "connect", cards)

    def round(self, tokens: int) -> dict[str, Sequence[float]]:
        """Seconds to restore and to compute, by case."""
        found: dict[str, Sequence[float]] = {}
        for case, lender in ((PEER, UNLIKE), (EQUAL, ALIKE)):
            prompt = self.prompt(tokens)
            expected = self.served(lender, prompt, RECOMPUTE)[2]
            found[case] = self.served(OWN, prompt, "peer", expected)[:2]
            self.forget(lender, "device", "host")
            self.forget(OWN, "device", "host")
        prompt = self.prompt(tokens)
        *found[RECOMPUTE], expected = self.served(OWN, prompt, RECOMPUTE)  # and what was computed here is stored
        self.forget(OWN, "device")
        found[HOST] = self.served(OWN, prompt, "host", expected)[:2]
        self.forget(OWN, "device", "host")
        found[STORAGE] = self.served(OWN, prompt, "storage", expected)[:2]
        self.forget(OWN, "device", "host")
        return found

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """A token more than is to be restored: something is computed in every case."""
        return tuple(self.random.randrange(SCENARIO.model.vocab) for _ in range(tokens + 1))

    def served(
        self, fleet: int, prompt: Sequence[int], tier: str, expected: int | None = None
    ) -> tuple[float, float, int]:
        told = ask_all(self.fleets[fleet], "timed", tuple(prompt))
        assert {most for _, _, most, _ in told} == {tier}, (told, tier)
        token = told[0][3]
        assert expected in (None, token), "another token than the lender's"
        return max(each[0] for each in told), max(each[1] for each in told), token

    def forget(self, fleet: int, *tiers: str) -> None:
        ask_all(self.fleets[fleet], "forget", *tiers)

    def close(self) -> None:
        for members in self.fleets:
            ask_all(members, "close")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path, default=RESULTS)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder, Crew(SCENARIO.processes) as crew:
        store = Path(folder) / "store"
        store.mkdir()
        bench = Bench(crew, Path(folder), store)
        rows = [row for tokens in TOKENS for row in measured(bench, tokens, chosen.rounds)]
        bench.close()
    print(f"wrote {write('peer', rows, chosen.out)}")


def measured(bench: Bench, tokens: int, rounds: int) -> list[dict[str, object]]:
    """A row for each case: how long until the prefix is on the device, or was computed."""
    samples = [bench.round(tokens) for _ in range(rounds + 1)][1:]
    component = SCENARIO.component
    mib = tokens * component.layers * component.kv * component.heads * component.row_bytes / 2**20
    computed = Spread.of([each[RECOMPUTE][1] for each in samples]).median
    rows: list[dict[str, object]] = []
    for case in (PEER, EQUAL, HOST, STORAGE, RECOMPUTE):
        spread = Spread.of([each[case][int(case == RECOMPUTE)] for each in samples])
        rows.append(
            {
                "tokens": tokens,
                "mib": round(mib, 1),
                "what": case,
                "median_ms": round(spread.median * 1e3, 1),
                "p10_ms": round(spread.low * 1e3, 1),
                "p90_ms": round(spread.high * 1e3, 1),
                "of_recompute": round(spread.median / computed, 3),
            }
        )
        print(f"{tokens:6,} tokens  {case:45} {spread.median * 1e3:9.1f} ms  {spread.median / computed:7.3f}")
    return rows


if __name__ == "__main__":
    main()
