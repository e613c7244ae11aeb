"""The conformance kit at work: a small sound store passes whole, and each of its mutants is caught by a named check."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvmover.tools.conformance import Identity, StoreConformance

HEAD = 32


class Sound:
    """A file for each part of a page, named by all that it depends on, with a digest, published by renaming."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        part = identity.part()
        assert part is not None
        self.folder, self.identity, self.part, self.size = folder, identity, part, part.nbytes

    def names(self) -> list[object]:
        """All that the bytes under a page's hash depend on."""
        me = self.identity
        return [me.model, me.weights, me.tenant, me.component, me.page_tokens, self.part.box]

    def path(self, page: bytes) -> Path:
        return self.folder / f"{page.hex()}-{hashlib.sha256(repr(self.names()).encode()).hexdigest()[:16]}.page"

    def digest(self, payload: bytes) -> bytes:
        return hashlib.sha256(payload).digest()

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        there = self.exists(pages)
        return [
            known or self.publishes(self.path(page), self.digest(payload) + payload)
            for page, payload, known in zip(pages, payloads, there, strict=True)
        ]

    def publishes(self, path: Path, content: bytes) -> bool:
        try:
            self.publish(path, content)
        except OSError:
            return False
        return True

    def publish(self, path: Path, content: bytes) -> None:
        fresh = path.with_name(f"{uuid.uuid4().hex}.tmp")
        fresh.write_bytes(content)
        fresh.replace(path)

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        return [self.one(page) for page in pages]

    def one(self, page: bytes) -> bytes | None:
        try:
            content = self.path(page).read_bytes()
        except OSError:
            return None
        if self.is_right(content):
            return content[HEAD:]
        self.bad(page)
        return None

    def is_right(self, content: bytes) -> bool:
        return len(content) == HEAD + self.size and self.digest(content[HEAD:]) == content[:HEAD]

    def bad(self, page: bytes) -> None:
        self.path(page).unlink(missing_ok=True)

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [self.held_bytes(page) == HEAD + self.size for page in pages]

    def held_bytes(self, page: bytes) -> int:
        try:
            return self.path(page).stat().st_size
        except FileNotFoundError:
            return 0

    def flush(self) -> None: ...

    def clean(self) -> None:
        for path in sorted(self.folder.glob("*.page"))[::2]:
            path.unlink(missing_ok=True)

    def close(self) -> None: ...


class WrongHash(Sound):
    """A page's bytes under its neighbour's hash, digest and all."""

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        return super().get([*pages[1:], *pages[:1]])


class ForgetsModel(Sound):
    def names(self) -> list[object]:
        return super().names()[1:]


class ForgetsWeights(Sound):
    def names(self) -> list[object]:
        model, _, *rest = super().names()
        return [model, *rest]


class ForgetsTenant(Sound):
    def names(self) -> list[object]:
        return [*super().names()[:2], *super().names()[3:]]


class ForgetsDtype(Sound):
    """sglang#33268: pages of float8 under the key of bfloat16 pages half as wide. Size counts, and nothing else."""

    def names(self) -> list[object]:
        return [*super().names()[:3], self.size, str(self.part.box.heads), str(self.part.box.layers)]


class ForgetsLayout(Sound):
    """vllm#55191: K and V beside each other, or in one row twice as wide: as many bytes."""

    def names(self) -> list[object]:
        component = self.identity.component
        named = component.dtype, component.layers, component.heads, component.kv * component.dim
        return [*super().names()[:3], *named, *super().names()[4:]]


class ForgetsPageSize(Sound):
    """Half as many tokens, twice as wide."""

    def names(self) -> list[object]:
        component, page_tokens = self.identity.component, self.identity.page_tokens
        named = component.dtype, component.layers, component.heads, component.kv, component.dim * page_tokens
        return [*super().names()[:3], *named, self.part.box.heads, self.part.box.layers]


class ForgetsRank(Sound):
    """sglang#10969: all ranks under one key."""

    parts: tuple[str, ...] = ()

    def names(self) -> list[object]:
        at = self.identity.fleet.coordinate(self.identity.rank)
        return [*super().names()[:-1], [getattr(at, part) for part in self.parts]]


