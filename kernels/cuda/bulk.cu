// The bulk mover: runs and boxes through a ring in shared memory by cp.async.bulk, on as few SMs as the grid has blocks.
//
// Two warps a block: one issues global -> shared, the other shared -> global, and neither holds a byte in registers.
// Every lane of a warp issues the copy of one piece, because to work out its address takes longer than to issue it.
// The ring holds STAGES items of STAGE_BYTES: what is in flight on an SM is the ring, not the registers of its threads.
// experimental.py compiles this with -DSTAGES -DSTAGE_BYTES -DLAG, and with the places of the words of its table by name.
// An item is PER_ITEM pieces, what one stage holds; a run longer than a stage is PIECES pieces. Pieces are counted in the
// order unit, head, plane, token, piece.
// A piece is a run, or a box: rows at a pitch, which one tensor copy takes by the map of their plane. A box lies in a
// stage without gaps, so it is a run for a side whose rows follow each other. Of a side that is MAPPED, 1 the source and
// 2 the destination, addresses are coordinates: the row of the map in the upper 32 bits, the word of it in the lower.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

struct Piece {
    i64 address;
    i64 map;    // where in the table the map is that `address` counts in; 0: none, it is an address
    u32 bytes;  // 0: this lane has none
};

static const u32 MAP_WORDS = 16;

#ifndef __CUDACC__
#define __device__
#endif

// The piece that `lane` copies of `item`, on the side whose words start at `side`.
static inline __device__ Piece locate(const i64* table, const i64* region, u32 item, u32 lane, int side)
{
    const u32 per_item = (u32)region[PER_ITEM];
    const u32 number = (item - (u32)region[FIRST_TILE]) * per_item + lane;
    if (lane >= per_item || number >= (u32)region[COUNT]) return Piece{0, 0, 0};
    const u32 pieces = (u32)region[PIECES], tokens = (u32)region[TOKENS];
    const u32 planes = (u32)region[PLANES], heads = (u32)region[HEADS];
    u32 rest = number / pieces;
    const i64 inside = (i64)(number - rest * pieces) * region[PIECE_BYTES];
    const u32 token = rest % tokens;
    rest /= tokens;
    const u32 plane = rest % planes;
    rest /= planes;
    const u32 head = rest % heads, unit = rest / heads;
    const i64* at = region + side;
    const i64 start = table[at[LIST] + unit] + head * at[HEAD_STRIDE] + token * at[TOKEN_STRIDE] + inside;
    const i64 left = region[RUN_BYTES] - inside;
    const u32 bytes = (u32)(left < region[PIECE_BYTES] ? left : region[PIECE_BYTES]);
    if (region[MAPPED] & (side == SRC ? 1 : 2)) return Piece{start, at[ADDRESSES] + plane * MAP_WORDS, bytes};
    return Piece{start + table[at[ADDRESSES] + plane], 0, bytes};
}

#ifdef __CUDACC__

__device__ u32 shared_address(const void* pointer)
{
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ void barrier_init(u32 barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ void barrier_arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void barrier_expect(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity is over. Of a new barrier, the phase before the first has parity 1 and is over.
__device__ void barrier_wait(u32 barrier, u32 parity)
{
    u32 over;
    do {
        asm volatile(
            "{\n\t.reg .pred p;\n\t"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!over);
}

__device__ void load_box(u32 stage, const i64* map, i64 at, u32 barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            stage),
        "l"(map), "r"((u32)at), "r"((u32)(at >> 32)), "r"(barrier)
        : "memory");
}

__device__ void store_box(const i64* map, i64 at, u32 stage)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"((u32)at), "r"((u32)(at >> 32)), "r"(stage)
                 : "memory");
}

__device__ void load(u32 stage, const Piece& piece, u32 barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
                 "l"(piece.address), "r"(piece.bytes), "r"(barrier)
                 : "memory");
}

__device__ void store(const Piece& piece, u32 stage)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(piece.address), "r"(stage),
                 "r"(piece.bytes)
                 : "memory");
}

// A place in the ring and the parity of its current round.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

extern __shared__ __align__(128) unsigned char ring[];

__device__ void load_all(const i64* table, u32 items, u32 full, u32 empty)
{
    const u32 lane = threadIdx.x % 32, base = shared_address(ring);
    const i64* region = table;
    Turn turn;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x, turn.next()) {
        while (item >= (u32)region[END]) region += WORDS;
        const Piece piece = locate(table, region, item, lane, SRC);
        const u32 bytes = __reduce_add_sync(~0u, piece.bytes);
        const u32 barrier = full + 8 * turn.stage;
        barrier_wait(empty + 8 * turn.stage, turn.parity ^ 1);
        if (lane == 0) barrier_expect(barrier, bytes);
        __syncwarp();  // no byte may arrive before the barrier expects it
        const u32 place = base + turn.stage * STAGE_BYTES + lane * (u32)region[PIECE_BYTES];
        if (piece.map)
            load_box(place, table + piece.map, piece.address, barrier);
        else if (piece.bytes)
            load(place, piece, barrier);
    }
}

__device__ void store_all(const i64* table, u32 items, u32 full, u32 empty)
{
    const u32 lane = threadIdx.x % 32, base = shared_address(ring);
    const i64* region = table;
    Turn turn, done;
    u32 stored = 0;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x, turn.next()) {
        while (item >= (u32)region[END]) region += WORDS;
        const Piece piece = locate(table, region, item, lane, DST);
        barrier_wait(full + 8 * turn.stage, turn.parity);
        const u32 place = base + turn.stage * STAGE_BYTES + lane * (u32)region[PIECE_BYTES];
        if (piece.map)
            store_box(table + piece.map, piece.address, place);
        else if (piece.bytes)
            store(piece, place);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        // All but the latest LAG items have been read out of the ring: the one before them may be loaded over.
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
        __syncwarp();  // every lane has its own groups
        if (stored++ >= LAG) {
            if (lane == 0) barrier_arrive(empty + 8 * done.stage);
            done.next();
        }
    }
    // The ring must outlive its readers, and the bytes must be written when the kernel ends.
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Maps came with the table, by a copy: what this SM knows of others that lay at their addresses is void.
__device__ void acquire_maps(const i64* table, u32 items)
{
    for (const i64* region = table;; region += WORDS) {
        const i64* sides[] = {region + SRC, region + DST};
        for (int i = 0; i < 2; ++i)
            if (region[MAPPED] >> i & 1)
                for (u32 plane = threadIdx.x; plane < (u32)region[PLANES]; plane += blockDim.x)
                    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(
                                     table + sides[i][ADDRESSES] + plane * MAP_WORDS)
                                 : "memory");
        if ((u32)region[END] >= items) return;
    }
}

// `table` int64 on the device, at a multiple of 64 bytes. One block an SM of the budget: the ring leaves no room for a second.
extern "C" __global__ void __launch_bounds__(64, 1) bulk_move(const i64* __restrict__ table, u32 items)
{
    static_assert(LAG < STAGES, "a store waits for a stage that is loaded after it");
    static_assert(STAGE_BYTES % 128 == 0 && STAGE_BYTES < (1 << 20), "what a barrier can expect");
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < 2 * STAGES; ++stage) barrier_init(full + 8 * stage);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    acquire_maps(table, items);
    __syncthreads();
    if (threadIdx.x < 32)
        load_all(table, items, full, empty);
    else
        store_all(table, items, full, empty);
}

#endif
