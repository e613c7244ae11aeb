/* Token and page ids as 32-bit words: one pass over what engines hold, lists and rows of 32 or 64 bits. */
#include "core.h"

static const uint64_t TOO_WIDE = ~(uint64_t)0xffffffff;

/* A call a number is all that the limited API has for a list, and takes most of a request's time. CPython 3.11 and its
 * successors keep a number below 2**30 in one digit at DIGIT, behind a word at TAG that says that it is one, and a
 * list's items behind a pointer at ITEMS. Where `layout_holds` does not find it so, each number is asked for instead.
 */
enum { TAG = 2, ITEMS = 3, DIGIT = 6, DIGIT_BITS = 30 };

static uintptr_t one_digit; /* what the word at TAG says; 0 where the layout is another */

static uintptr_t tag_of(PyObject *number) { return ((uintptr_t *)number)[TAG]; }

static uint32_t digit_of(PyObject *number) { return ((uint32_t *)number)[DIGIT]; }

/* Of numbers with one digit, of others, and of a list of all of them. */
static int layout_holds(PyObject *list, const long long *numbers, Py_ssize_t count, Py_ssize_t with_one_digit)
{
    uintptr_t tag = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number = PyList_GetItem(list, i);
        if (number == NULL || ((PyObject ***)list)[ITEMS][i] != number)
            return 0;
        if (i == 0)
            tag = tag_of(number);
        if (i < with_one_digit ? tag_of(number) != tag || digit_of(number) != numbers[i] : tag_of(number) == tag)
            return 0;
    }
    one_digit = tag;
    return 1;
}

int words_init(void)
{
    const long long numbers[] = {1000, 65536, 151643, (1LL << DIGIT_BITS) - 1, 0, -1, -1000, 1LL << DIGIT_BITS, 1LL << 40};
    const Py_ssize_t count = sizeof numbers / sizeof *numbers;
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL || PyList_SetItem(list, i, number) < 0)
            Py_CLEAR(list);
    }
    if (list == NULL)
        return -1;
    if (sizeof(void *) == 8)
        layout_holds(list, numbers, count, 4);
    Py_DECREF(list);
    return 0;
}

/* -1 for anything but a number of 32 bits without a sign. */
static int word_of(PyObject *item, uint32_t *word)
{
    long long number = PyLong_CheckExact(item) ? PyLong_AsLongLong(item) : -1;
    *word = (uint32_t)number;
    return (uint64_t)number & TOO_WIDE ? -1 : 0;
}

/* The numbers of a long list lie outside the caches near the core, one after the other only as far as they were made so:
 * they are asked for ahead, every other one, as two that were made together share a line, and looked at in groups without
 * a branch a number. */
enum { GROUP = 8, AHEAD = 64 };

/* Of GROUP numbers with one digit each; -1 where one is another thing. `left` items follow, which are fetched ahead. */
static inline int digits_of(PyObject **items, Py_ssize_t left, uint32_t *to)
{
    uintptr_t other = 0;
    if (left >= GROUP + AHEAD)
        for (int j = 0; j < GROUP; j += 2)
            __builtin_prefetch(items[AHEAD + j]);
    for (int j = 0; j < GROUP; j++)
        other |= (uintptr_t)Py_TYPE(items[j]) ^ (uintptr_t)&PyLong_Type;
    if (other)
        return -1;
    for (int j = 0; j < GROUP; j++) {
        other |= tag_of(items[j]) ^ one_digit;
        to[j] = digit_of(items[j]);
    }
    return other ? -1 : 0;
}

/* NULL without an error for a list with anything else: Python says what is wrong. */
static PyObject *words_of_list(PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    PyObject *data = PyBytes_FromStringAndSize(NULL, count * 4);
    if (data == NULL)
        return NULL;
    uint32_t *to = (uint32_t *)PyBytes_AsString(data);
    PyObject **items = one_digit ? ((PyObject ***)list)[ITEMS] : NULL;
    for (Py_ssize_t i = 0; i < count; i += GROUP) {
        Py_ssize_t group = count - i < GROUP ? count - i : GROUP;
        if (items != NULL && group == GROUP && digits_of(items + i, count - i, to + i) == 0)
            continue;
        for (Py_ssize_t j = i; j < i + group; j++) {
            if (word_of(PyList_GetItem(list, j), to + j) < 0) {
                PyErr_Clear();
                Py_DECREF(data);
                return NULL;
            }
        }
    }
    return data;
}

int is_row_of_words(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    int one_letter = format[0] != 0 && format[1] == 0;
    return view->ndim == 1 && one_letter && strchr("iIlLqQ", *format) && (view->itemsize == 4 || view->itemsize == 8);
}

static PyObject *words_of_row(const Py_buffer *view)
{
    if (!is_row_of_words(view))
        return NULL;
    if (view->itemsize == 4 && strpbrk(view->format, "il") != NULL) {
        const uint32_t *from = view->buf;
        uint32_t all = 0;
        for (Py_ssize_t i = 0; i < view->len / 4; i++)
            all |= from[i];
        if (all >> 31)
            return NULL;
    }
    if (view->itemsize == 4)
        return PyBytes_FromStringAndSize(view->buf, view->len);
    Py_ssize_t count = view->len / 8;
    PyObject *data = PyBytes_FromStringAndSize(NULL, count * 4);
    if (data == NULL)
        return NULL;
    const uint64_t *from = view->buf;
    uint32_t *to = (uint32_t *)PyBytes_AsString(data);
    uint64_t all = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        all |= from[i];
        to[i] = (uint32_t)from[i];
    }
    if (all & TOO_WIDE)
        Py_CLEAR(data);
    return data;
}

/* The words as bytes, or None for what Python must look at. */
PyObject *words(PyObject *Py_UNUSED(module), PyObject *tokens)
{
    PyObject *data = NULL;
    if (PyList_Check(tokens)) {
        data = words_of_list(tokens);
    } else {
        Py_buffer view;
        if (PyObject_GetBuffer(tokens, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) {
            data = words_of_row(&view);
            PyBuffer_Release(&view);
        } else {
            PyErr_Clear();
        }
    }
    if (data == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return data;
}
