"""The vocabulary: every noun of kvmover in a sentence, with the equation that defines it. Read this first.

The page is one story, which the tests run: a cache of 8 heads moves from two ranks to one, and is kept. Every noun is
imported from `kvmover` itself; `NOUNS` says which package is its home.

    >>> from kvmover import *

Where things lie
----------------

Span: numbers at equal distances. Two Spans intersect in one Span.

    >>> Span(start=0, count=8, step=3) & Span(start=1, count=9, step=2) == Span(start=3, count=3, step=6)
    True

Stripe: runs of consecutive tokens at equal distances. Two Stripes intersect in a few Stripes.

    >>> Stripe(start=0, count=3, step=64, width=16) & Stripe(start=8, count=1, step=64, width=64)
    (Stripe(start=8, count=1, step=8, width=8), Stripe(start=64, count=1, step=8, width=8))

Layout: the strides of six named axes over one allocation, in elements. A box of it lies in so many contiguous runs, as
many as a NIC needs descriptors.

    >>> nhd = Layout.dense("NHD", layer=2, kv=2, page=4, token=16, head=8, dim=64)
    >>> nhd.slice("head", Span(2, 4)).runs() == (4 * 64, 2 * 2 * 4 * 16)
    True

Component: one family of cache tensors of a model, `layer x kv x head x position x dim`. A model is a list of them.

    >>> kv = Component.attention(layers=2, kv_heads=8, head_dim=64, dtype="bfloat16")
    >>> kv.token_bytes == kv.layers * kv.kv * kv.heads * kv.dim * 2
    True

Fleet: the ranks of one engine, a grid of TP x PP x CP with one page size.

    >>> src, dst = Fleet(tp=2, page_tokens=16), Fleet(tp=1, page_tokens=64)
    >>> src.size == src.tp * src.pp * src.cp
    True

Shard: the part of a component that one rank holds: a Span of layers, a Span of heads, a Stripe of positions.

    >>> [list(src.shard(kv, rank, tokens=64).heads) for rank in range(src.size)]
    [[0, 1, 2, 3], [4, 5, 6, 7]]

Pool: the pages of a component on one rank, a Layout over tensors that the engine owns. In the plane of a layer and K or
V an element lies at `page * S_page + token * S_token + head * S_head + dim`.

    >>> pools = [Pool.zeros(PoolSpec.dense(kv, src.shard(kv, rank, 64), 4, 16, "NHD")) for rank in range(src.size)]
    >>> stride_of = pools[0].spec.layout.stride_of
    >>> pools[0].plane(layer=1, kv=0).stride() == tuple(map(stride_of, ("page", "token", "head", "dim")))
    True

Plans and transfers
-------------------

Plan: all Legs between two Fleets. They tile the destination: exactly one of them writes an element.

    >>> plan = Plan(kv, src, dst, start=0, stop=64)
    >>> boxes = [(leg.layers, leg.heads, stripe) for leg in plan.legs_into(0) for stripe in leg.positions]
    >>> written = [(layer, head, at) for box in boxes for layer in box[0] for head in box[1] for at in box[2]]
    >>> len(written) == len(set(written)) == kv.layers * kv.heads * 64
    True

Leg: the part of a request that one rank sends to one rank: the intersection of two Shards.

    >>> leg = plan.leg(src_rank=1, dst_rank=0)
    >>> leg.heads == plan.src_shard(1).heads & plan.dst_shard(0).heads
    True

Route: how the bytes of a Leg travel: direct, one descriptor a run, or packed: gathered, written, scattered, or mapped:
copied from pool to pool. The cheapest one is chosen, and all give the same bytes.

    >>> from kvmover.plan import RDMA
    >>> [RDMA.choose(nbytes=1 << 20, runs=runs).route.value for runs in (16, 2048)]
    ['direct', 'packed']

Region: a box of rows, `planes x units x heads x tokens`, strided at both ends. Every copy is a list of Regions.

    >>> import numpy, torch
    >>> from kvmover.kernels.reference import move
    >>> from kvmover.kernels.region import Side
    >>> memory, zero, units = torch.arange(8, dtype=torch.uint8), numpy.array([0]), numpy.array([0, 1])
    >>> even = Side.of((memory,), zero, zero, units * 2, head_bytes=0, token_bytes=0)
    >>> back = Side.of((memory,), zero, zero + 6, units, head_bytes=0, token_bytes=0)
    >>> move([Region(even, back, heads=1, tokens=1, row_bytes=1)])
    >>> memory.tolist()
    [0, 1, 2, 3, 4, 5, 0, 2]

How it gets there
-----------------

Transport: writes and reads the registered memory of a peer. A note arrives after the bytes of the write it came with.

    >>> from kvmover.transport import memory_of, whole
    >>> network, mine, yours = LoopbackNetwork(), torch.tensor([1, 2]), torch.tensor([0, 0])
    >>> me, you = LoopbackTransport(network, "me"), LoopbackTransport(network, "you")
    >>> me.register(memory_of(mine)), you.register(memory_of(yours))
    (None, None)
    >>> peer = me.connect(you.metadata())
    >>> ticket = me.write(peer, whole(memory_of(mine)), whole(memory_of(yours)), note=b"done", deadline_s=1.0)
    >>> [note.payload for note in you.poll()], yours.tolist()
    ([b'done'], [1, 2])

Transfer: one request on one rank. Its pages are the engine's again when it has `ended` and is not `held`.

    >>> pools.append(Pool.zeros(PoolSpec.dense(kv, dst.shard(kv, 0, 64), 4, 64, "HND")))
    >>> places = [Place("prefill", src, 0), Place("prefill", src, 1), Place("decode", dst, 0)]
    >>> model, config = Model("tiny", (kv,)), MoverConfig(arena_bytes=1 << 20)
    >>> wires = [LoopbackTransport(network, f"{at.engine}-{at.rank}") for at in places]
    >>> movers = [Mover(wire, model, at, [pool], config) for wire, at, pool in zip(wires, places, pools)]
    >>> peers = [movers[2].connect(mover.card) for mover in movers[:2]]
    >>> pools[1].plane(layer=1, kv=0)[2, 3, 1, 5] = 7.0
    >>> sent = [mover.send("request", pages=[[2, 0, 3, 1]]) for mover in movers[:2]]
    >>> received = movers[2].receive("request", "prefill", range(64), pages=[[3]])
    >>> while not received.ended:
    ...     events = [mover.poll() for mover in movers]
    >>> received.landed().nbytes == 64 * kv.token_bytes, received.quarantined
    (True, False)
    >>> pools[2].plane(layer=1, kv=0)[3, 3, 5, 5].item()
    7.0

Trees and stores
----------------

PrefixTree: which pages hold which tokens. A match is the longest prefix of whole pages that was inserted.

    >>> tree, prompt = PrefixTree(page_tokens=16), list(range(64))
    >>> given_back = tree.insert(prompt, [2, 0, 3, 1])
    >>> match = tree.match(prompt[:40])
    >>> match.tokens == 40 // 16 * 16, match.page_ids.tolist()
    (True, [2, 0])

PageStore: pages as objects in files, each named by a hash of its tokens and all before them. A fleet of any shape reads
the pages of any other.

    >>> import pathlib, tempfile
    >>> from kvmover.store import Namespace, PagePart
    >>> space, folder = Namespace("tiny", "revision-1", page_tokens=64), tempfile.TemporaryDirectory()
    >>> page, other, packed = bytes(32), bytes([1] * 32), torch.zeros(64 * kv.token_bytes, dtype=torch.uint8)
    >>> with PageStore.open(pathlib.Path(folder.name), space) as store:
    ...     store.register(memory_of(packed))
    ...     whole_page, half_page = (PagePart.of(kv, fleet.shard(kv, 0, 64), 64) for fleet in (dst, src))
    ...     put = store.view(space, whole_page).put([page], [packed.data_ptr()])
    ...     store.view(space, half_page).exists([page, other])
    [True, False]
    >>> folder.cleanup()

Ledger: the account of every prompt token, `prompt = device + host + storage + peer + computed + abandoned`.

    >>> from kvmover.cache.ledger import Credit
    >>> ledger = Ledger()
    >>> ledger.matched("request", prompt_tokens=64, reusable_tokens=32, now_s=0.0)
    >>> ledger.admitted("request", Credit(device_tokens=32))
    >>> ledger.computed("request", 32)
    >>> account = ledger.finished("request", now_s=1.0)
    >>> account.prompt_tokens == account.credited_tokens + account.computed_tokens + account.abandoned_tokens
    True
"""

