/* The digest of rows, in host memory: what kernels/digest_reference.py defines, a vector of words at a time.
 *
 * The loop over words is written once, in plain C, and compiled for every width of vectors that the processor may have.
 */
#include "vectors.h"
#include "walk.h"

#include <stdatomic.h>

enum {
    AHEAD = 32,            /* rows that are asked for before they are summed */
    AHEAD_BYTES = 6 << 10, /* and their bytes */
    GRAIN_BYTES = 1 << 17, /* what a thread takes at a time */
    LINE_BYTES = 64
};

/* Steps of the two halves of a key from word to word, and the multipliers of mix64. */
static const uint32_t A = 0x9E3779B1, B = 0x85EBCA77;
static const uint64_t M1 = 0xBF58476D1CE4E5B9, M2 = 0x94D049BB133111EB;

static inline uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * M1;
    z = (z ^ z >> 27) * M2;
    return z ^ z >> 31;
}

static inline uint64_t term(uint32_t word, uint32_t a, uint32_t b)
{
    uint64_t product = (uint64_t)a * b;
    uint32_t odd = ((uint32_t)product ^ (uint32_t)(product >> 32)) | 1;
    return (uint64_t)(word + a) * odd;
}

/* The terms of one row, whose last word may be short of bytes. */
static INLINE uint64_t row_terms(const unsigned char *row, size_t bytes, uint64_t key)
{
    uint32_t a = (uint32_t)key, b = (uint32_t)(key >> 32), words = (uint32_t)(bytes / 4), last = 0;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < words; i++, a += A, b += B) {
        uint32_t word;
        memcpy(&word, row + 4 * (size_t)i, 4);
        sum += term(word, a, b);
    }
    if (bytes % 4) {
        memcpy(&last, row + 4 * (size_t)words, bytes % 4);
        sum += term(last, a, b);
    }
    return sum;
}

typedef struct {
    const Nest *nest;
    size_t row_bytes;
    _Atomic uint64_t sum;
} Digest;

/* A row that waits for its bytes. */
typedef struct {
    const unsigned char *bytes;
    uint64_t key;
} Waiting;

static INLINE void digest_some(Digest *digest, int64_t first, int64_t stop)
{
    const Loop *inner = &digest->nest->loops[0];
    const size_t row_bytes = digest->row_bytes, fetched = row_bytes < AHEAD_BYTES ? row_bytes : AHEAD_BYTES;
    const unsigned ahead = AHEAD_BYTES / fetched < AHEAD ? (unsigned)(AHEAD_BYTES / fetched) : AHEAD;
    Walker walker = walker_at(digest->nest, first);
    Waiting rows[AHEAD];
    unsigned summed = 0, known = 0;
    uint64_t sum = 0;
    while (first < stop) {
        int64_t place = walker.place[0], left = inner->count - place;
        int64_t end = place + (left < stop - first ? left : stop - first);
        first += end - place;
        for (; place < end; place++) {
            const unsigned char *bytes = (const unsigned char *)(uintptr_t)(walker.outer[FIRST] + added(inner, place, FIRST));
            for (size_t at = 0; at < fetched; at += LINE_BYTES)
                __builtin_prefetch(bytes + at);
            __builtin_prefetch(bytes + fetched - 1); /* the line that an unaligned row ends in */
            if (known - summed == ahead) {
                Waiting row = rows[summed++ % AHEAD];
                sum += row_terms(row.bytes, row_bytes, row.key);
            }
            rows[known++ % AHEAD] = (Waiting){bytes, mix64(walker.outer[SECOND] + added(inner, place, SECOND))};
        }
        walker_carry(&walker, digest->nest);
    }
    while (summed != known) {
        Waiting row = rows[summed++ % AHEAD];
        sum += row_terms(row.bytes, row_bytes, row.key);
    }
    atomic_fetch_add(&digest->sum, sum);
}

static void digest_plain(void *of, int64_t first, int64_t stop) { digest_some(of, first, stop); }

#ifdef HAS_AVX
FOR_AVX2 static void digest_avx2(void *of, int64_t first, int64_t stop) { digest_some(of, first, stop); }

FOR_AVX512 static void digest_avx512(void *of, int64_t first, int64_t stop) { digest_some(of, first, stop); }
#endif

static Work digest_for(Vectors vectors)
{
#ifdef HAS_AVX
    if (vectors != PLAIN)
        return vectors == AVX512 ? digest_avx512 : digest_avx2;
#endif
    (void)vectors;
    return digest_plain;
}

/* digest_rows(loops, row_bytes, threads[, vectors]): a loop is (places, what they add to the address, to the key). */
PyObject *digest_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Rows rows;
    Vectors vectors;
    if (rows_of(args, count == 4 ? 3 : count, &rows) < 0 || vectors_named(count == 4 ? args[3] : NULL, &vectors) < 0) {
        rows_release(&rows);
        return NULL;
    }
    nest_order(&rows.nest, 1);
    Digest digest = {.nest = &rows.nest, .row_bytes = (size_t)rows.row_bytes};
    share(&rows, GRAIN_BYTES, digest_for(vectors), &digest);
    rows_release(&rows);
    return PyLong_FromUnsignedLongLong(digest.sum);
}
