/* Rows of numbers as msgpack arrays, as KV events carry them: see packed_rows.py. */
#include "core.h"

enum { WORD_BYTES = 4, MOST_ARRAY = 5, MOST_WORD = 5, MOST_NAME = 9 };

/* Both write the shortest form, as msgspec does, and return where the next begins. */
static unsigned char *put_bytes(unsigned char *to, unsigned char form, uint64_t number, int bytes)
{
    *to++ = form;
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8)
        *to++ = (unsigned char)(number >> shift);
    return to;
}

static unsigned char *put_array(unsigned char *to, uint32_t count)
{
    if (count < 16)
        return put_bytes(to, (unsigned char)(0x90 | count), 0, 0);
    return count <= UINT16_MAX ? put_bytes(to, 0xdc, count, 2) : put_bytes(to, 0xdd, count, 4);
}

static inline unsigned char *put_word(unsigned char *to, uint32_t word)
{
    if (word > UINT16_MAX) { /* most tokens: two stores without a loop */
        uint32_t big = __builtin_bswap32(word);
        *to = 0xce;
        memcpy(to + 1, &big, 4);
        return to + 5;
    }
    if (word < 0x80)
        return put_bytes(to, (unsigned char)word, 0, 0);
    return word <= UINT8_MAX ? put_bytes(to, 0xcc, word, 1) : put_bytes(to, 0xcd, word, 2);
}

/* A signed number of 64 bits, which a hash's first bytes are. */
static unsigned char *put_name(unsigned char *to, int64_t name)
{
    if (name >= 0)
        return name > UINT32_MAX ? put_bytes(to, 0xcf, (uint64_t)name, 8) : put_word(to, (uint32_t)name);
    if (name >= -32)
        return put_bytes(to, (unsigned char)name, 0, 0);
    int bytes = name >= INT8_MIN ? 1 : name >= INT16_MIN ? 2 : name >= INT32_MIN ? 4 : 8;
    return put_bytes(to, (unsigned char)(bytes == 1 ? 0xd0 : bytes == 2 ? 0xd1 : bytes == 4 ? 0xd2 : 0xd3),
                     (uint64_t)name, bytes);
}

/* Bytes of what was written to `from`, which is freed. */
static PyObject *written(unsigned char *from, unsigned char *to)
{
    PyObject *row = PyBytes_FromStringAndSize((char *)from, to - from);
    free(from);
    return row;
}

/* pack_words(buffer of words, step): each `step`-th of them. */
PyObject *pack_words(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Py_buffer view;
    Py_ssize_t step = count == 2 ? PyLong_AsSsize_t(args[1]) : -1;
    if (step < 1 || PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "words and a step of one or more are due");
        return NULL;
    }
    Py_ssize_t given = view.len / WORD_BYTES, words = given / step + (given % step != 0);
    unsigned char *row = malloc(MOST_ARRAY + (size_t)words * MOST_WORD);
    if (row == NULL || words > UINT32_MAX) {
        free(row);
        PyBuffer_Release(&view);
        return PyErr_NoMemory();
    }
    unsigned char *to = put_array(row, (uint32_t)words);
    for (Py_ssize_t i = 0; i < words; i++) {
        uint32_t word;
        memcpy(&word, (char *)view.buf + i * step * WORD_BYTES, WORD_BYTES);
        to = put_word(to, word);
    }
    PyBuffer_Release(&view);
    return written(row, to);
}

/* pack_hashes(hashes): the first eight bytes of each, the first of them the highest. */
PyObject *pack_hashes(PyObject *Py_UNUSED(module), PyObject *hashes)
{
    char *from;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(hashes, &from, &length) < 0)
        return NULL;
    Py_ssize_t names = length / HASH_BYTES;
    unsigned char *row = malloc(MOST_ARRAY + (size_t)names * MOST_NAME);
    if (row == NULL || names > UINT32_MAX) {
        free(row);
        return PyErr_NoMemory();
    }
    unsigned char *to = put_array(row, (uint32_t)names);
    for (Py_ssize_t i = 0; i < names; i++) {
        uint64_t name;
        memcpy(&name, from + i * HASH_BYTES, sizeof name);
        to = put_name(to, (int64_t)__builtin_bswap64(name));
    }
    return written(row, to);
}