class ForgetsTp(ForgetsRank):
    parts = ("pp", "cp")


class ForgetsPp(ForgetsRank):
    """sglang#24794."""

    parts = ("tp", "cp")


class ForgetsCp(ForgetsRank):
    """sglang#22782."""

    parts = ("tp", "pp")


class CountsAnyRank(Sound):
    """A page is there if anybody has written a part of it."""

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [any(self.folder.glob(f"{page.hex()}-*.page")) for page in pages]


class BelievesStat(Sound):
    """There if the file is, whatever its size."""

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [self.path(page).is_file() for page in pages]


class ChecksNothing(Sound):
    def is_right(self, content: bytes) -> bool:
        return True


class ChecksLengthAlone(Sound):
    def is_right(self, content: bytes) -> bool:
        return len(content) == HEAD + self.size


class CutsTokensUnchecked(Sound):
    """A rank of every other token takes them out of a whole page, whose digest is of all of it."""

    whole = Identity().part()

    def names(self) -> list[object]:
        return [*super().names()[:-1], self.whole and self.whole.box]

    def one(self, page: bytes) -> bytes | None:
        if self.part == self.whole:
            return super().one(page)
        part, whole = self.part, self.whole
        assert whole is not None
        rows = self.path(page).read_bytes()[HEAD:]
        shape = (part.box.cells, part.component.kv, whole.box.tokens.tokens, part.row_bytes)
        return np.frombuffer(rows, np.uint8).reshape(shape)[:, :, list(part.box.tokens)].tobytes()

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        assert self.whole is not None
        return [self.held_bytes(page) == HEAD + self.whole.nbytes for page in pages]


class KeepsPoison(Sound):
    """A bad page stays, and the next write takes it for one that is there."""

    def bad(self, page: bytes) -> None: ...


class AllOrNothing(Sound):
    """One missing page fails its batch."""

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        got = super().get(pages)
        return got if all(got) else [None] * len(got)


class StopsAtTheFirst(Sound):
    """As many answers as there were before something went wrong: other ranks wait for the rest for ever."""

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        got = super().get(pages)
        return got[: got.index(None)] if None in got else got


class EveryReplicaWrites(Sound):
    """sglang#24376."""

    def names(self) -> list[object]:
        return [*super().names(), self.identity.rank]


class StoresWholeBatches(Sound):
    """sglang#16946: what was written as one operation is found by the end of it, or not at all."""

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        return super().get(pages) if all(self.exists(pages)) and len(pages) in (0, 12) else [None] * len(pages)

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return super().exists(pages) if len(pages) in (0, 12) else [False] * len(pages)


class CleansUnderReaders(Sound):
    """A slab whose freed places are used again at once, unchecked: a reader finds another page there."""

    cleaned = threading.Event()

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        answers = super().put(pages, payloads)
        self.cleaned.clear()
        self.cleaned.wait(20)
        return answers

    def is_right(self, content: bytes) -> bool:
        return True

    def clean(self) -> None:
        paths = sorted(self.folder.glob("*.page"))
        for path, other in zip(paths[::2], paths[1::2], strict=False):
            self.publish(path, other.read_bytes())
        if paths:
            self.cleaned.set()


class KeepsInMemory(Sound):
    """Pages are written at some time after the flush that was to write them."""

    def publish(self, path: Path, content: bytes) -> None:
        vars(self).setdefault("late", []).append((path, content))

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [self.path(page) in dict(vars(self).get("late", [])) or there for page, there in self._there(pages)]

    def _there(self, pages: Sequence[bytes]) -> list[tuple[bytes, bool]]:
        return list(zip(pages, super().exists(pages), strict=True))

    def close(self) -> None:
        for path, content in vars(self).pop("late", []):
            super().publish(path, content)


class FlushesHalf(Sound):
    """A flush that forgets where a file ends: what is behind comes with the next one."""

    def publish(self, path: Path, content: bytes) -> None:
        super().publish(path, content[:100])
        vars(self).setdefault("late", []).append((path, content))
        if len(vars(self)["late"]) >= 12:
            self.close()

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        return [self.path(page).is_file() for page in pages]

    def close(self) -> None:
        for path, content in vars(self).pop("late", []):
            super().publish(path, content)


