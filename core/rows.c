/* Copies rows of a nest from one address to another, each once: what kernels/reference.py defines, at a memcpy's rate.
 *
 * Rows that touch at both ends are one copy. What is read next is asked for ahead, since rows lie where no prefetcher of
 * the processor expects them, and a move that is larger than a cache stores past the cache, as memcpy does.
 */
#include "walk.h"

enum {
    AHEAD = 32,                   /* copies that are known before they are made: a power of two */
    AHEAD_BYTES = 6 << 10,        /* and their bytes: what the memory has under way */
    RUN_BYTES = 1 << 10,          /* a copy */
    PIECE_BYTES = 1 << 16,        /* what a thread takes of a longer row */
    GRAIN_BYTES = 1 << 18,        /* what a thread takes at a time */
    STREAM_BYTES = 8 << 20,       /* moves from this size on are stored past the cache */
    THREAD_BYTES = 1 << 20,       /* a thread is not started for less: starting one takes as long as 100 KB */
    WITHOUT_GIL_BYTES = 1 << 16,
    LINE_BYTES = 64
};

typedef struct {
    const unsigned char *src;
    unsigned char *dst;
    size_t bytes;
} Run;

typedef struct {
    const Nest *nest;
    int64_t row_bytes, pieces; /* the innermost loop is pieces of PIECE_BYTES where there are more than one */
    int streams;
} Copy;

#if defined(__SSE2__)
#include <emmintrin.h>

static inline void stream(unsigned char *dst, const unsigned char *src, size_t bytes)
{
    size_t before = -(uintptr_t)dst % LINE_BYTES;
    if (bytes < before + LINE_BYTES) {
        memcpy(dst, src, bytes);
        return;
    }
    memcpy(dst, src, before);
    dst += before, src += before, bytes -= before;
    for (; bytes >= LINE_BYTES; bytes -= LINE_BYTES, dst += LINE_BYTES, src += LINE_BYTES)
        for (int i = 0; i < LINE_BYTES; i += 16)
            _mm_stream_si128((__m128i *)(dst + i), _mm_loadu_si128((const __m128i *)(src + i)));
    memcpy(dst, src, bytes);
}

static inline void stream_ends(void) { _mm_sfence(); }
#else
static inline void stream(unsigned char *dst, const unsigned char *src, size_t bytes) { memcpy(dst, src, bytes); }

static inline void stream_ends(void) {}
#endif

/* Copies that wait for what they read: AHEAD_BYTES or so. The newest may still grow. */
typedef struct {
    Run runs[AHEAD];
    unsigned made, known;
    size_t bytes;
    int streams;
} Queue;

static inline void make_oldest(Queue *queue)
{
    const Run *run = &queue->runs[queue->made++ & (AHEAD - 1)];
    queue->bytes -= run->bytes;
    if (queue->streams)
        stream(run->dst, run->src, run->bytes);
    else
        memcpy(run->dst, run->src, run->bytes);
}

static inline void enqueue(Queue *queue, const unsigned char *src, unsigned char *dst, size_t bytes)
{
    Run *last = &queue->runs[(queue->known - 1) & (AHEAD - 1)];
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch(src + at);
    __builtin_prefetch(src + bytes - 1); /* the line that an unaligned row ends in */
    if (queue->known != queue->made && last->src + last->bytes == src && last->dst + last->bytes == dst &&
        last->bytes + bytes <= RUN_BYTES) {
        last->bytes += bytes;
    } else {
        if (queue->known - queue->made == AHEAD)
            make_oldest(queue);
        queue->runs[queue->known++ & (AHEAD - 1)] = (Run){src, dst, bytes};
    }
    queue->bytes += bytes;
    while (queue->bytes > AHEAD_BYTES)
        make_oldest(queue);
}

static void copy_some(void *of, int64_t first, int64_t stop)
{
    const Copy *copy = of;
    const Loop *inner = &copy->nest->loops[0];
    Walker walker = walker_at(copy->nest, first);
    Queue queue = {.streams = copy->streams};
    while (first < stop) {
        int64_t place = walker.place[0], left = inner->count - place;
        int64_t end = place + (left < stop - first ? left : stop - first);
        first += end - place;
        for (; place < end; place++) {
            const unsigned char *src = (const unsigned char *)(uintptr_t)(walker.outer[FIRST] + added(inner, place, FIRST));
            unsigned char *dst = (unsigned char *)(uintptr_t)(walker.outer[SECOND] + added(inner, place, SECOND));
            int64_t bytes = copy->row_bytes;
            if (copy->pieces > 1)
                bytes = place < copy->pieces - 1 ? PIECE_BYTES : bytes - place * PIECE_BYTES;
            for (int64_t at = 0; at < bytes; at += RUN_BYTES)
                enqueue(&queue, src + at, dst + at, (size_t)(bytes - at < RUN_BYTES ? bytes - at : RUN_BYTES));
        }
        walker_carry(&walker, copy->nest);
    }
    while (queue.made != queue.known)
        make_oldest(&queue);
    if (copy->streams)
        stream_ends();
}

/* Loops whose places follow each other at both ends make a longer row. */
static int64_t join_loops(Nest *nest, int64_t row_bytes)
{
    for (int i = 0; i < nest->depth; i++) {
        Loop *loop = &nest->loops[i];
        int follows = !loop->table[FIRST] && !loop->table[SECOND] && loop->step[FIRST] == row_bytes &&
                      loop->step[SECOND] == row_bytes;
        if (follows && loop->count > 1) {
            row_bytes *= loop->count;
            loop->count = 1;
            i = -1;
        }
    }
    return row_bytes;
}

/* The innermost loop, over the pieces of a long row. */
static int64_t cut_rows(Nest *nest, int64_t row_bytes)
{
    int64_t pieces = (row_bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    if (pieces > 1) {
        memmove(nest->loops + 1, nest->loops, (size_t)nest->depth++ * sizeof *nest->loops);
        nest->loops[0] = (Loop){.count = pieces, .step = {PIECE_BYTES, PIECE_BYTES}};
    }
    return pieces;
}

/* copy_rows(loops, row_bytes, threads): a loop is (places, what they add to the source's address, to the destination's).
 * One table of each end has addresses. No row overlaps another's destination. */
PyObject *copy_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Rows rows;
    if (rows_of(args, count, &rows) < 0) {
        rows_release(&rows);
        return NULL;
    }
    Nest *nest = &rows.nest;
    Copy copy = {.nest = nest, .streams = rows.nbytes >= STREAM_BYTES, .row_bytes = join_loops(nest, rows.row_bytes)};
    nest_order(nest, 2);
    copy.pieces = cut_rows(nest, copy.row_bytes);
    share(&rows, GRAIN_BYTES, copy_some, &copy);
    rows_release(&rows);
    return Py_NewRef(Py_None);
}
