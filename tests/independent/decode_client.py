"""A decode engine of one rank, written from docs/protocol.md alone: the standard library, NIXL and msgpack."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import math
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import count, groupby, product
from types import SimpleNamespace
from typing import Any

import msgpack
from nixl._api import nixl_agent, nixl_agent_config

ARENA_BYTES, CHUNK_BYTES, LEASE_US, RESEND_S, DEADLINE_S = 1 << 17, 1 << 15, 5_000_000, 0.5, 30.0
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}  # others: 1
AXES, DEFAULTS = ["page", "layer", "kv", "head", "token", "dim"], {"window": None, "states": 0, "row_tokens": 1}


class Leg:
    """The layers, heads and positions that a rank sends of tokens [start, stop) to an engine of one rank."""

    def __init__(self, rank: int, fleet: dict, c: dict, start: int, stop: int) -> None:
        tp, cp, rows = fleet["tp"], fleet["cp"], fleet["page_tokens"] // c["row_tokens"]
        size = 1 if c["states"] else dict(fleet["pages"]).get(c["name"], rows)
        stage, place, column = rank // (tp * cp), rank // tp % cp, rank % tp
        cuts = ((c["layers"], fleet["pp"], stage), (c["heads"], tp, column))
        self.layers, self.heads = (range(r * n // of, max(r * n // of + 1, (r + 1) * n // of)) for n, of, r in cuts)
        wanted = range(max(start, stop - (c["window"] or stop)) // c["row_tokens"], stop // c["row_tokens"])
        wanted = range(c["states"] if start < stop else 0) if c["states"] else wanted
        parts, pages, h = 1 if c["states"] else cp, -(-wanted.stop // size), min(c["heads"], tp)
        mine, width = place % parts, 1 if parts > 1 and fleet["cp_order"] == "token" else size
        block = range(mine * pages // parts * size, (mine + 1) * pages // parts * size)
        held = block if fleet["cp_order"] == "block" else [p for p in range(pages * size) if p // width % parts == mine]
        dealt = [[p for p in held[k : k + width] if p in wanted] for k in range(0, len(held), width)]
        columns = [other for other in range(tp) if other * h // tp == column * h // tp]
        copies, copy = cp // parts * len(columns), place // parts * len(columns) + column - columns[0]
        dealt = sorted(dealt, key=len, reverse=True)[copy::copies]
        self.positions, self.places = sorted(p for page in dealt for p in page), {p: at for at, p in enumerate(held)}
        self.page, self.kv, self.row_bytes = size, range(c["kv"]), c["dim"] * BYTES.get(c["dtype"], 1)

    def units(self, own_page: int) -> list[list[int]]:
        g = math.gcd(self.page, own_page, *(self.places[p] - p for p in self.positions))
        keys = {p: (p - n, self.places[p] - n, self.places[p] // g) for n, p in enumerate(self.positions)}
        units = (list(unit) for _, unit in groupby(self.positions, key=keys.get))
        return sorted(units, key=lambda unit: (-len(unit), self.places[unit[0]] % g == 0))


def chunks(legs: list[Leg], pools: list[tuple]) -> list[list[tuple]]:
    """The rows of each chunk: where a row begins in it, component, layer, kv, head and position."""
    found, end, last = list[list[tuple]](), CHUNK_BYTES, (0, 0)
    for n, leg in enumerate(legs):
        for unit in leg.units(pools[n][2][4]):
            size = len(unit) * len(leg.layers) * len(leg.heads) * len(leg.kv) * leg.row_bytes
            end = end if (n, len(unit)) == last else -(-end // 16) * 16
            if size > CHUNK_BYTES:
                raise ValueError(f"{size} bytes of a page and rank: more than a region of the arena")
            if end + size > CHUNK_BYTES:
                found, end = [*found, []], 0
            rows = zip(count(end, leg.row_bytes), product(leg.heads, leg.layers, leg.kv, unit))
            found[-1] += [(at, n, layer, kv, head, p) for at, (head, layer, kv, p) in rows]
            end, last = end + size, (n, len(unit))
    return found


class Client:
    def __init__(self, engine: str, model: str, components: list[dict], page: int, pages: int, key: bytes) -> None:
        self.components, self.key, self.generation = [{**DEFAULTS, **c} for c in components], key, time.time_ns()
        self.name, self.numbers, self.stamps = f"{engine}.{self.generation}", defaultdict(count), Counter[str]()
        self.peers, self.seen, self.over = dict[str, dict](), set[tuple[str, bytes]](), dict[int, str]()
        self.free, self.about, self.sources = [*range(0, ARENA_BYTES, CHUNK_BYTES)], {}, dict[str, Any]()
        self.pools, self.fields = [], {"name": model, "components": ", ".join(c["name"] for c in components)}
        fleet = {"tp": 1, "pp": 1, "cp": 1, "page_tokens": page, "cp_order": "page", "pages": []}
        sizes, pools = [ARENA_BYTES, 256], []  # of the arena, of staging memory that no request uses, and of the pools
        for c in self.components:
            own = Leg(0, fleet, c, 0, 0)
            shape = [pages, c["layers"], c["kv"], c["heads"], own.page, c["dim"]]
            layout = {"axes": AXES, "shape": shape, "stride": [math.prod(shape[k + 1 :]) for k in range(6)]}
            pools.append({"component": c, "layout": layout})
            self.pools.append((sum(sizes), own.row_bytes, shape))
            sizes.append(math.prod(shape[:5]) * own.row_bytes)
        self.fields |= {f"{c['name']}.{key}": str(c[key]) for c in components for key in c if key != "name"}
        self.memory = ctypes.create_string_buffer(sum(sizes))
        self.base = ctypes.addressof(self.memory)
        self.agent: Any = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(self.base, sum(sizes), 0, "")], "DRAM")
        wire = {"backend": "nixl", "name": self.name, "generation": str(self.generation), "revision": 1}
        wire |= {"registrations": [["DRAM", self.base, sum(sizes), 0, 1]], "agent": self.agent.get_agent_metadata()}
        packed, at = msgpack.packb(wire), [self.base + sum(sizes[:n]) for n in range(len(sizes))]
        wire = msgpack.packb(["kvmover.transport/1", len(packed), hashlib.sha256(packed).digest(), packed])
        spans = [{"kind": "DRAM", "address": at[n], "nbytes": size, "device": 0} for n, size in enumerate(sizes)]
        body = {"arena": spans[0], "staging": spans[1], "allocations": [[span] for span in spans[2:]], "pools": pools}
        place = {"engine": engine, "fleet": fleet, "rank": 0, "generation": self.generation}
        body = msgpack.packb(body | {"place": place, "transport": wire})
        self.card = msgpack.packb({"speaks": [1, 1], "fields": self.fields, "model": model, "body": body})

    def seal(self, number: bytes, *parts: bytes) -> bytes:
        whole = b"".join(struct.pack(">Q", len(part)) + part for part in parts)
        return (b"kvs\x01" + number + hmac.digest(self.key, whole, "sha256") if self.key else b"") + parts[-1]

    def connect(self, card: bytes) -> None:
        text = card[44:] if self.key else card
        said = msgpack.unpackb(text) if card == self.seal(bytes(8), b"kvmover card", text) else {"fields": {}}
        if said["fields"] != self.fields or said["speaks"][0] > 1:
            raise ConnectionRefusedError("not sealed with this key, or of another model or version")
        body = msgpack.unpackb(said["body"])
        name = self.agent.add_remote_agent(msgpack.unpackb(msgpack.unpackb(body["transport"])[3])["agent"]).decode()
        self.peers[name], self.sources = body["place"], {name: SimpleNamespace(regions={})}
        self.until(lambda s: name in self.stamps, "Hello", card=self.card)

    def fetch(self, request: str, engine: str, start: int, stop: int, tables: list[list[int]], route: str) -> None:
        """Bring tokens [start, stop) into pages. Raises OSError: then the pages are not whole."""
        self.generation, self.tables, self.sources = max(self.generation + 1, time.time_ns()), tables, {}
        self.about, self.is_packed = {"request": request, "generation": self.generation}, route == "packed"
        pages = [] if self.is_packed else [struct.pack(f"<{len(table)}i", *table) for table in tables]
        want = {"start": start, "stop": stop, "route": route, "replicas": "stripe", "chunk_bytes": CHUNK_BYTES}
        for name, at in self.peers.items():
            if at["engine"] == engine:
                rows = chunks([Leg(at["rank"], at["fleet"], c, start, stop) for c in self.components], self.pools)
                regions = {} if self.is_packed else dict.fromkeys(range(len(rows)), 0)
                self.sources[name] = SimpleNamespace(rows=rows, regions=regions, ready=set(), landed=set(), heard=set())
        try:
            self.until(lambda s: len(s.landed) == len(s.rows), "Want", pages=pages, **want)
            self.until(lambda s: s.rows or "Kept" in s.heard, "Done")
            self.over[self.generation] = "Done"
        except (OSError, LookupError) as error:
            self.over[self.generation] = "Abort"
            self.until(lambda s: "Drained" in s.heard, "Abort", reason=str(error))
            self.free += [region for s in self.sources.values() for region in s.regions.values() if self.is_packed]
            raise

    def until(self, is_over: Callable[[Any], bool], kind: str, **fields: object) -> None:
        """Say a message to all sources, and again to those of which something is not so yet."""
        due, waiting, deadline = 0.0, [*self.sources], time.monotonic() + DEADLINE_S
        while waiting:
            if (now := time.monotonic()) > deadline:
                raise TimeoutError(f"{waiting}: no answer to {kind}")
            for name in waiting if now > due else []:
                if kind != "Want" or "Noted" not in self.sources[name].heard:
                    self.say(name, kind, **self.about, **fields)
                self.grant(name, self.sources[name].regions if kind == "Want" and due else {})
            due = now + RESEND_S if now > due else due
            self.poll()
            time.sleep(1e-4)
            waiting = [name for name, s in self.sources.items() if not is_over(s)]

    def say(self, name: str, kind: str, **fields: object) -> None:
        number, lease = struct.pack(">Q", next(self.numbers[name])), [1, self.stamps[name], LEASE_US]
        text = b"kvm\x01%b" % msgpack.packb({"type": kind, "lease": lease if lease[1] else [1, 0, 0], **fields})
        parts = (b"kvmover message", self.name.encode(), name.encode(), number, text)
        self.agent.send_notif(name, self.seal(number, *parts))

    def poll(self) -> None:
        for name, notes in self.agent.get_new_notifs().items():
            for note in notes if name in self.peers else []:
                number, text = note[4:12], note[44:] if self.key else note
                whole = self.seal(number, b"kvmover message", name.encode(), self.name.encode(), number, text)
                if not self.key or ((name, number) not in self.seen and hmac.compare_digest(note, whole)):
                    self.seen.add((name, number))
                    said = msgpack.unpackb(text[4:])
                    for m in said if isinstance(said, list) else [said]:
                        self.hear(name, m)

    def hear(self, name: str, m: dict) -> None:
        kind, generation = m["type"], m.get("generation", -1)
        self.stamps[name] = max(self.stamps[name], m.get("stamp_us", 0))
        if kind in ("Hello", "Ping"):
            self.say(name, "Pong")
        elif generation in self.over and kind not in ("Kept", "Drained"):
            self.say(name, self.over[generation], request=m["request"], generation=generation, reason="it has ended")
        elif kind == "NoSeat" or (generation == self.generation and kind == "Abort"):
            raise ConnectionAbortedError(m["reason"])
        elif generation == self.generation and (s := self.sources.get(name)):
            s.heard.add(kind)
            s.ready |= (offered := {n for first, stop in m.get("ready", []) for n in range(first, stop)})
            self.grant(name, offered - s.landed)
            if kind == "Chunk" and m["chunk"] not in s.landed:
                self.land(s, m["chunk"])

    def grant(self, name: str, chunks: Iterable[int]) -> None:
        s = self.sources[name]
        s.regions |= {n: self.free.pop() for n in sorted({*chunks} - s.regions.keys())[: len(self.free)]}
        if grants := [[n, s.regions[n], 0] for n in chunks if n in s.regions]:
            self.say(name, "Granted", **self.about, grants=grants)

    def land(self, s: Any, chunk: int) -> None:
        for offset, n, layer, kv, head, p in s.rows[chunk] if self.is_packed else []:
            pool, size, (_, layers, kvs, heads, page, _) = self.pools[n]
            at = (((self.tables[n][p // page] * layers + layer) * kvs + kv) * heads + head) * page + p % page
            ctypes.memmove(self.base + pool + at * size, self.base + s.regions[chunk] + offset, size)
        s.landed.add(chunk)
        self.free += [s.regions.pop(chunk)] * self.is_packed
        for name, other in self.sources.items():
            self.grant(name, other.ready - other.landed - other.regions.keys())