class TrustsItsLookUp(Sound):
    """Whoever was there at the look-up is there at the read: the place in the slab is another page's by now."""

    def clean(self) -> None:
        paths = sorted(self.folder.glob("*.page"))
        for path, other in zip(paths[::2], paths[1::2], strict=False):
            self.publish(path, other.read_bytes())


class DeletesWhatItCannotRead(Sound):
    """Any error of a read is the page's fault."""

    def one(self, page: bytes) -> bytes | None:
        try:
            self.path(page).read_bytes()
        except OSError:
            self.bad(page)
        return super().one(page)


class RaisesOnAFullDisk(Sound):
    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        for page, payload, known in zip(pages, payloads, self.exists(pages), strict=True):
            if not known:
                try:
                    self.publish(self.path(page), self.digest(payload) + payload)
                except OSError as error:
                    raise AssertionError("a put raised") from error
        return [True] * len(pages)


class TestASoundStore(StoreConformance):
    def open(self, folder: Path, identity: Identity) -> Sound:
        return Sound(folder, identity)


IDENTITY = "test_who_differs_in_anything_never_reads_my_pages"
RANKS = "test_ranks_of_every_kind_keep_their_pages_apart"
CAUGHT = [
    (WrongHash, "test_what_was_written_is_read_after_a_restart"),
    (ForgetsModel, IDENTITY),
    (ForgetsWeights, IDENTITY),
    (ForgetsTenant, IDENTITY),
    (ForgetsDtype, IDENTITY),
    (ForgetsLayout, IDENTITY),
    (ForgetsPageSize, IDENTITY),
    (ForgetsTp, RANKS),
    (ForgetsPp, RANKS),
    (ForgetsCp, RANKS),
    (BelievesStat, "test_a_torn_file_is_no_hit"),
    (BelievesStat, "test_an_empty_file_is_no_hit"),
    (ChecksNothing, "test_a_short_read_fails_alone"),
    (ChecksLengthAlone, "test_damaged_bytes_are_never_served_and_can_be_written_again"),
    (CutsTokensUnchecked, "test_tokens_of_a_damaged_cell_are_never_served"),
    (KeepsPoison, "test_damaged_bytes_are_never_served_and_can_be_written_again"),
    (AllOrNothing, "test_a_missing_page_fails_alone"),
    (StopsAtTheFirst, "test_every_rank_has_as_many_answers_whatever_fails"),
    (EveryReplicaWrites, "test_replicas_write_a_page_once"),
    (StoresWholeBatches, "test_a_batch_may_be_split_while_it_is_written"),
    (CleansUnderReaders, "test_a_cleaner_at_work_costs_hits_but_never_bytes"),
    (KeepsInMemory, "test_what_one_machine_flushed_another_reads"),
    (FlushesHalf, "test_what_was_flushed_outlives_a_power_cut"),
    (TrustsItsLookUp, "test_a_cleaner_on_another_machine_costs_hits_but_never_bytes"),
    (DeletesWhatItCannotRead, "test_a_system_that_fails_now_and_then_costs_nobody_a_page"),
    (RaisesOnAFullDisk, "test_a_disk_that_is_full_raises_nothing_and_spoils_nothing"),
    (CountsAnyRank, "test_a_page_that_lacks_a_rank_is_no_hit_for_who_needs_it"),
]


@pytest.mark.parametrize(("mutant", "check"), CAUGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_mutant_is_caught_by_the_check_that_is_for_it(mutant: type[Sound], check: str, tmp_path: Path) -> None:
    class Conformance(StoreConformance):
        def open(self, folder: Path, identity: Identity) -> Sound:
            return mutant(folder, identity)

    with pytest.raises(AssertionError):
        getattr(Conformance(), check)(tmp_path)


def test_every_check_of_the_kit_has_a_mutant() -> None:
    checks = {name for name in dir(StoreConformance) if name.startswith("test_")}
    assert {check for _, check in CAUGHT} == checks