from __future__ import annotations

#: The axes of an order. `token` is a position inside a page, `kv` is 0 for K and 1 for V.
AXES = ("layer", "kv", "page", "head", "token", "dim")

#: Names that the field uses for two of the 720 orders, outermost axis first.
ORDERS = {"NHD": "layer kv page token head dim", "HND": "layer kv page head token dim"}

#: The order on the wire and in the store: a page is one contiguous object, and so is any range of its heads.
PACKED_ORDER = "page head layer kv token dim"
#: The same as axes, outermost first.
PACKED_AXES = tuple(PACKED_ORDER.split())

#: The nouns of this page, by the package that defines them.
NOUNS = {
    "kvmover.layout": ("Span", "Stripe", "Layout", "Component", "Fleet", "Shard", "Pool"),
    "kvmover.plan": ("Plan", "Leg", "Route"),
    "kvmover.kernels.region": ("Region",),
    "kvmover.transport": ("Transport",),
    "kvmover.transfer": ("Transfer",),
    "kvmover.cache.prefix": ("PrefixTree",),
    "kvmover.store": ("PageStore",),
    "kvmover.cache.ledger": ("Ledger",),
}

#: Companions of the nouns for moving a request, by package.
COMPANIONS = {
    "kvmover.layout": ("CpOrder", "PoolSpec"),
    "kvmover.plan": ("Costs", "Replicas"),
    "kvmover.transport": ("LoopbackNetwork", "LoopbackTransport", "NixlTransport"),
    "kvmover.transfer": ("Gate", "Model", "Mover", "MoverConfig", "Place", "Result"),
}

#: The package of every name that `kvmover` exports.
HOME = {name: home for homes in (NOUNS, COMPANIONS) for home, names in homes.items() for name in names}
