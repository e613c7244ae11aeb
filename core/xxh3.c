/* XXH3 of 64 bits without a seed, by Yann Collet's xxHash (vendored/xxhash.h): one call for all cells of a payload, during
 * which other threads run. The header has the loop for each width of vectors, of which a build for one processor takes one;
 * here the wheel is built for the oldest, so each is compiled and the processor chooses.
 */
#include "vectors.h"

#ifdef HAS_AVX
#include <immintrin.h>
#define XXH_X86DISPATCH
#define XXH_DISPATCH_AVX2 1
#define XXH_DISPATCH_AVX512 1
#define XXH_TARGET_AVX2 FOR_AVX2
#define XXH_TARGET_AVX512 FOR_AVX512
#endif
#define XXH_INLINE_ALL
#include "vendored/xxhash.h"

enum { WITHOUT_GIL_BYTES = 1 << 17 };

/* The hash of a cell longer than XXH3_MIDSIZE_MAX. The header hands each the secret; a constant one is faster. */
#define LONG_HASH(width)                                                                                                   \
    static XXH64_hash_t long_##width(const void *cell, size_t bytes, XXH64_hash_t Py_UNUSED(seed),                         \
                                     const xxh_u8 *Py_UNUSED(secret), size_t Py_UNUSED(secret_bytes))                      \
    {                                                                                                                      \
        return XXH3_hashLong_64b_internal(cell, bytes, XXH3_kSecret, sizeof XXH3_kSecret, XXH3_accumulate_##width,          \
                                          XXH3_scrambleAcc_##width);                                                       \
    }

#ifdef HAS_AVX
FOR_AVX2 LONG_HASH(avx2)
FOR_AVX512 LONG_HASH(avx512)
#endif

static XXH3_hashLong64_f long_hash_for(Vectors vectors)
{
#ifdef HAS_AVX
    if (vectors != PLAIN)
        return vectors == AVX512 ? long_avx512 : long_avx2;
#endif
    (void)vectors;
    return XXH3_hashLong_64b_default;
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
    if (payload.len % cells)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not %zd cells of one length", payload.len, cells);
    else if ((digests = PyBytes_FromStringAndSize(NULL, cells * 8)) != NULL)
        to = PyBytes_AsString(digests);
    if (to != NULL) {
        XXH3_hashLong64_f long_hash = long_hash_for(vectors);
        PyThreadState *others = payload.len < WITHOUT_GIL_BYTES ? NULL : PyEval_SaveThread();
        for (Py_ssize_t i = 0; i < cells; i++) {
            const unsigned char *cell = (unsigned char *)payload.buf + (size_t)i * cell_bytes;
            uint64_t digest = XXH3_64bits_internal(cell, cell_bytes, 0, XXH3_kSecret, sizeof XXH3_kSecret, long_hash);
            memcpy(to + 8 * i, &digest, 8);
        }
        if (others != NULL)
            PyEval_RestoreThread(others);
    }
    PyBuffer_Release(&payload);
    return digests;
}
