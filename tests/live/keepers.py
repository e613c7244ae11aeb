"""A keeper beside live engines, whom it does not belong to, and what is asked of one that is killed and comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmover.store import stat_stores
from tests.live.answers import Answer, many, prompts_of
from tests.live.server import Server

_START_S = 60.0
_CAPACITY = "256MiB"

Ask = Callable[[Server, Sequence[int], int], Answer]


@dataclass(frozen=True, slots=True)
class LiveKeeper:
    """One that serves a socket."""

    path: Path

    def location(self, generation: int) -> str:
        """Where a generation of the one fleet of a test finds its pages."""
        return f"keeper://{self.path}?fleet=live&generation={generation}"

    def pages(self) -> int:
        """How many pages have been committed, of all namespaces."""
        return sum(row.stat.pages for row in stat_stores(f"keeper://{self.path}", None))


@contextmanager
def live_keeper(folder: Path) -> Iterator[LiveKeeper]:
    """Serves until the end of the block."""
    path = folder / "keeper.sock"
    command = [sys.executable, "-m", "kvmover", "keeper", "--socket", str(path), "--bytes", _CAPACITY]
    process = subprocess.Popen(command)
    try:
        stop = time.monotonic() + _START_S
        while not path.exists():
            assert process.poll() is None, "the keeper has ended"
            assert time.monotonic() < stop, "the keeper does not serve"
            time.sleep(0.05)
        yield LiveKeeper(path)
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions of some turns: `asked` has the first one, and `open_` prompts are under way when the engine dies."""

    asked: Sequence[Sequence[int]]
    open_: Sequence[Sequence[int]]

    @classmethod
    def some(cls) -> Sessions:
        return cls(prompts_of(20, seed=45, least_tokens=100, most_tokens=900), prompts_of(4, seed=46, least_tokens=300))

    def second_turns(self, plain: Server, ask: Ask) -> list[list[int]]:
        """What goes on where the first turns ended, as a plain server says; of the open ones, where they may be."""
        prompts, tokens = [*self.asked, *self.open_], [16] * len(self.asked) + [128] * len(self.open_)
        answers = many(lambda each: ask(plain, *each), list(zip(prompts, tokens, strict=True)))
        return [[*prompt, *answer.tokens, 7] for prompt, answer in zip(prompts, answers, strict=True)]

    def killed_in_the_middle(self, server: Server, ask: Ask, is_busy: Callable[[], object], keeper: LiveKeeper) -> int:
        """Kill it while it answers the open ones; the pages that the keeper has then."""
        with ThreadPoolExecutor(len(self.open_)) as pool:
            open_ = [pool.submit(ask, server, prompt, 800) for prompt in self.open_]
            while not is_busy():
                time.sleep(0.05)
            time.sleep(0.5)
            server.kill()
            assert not any(each.result().ok for each in open_), "it was killed in mid-request"
        return keeper.pages()
