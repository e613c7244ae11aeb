// The digest of digest_reference.py: reads the rows of one side of a region and adds the sum of their terms to `out`.
//
// digest_cuda.py compiles this with -DHEAD_BYTES -DHEADS (in a row) -DTOKENS (in a unit) -DITEM_BYTES, what one thread
// reads at once: 16, 4, or 1 where words must be put together from bytes. With these known, finding an item's
// coordinates takes no division. One warp adds once, whatever it has read.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef __CUDACC__
#define __device__
#endif

#define ITEM_WORDS (ITEM_BYTES == 16 ? 4 : 1)
#define HEAD_ITEMS ((HEAD_BYTES + 4 * ITEM_WORDS - 1) / (4 * ITEM_WORDS))

// int64 words that describe a region. The first four are places in the table: of plane addresses and keys, unit offsets
// in bytes and positions.
enum Field { ADDRESSES, KEYS, UNITS, POSITIONS, ITEMS, PLANES, HEAD_STRIDE, TOKEN_STRIDE, STEP, FIRST_HEAD, HEAD_STEP, FIELDS };

static inline __device__ u64 mix64(u64 z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline __device__ u64 term(u32 word, u64 key, u32 number)
{
    const u32 a = (u32)key + number * 0x9E3779B1u;
    const u32 b = (u32)(key >> 32) + number * 0x85EBCA77u;
    const u64 product = (u64)a * b;
    const u32 odd = ((u32)product ^ (u32)(product >> 32)) | 1u;
    return (u64)(word + a) * odd;
}

struct __attribute__((aligned(16))) Vector {
    u32 word[4];
};

#ifdef __CUDACC__
// The address comes out of a table: that it is in global memory has to be said.
static inline __device__ Vector load_vector(const unsigned char* at)
{
    Vector data;
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(data.word[0]), "=r"(data.word[1]), "=r"(data.word[2]), "=r"(data.word[3])
                 : "l"(__cvta_generic_to_global(at)));
    return data;
}

static inline __device__ u32 load_word(const unsigned char* at)
{
    u32 word;
    asm("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(__cvta_generic_to_global(at)));
    return word;
}
#else
static inline Vector load_vector(const unsigned char* at) { return *(const Vector*)at; }
static inline u32 load_word(const unsigned char* at) { return *(const u32*)at; }
#endif

// Sum of the terms of one item: item `number` of a head's row that starts at `row`.
static inline __device__ u64 item_sum(const unsigned char* row, u32 number, u64 key)
{
#if ITEM_BYTES == 16
    const Vector data = load_vector(row + 16 * number);
    u64 sum = 0;
    for (u32 i = 0; i < 4; ++i) sum += term(data.word[i], key, 4 * number + i);
    return sum;
#elif ITEM_BYTES == 4
    return term(load_word(row + 4 * number), key, number);
#else
    u32 word = 0;
    for (u32 i = 0; i < 4; ++i)
        if (4 * number + i < HEAD_BYTES) word |= (u32)row[4 * number + i] << (8 * i);
    return term(word, key, number);
#endif
}

// Items of one plane and head are counted in the order unit, token, head in the row, item.
static inline __device__ u64 digest_item(const i64* table, u32 plane, u32 head, u32 item)
{
    u32 rest = item / HEAD_ITEMS;
    const u32 number = item - rest * HEAD_ITEMS;
    const u32 head_in_row = rest % HEADS;
    rest /= HEADS;
    const u32 token = rest % TOKENS, unit = rest / TOKENS;
    const i64 start = table[table[ADDRESSES] + plane] + table[table[UNITS] + unit];
    const i64 row = start + head * table[HEAD_STRIDE] + token * table[TOKEN_STRIDE] + (i64)head_in_row * HEAD_BYTES;
    const i64 position = table[table[POSITIONS] + unit] + token * table[STEP];
    const i64 logical_head = table[FIRST_HEAD] + table[HEAD_STEP] * ((i64)head * HEADS + head_in_row);
    const u64 key = mix64((u64)table[table[KEYS] + plane] + (u64)logical_head * 0xC2B2AE3D27D4EB4Full +
                          (u64)position * 0x9E3779B185EBCA87ull);
    return item_sum((const unsigned char*)row, number, key);
}

#ifdef __CUDACC__

// One row of blocks a plane and head.
extern "C" __global__ void __launch_bounds__(256, 4) digest(const i64* __restrict__ table, u64* out)
{
    const u32 items = (u32)table[ITEMS], planes = (u32)table[PLANES];
    const u32 head = blockIdx.y / planes, plane = blockIdx.y - head * planes;
    u64 sum = 0;
#pragma unroll 1
    for (u32 item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x)
        sum += digest_item(table, plane, head, item);
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_down_sync(~0u, sum, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

#endif
