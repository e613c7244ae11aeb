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

/* The digests of the cells of one payload, 8 bytes each. */
static void payload_digests(const Py_buffer *payload, Py_ssize_t cells, XXH3_hashLong64_f long_hash, char *to)
{
    const size_t cell_bytes = (size_t)(payload->len / cells);
    for (Py_ssize_t i = 0; i < cells; i++) {
        const unsigned char *cell = (unsigned char *)payload->buf + (size_t)i * cell_bytes;
        uint64_t digest = XXH3_64bits_internal(cell, cell_bytes, 0, XXH3_kSecret, sizeof XXH3_kSecret, long_hash);
        memcpy(to + 8 * i, &digest, 8);
    }
}

/* The buffers of a list of payloads that have `cells` equal cells each. Returns how many are held; -1 after an error, none. */
static Py_ssize_t payloads_of(PyObject *list, Py_ssize_t cells, Py_buffer *payloads, Py_ssize_t most, size_t *bytes)
{
    Py_ssize_t held = 0;
    for (; held < most && held < PyList_Size(list); held++) {
        if (PyObject_GetBuffer(PyList_GetItem(list, held), &payloads[held], PyBUF_SIMPLE) < 0)
            break;
        *bytes += (size_t)payloads[held].len;
        if (payloads[held].len % cells) {
            PyErr_Format(PyExc_ValueError, "%zd bytes are not %zd cells of one length", payloads[held++].len, cells);
            break;
        }
    }
    if (!PyErr_Occurred())
        return held;
    while (held > 0)
        PyBuffer_Release(&payloads[--held]);
    return -1;
}

/* cell_digests(payloads, cells[, vectors]): the digests of as many equal cells of each payload of a list, 8 bytes each, little
 * endian, payload after payload.
 */
PyObject *cell_digests(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t cells = count == 2 || count == 3 ? PyLong_AsSsize_t(args[1]) : -1;
    Vectors vectors;
    if (cells < 1 || !PyList_Check(args[0])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a list of payloads and a number of cells are due");
        return NULL;
    }
    if (vectors_named(count == 3 ? args[2] : NULL, &vectors) < 0)
        return NULL;
    Py_ssize_t most = PyList_Size(args[0]), held = -1;
    Py_buffer *payloads = most < PY_SSIZE_T_MAX / 8 / cells ? PyMem_Calloc((size_t)most + 1, sizeof *payloads) : NULL;
    PyObject *digests = NULL;
    size_t bytes = 0;
    if (payloads == NULL)
        return PyErr_NoMemory();
    if ((held = payloads_of(args[0], cells, payloads, most, &bytes)) >= 0)
        digests = PyBytes_FromStringAndSize(NULL, held * cells * 8);
    if (digests != NULL) {
        char *to = PyBytes_AsString(digests);
        XXH3_hashLong64_f long_hash = long_hash_for(vectors);
        PyThreadState *others = bytes < WITHOUT_GIL_BYTES ? NULL : PyEval_SaveThread();
        for (Py_ssize_t i = 0; i < held; i++)
            payload_digests(&payloads[i], cells, long_hash, to + i * cells * 8);
        if (others != NULL)
            PyEval_RestoreThread(others);
    }
    while (held > 0)
        PyBuffer_Release(&payloads[--held]);
    PyMem_Free(payloads);
    return digests;
}
