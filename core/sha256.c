/* Page hashes, chained, by the processor's SHA instructions; without them Python's hashlib makes them.
 *
 * SHA-256 as in FIPS 180-4. Calling hashlib takes longer than hashing a page of 16 tokens.
 */
#include "core.h"

enum { BLOCK_BYTES = 64, WITHOUT_GIL_BYTES = 1 << 16 };

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

int has_sha_instructions(void)
{
    uint32_t leaf = 7, extensions = 0, count = 0, unused = 0;
    __asm__("cpuid" : "+a"(leaf), "=b"(extensions), "+c"(count), "=d"(unused));
    return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") && (extensions >> 29 & 1);
}

/* One block into the state, which is held as the instructions want it: (A, B, E, F) and (C, D, G, H). */
__attribute__((target("sha,ssse3,sse4.1"))) static void add_block(__m128i state[2], const unsigned char *block)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i abef = state[0], cdgh = state[1], words[4];
    for (int i = 0; i < 4; i++)
        words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block + 16 * i)), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m128i now = words[i & 3], sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        if (i < 12) { /* the four words of sixteen rounds later */
            __m128i next = words[(i + 1) & 3], last = words[(i + 3) & 3];
            __m128i low = _mm_sha256msg1_epu32(now, next);
            low = _mm_add_epi32(low, _mm_alignr_epi8(last, words[(i + 2) & 3], 4));
            words[i & 3] = _mm_sha256msg2_epu32(low, last);
        }
    }
    state[0] = _mm_add_epi32(state[0], abef);
    state[1] = _mm_add_epi32(state[1], cdgh);
}

/* The hash of `parent` and a page, of at most `room` bytes with padding, which `message` has room for. */
__attribute__((target("sha,ssse3,sse4.1"))) static void hash_message(const unsigned char *message, size_t blocks,
                                                                     unsigned char *hash)
{
    __m128i state[2] = {_mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c),
                        _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19)};
    for (size_t i = 0; i < blocks; i++)
        add_block(state, message + i * BLOCK_BYTES);
    uint32_t abef[4], cdgh[4];
    _mm_storeu_si128((__m128i *)abef, state[0]);
    _mm_storeu_si128((__m128i *)cdgh, state[1]);
    const uint32_t words[8] = {abef[3], abef[2], cdgh[3], cdgh[2], abef[1], abef[0], cdgh[1], cdgh[0]};
    for (int i = 0; i < 8; i++) {
        uint32_t word = __builtin_bswap32(words[i]);
        memcpy(hash + 4 * i, &word, 4);
    }
}

/* Hashes of whole pages, one after the other; `parent` of 0 or 32 bytes goes before the first. */
static int hash_pages(const unsigned char *parent, size_t parent_bytes, const unsigned char *data, size_t pages,
                      size_t page_bytes, unsigned char *hashes)
{
    unsigned char *message = malloc(page_bytes + HASH_BYTES + 2 * BLOCK_BYTES);
    if (message == NULL)
        return -1;
    for (size_t i = 0; i < pages; i++) {
        size_t length = parent_bytes + page_bytes, blocks = (length + 9 + BLOCK_BYTES - 1) / BLOCK_BYTES;
        memcpy(message, parent, parent_bytes);
        memcpy(message + parent_bytes, data + i * page_bytes, page_bytes);
        memset(message + length, 0, blocks * BLOCK_BYTES - length);
        message[length] = 0x80;
        uint64_t bits = __builtin_bswap64((uint64_t)length * 8);
        memcpy(message + blocks * BLOCK_BYTES - 8, &bits, 8);
        hash_message(message, blocks, hashes + i * HASH_BYTES);
        parent = hashes + i * HASH_BYTES, parent_bytes = HASH_BYTES;
    }
    free(message);
    return 0;
}

#else
int has_sha_instructions(void) { return 0; }

static int hash_pages(const unsigned char *parent, size_t parent_bytes, const unsigned char *data, size_t pages,
                      size_t page_bytes, unsigned char *hashes)
{
    (void)parent, (void)parent_bytes, (void)data, (void)pages, (void)page_bytes, (void)hashes;
    return -1;
}
#endif

/* chain(parent, data, page_bytes): see hashes.py. */
PyObject *chain(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *parent, *data;
    Py_ssize_t parent_bytes, length, page_bytes = count == 3 ? PyLong_AsSsize_t(args[2]) : -1;
    if (page_bytes < 1 || PyBytes_AsStringAndSize(args[0], &parent, &parent_bytes) < 0 ||
        PyBytes_AsStringAndSize(args[1], &data, &length) < 0 || parent_bytes > HASH_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a parent, data and bytes of a page are due");
        return NULL;
    }
    size_t pages = (size_t)(length / page_bytes);
    PyObject *hashes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)pages * HASH_BYTES);
    if (hashes == NULL)
        return NULL;
    unsigned char *to = (unsigned char *)PyBytes_AsString(hashes);
    PyThreadState *others = length < WITHOUT_GIL_BYTES ? NULL : PyEval_SaveThread();
    int failed = hash_pages((unsigned char *)parent, (size_t)parent_bytes, (unsigned char *)data, pages,
                            (size_t)page_bytes, to);
    if (others != NULL)
        PyEval_RestoreThread(others);
    if (failed) {
        Py_DECREF(hashes);
        return PyErr_NoMemory();
    }
    return hashes;
}
