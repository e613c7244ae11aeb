/* XXH3 of 64 bits without a seed (Yann Collet's xxHash 0.8) of cells longer than 240 bytes, which have a formula of their
 * own: one call for all cells of a payload, during which other threads run. Shorter cells are the xxhash package's.
 */
#include "vectors.h"

#ifdef HAS_AVX
#include <immintrin.h>
#endif

enum { STRIPE = 64, SECRET_BYTES = 192, STRIPES = 16, BLOCK = STRIPES * STRIPE, LANES = 8, SHORT_BYTES = 240 };
enum { WITHOUT_GIL_BYTES = 1 << 17 };

static const uint64_t P32_1 = 0x9E3779B1, P64_1 = 0x9E3779B185EBCA87;

/* The default secret of xxHash. */
static const unsigned char SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static inline uint64_t word_at(const unsigned char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

static const uint64_t START[LANES] = {0xC2B2AE3DU, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                      0x85EBCA77C2B2AE63, 0x85EBCA77U, 0x27D4EB2F165667C5, 0x9E3779B1U};

/* What the lanes come to in the end. */
static uint64_t merged(const uint64_t *sums, size_t bytes)
{
    uint64_t hash = bytes * P64_1;
    for (int i = 0; i < LANES; i += 2) {
        unsigned __int128 product = sums[i] ^ word_at(SECRET + 11 + 8 * i);
        product *= sums[i + 1] ^ word_at(SECRET + 19 + 8 * i);
        hash += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
    return hash ^ hash >> 32;
}

#ifdef __clang__
#define SHUFFLED(data, ...) __builtin_shufflevector(data, data, __VA_ARGS__)
#else
#define SHUFFLED(data, ...) __builtin_shuffle(data, (__typeof__(data)){__VA_ARGS__})
#endif

#define FOR
#define NAMED(what) what##_plain
#define WIDTH 2
#ifdef HAS_AVX
#define MULTIPLIED(key) (lanes_plain)_mm_mul_epu32((__m128i)(key), (__m128i)((key) >> 32))
#else
#define MULTIPLIED(key) (((key)&0xffffffff) * ((key) >> 32))
#endif
#define SWAPPED(data) SHUFFLED(data, 1, 0)
#include "xxh3_lanes.h"

#ifdef HAS_AVX
#define FOR FOR_AVX2
#define NAMED(what) what##_avx2
#define WIDTH 4
#define MULTIPLIED(key) (lanes_avx2)_mm256_mul_epu32((__m256i)(key), (__m256i)((key) >> 32))
#define SWAPPED(data) SHUFFLED(data, 1, 0, 3, 2)
#include "xxh3_lanes.h"

#define FOR FOR_AVX512
#define NAMED(what) what##_avx512
#define WIDTH 8
#define MULTIPLIED(key) (lanes_avx512)_mm512_mul_epu32((__m512i)(key), (__m512i)((key) >> 32))
#define SWAPPED(data) SHUFFLED(data, 1, 0, 3, 2, 5, 4, 7, 6)
#include "xxh3_lanes.h"
#endif

typedef uint64_t (*Hash)(const unsigned char *cell, size_t bytes);

static Hash hash_for(Vectors vectors)
{
#ifdef HAS_AVX
    if (vectors != PLAIN)
        return vectors == AVX512 ? hash_avx512 : hash_avx2;
#endif
    (void)vectors;
    return hash_plain;
}

/* cell_digests(payload, cells[, vectors]): the digests of as many equal cells, 8 bytes each, little endian. */
PyObject *cell_digests(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t cells = count == 2 || count == 3 ? PyLong_AsSsize_t(args[1]) : -1;
    Vectors vectors;
    Py_buffer payload;
    if (cells < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a payload and a number of cells are due");
        return NULL;
    }
    if (vectors_named(count == 3 ? args[2] : NULL, &vectors) < 0 || PyObject_GetBuffer(args[0], &payload, PyBUF_SIMPLE) < 0)
        return NULL;
    size_t cell_bytes = (size_t)(payload.len / cells);
    PyObject *digests = NULL;
    char *to = NULL;
    if (payload.len % cells || cell_bytes <= SHORT_BYTES)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not %zd cells of more than %d bytes", payload.len, cells, SHORT_BYTES);
    else if ((digests = PyBytes_FromStringAndSize(NULL, cells * 8)) != NULL)
        to = PyBytes_AsString(digests);
    if (to != NULL) {
        Hash hash = hash_for(vectors);
        PyThreadState *others = payload.len < WITHOUT_GIL_BYTES ? NULL : PyEval_SaveThread();
        for (Py_ssize_t i = 0; i < cells; i++) {
            uint64_t digest = hash((unsigned char *)payload.buf + (size_t)i * cell_bytes, cell_bytes);
            memcpy(to + 8 * i, &digest, 8);
        }
        if (others != NULL)
            PyEval_RestoreThread(others);
    }
    PyBuffer_Release(&payload);
    return digests;
}
