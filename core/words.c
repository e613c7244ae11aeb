/* Token and page ids as 32-bit words: one pass over what engines hold, lists and rows of 32 or 64 bits. */
#include "core.h"

static const uint64_t TOO_WIDE = ~(uint64_t)0xffffffff;

/* NULL without an error for a list with anything but numbers of 32 bits without a sign: Python says what is wrong. */
static PyObject *words_of_list(PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    PyObject *data = PyBytes_FromStringAndSize(NULL, count * 4);
    uint32_t *to = data == NULL ? NULL : (uint32_t *)PyBytes_AsString(data);
    for (Py_ssize_t i = 0; to != NULL && i < count; i++) {
        PyObject *item = i < PyList_Size(list) ? PyList_GetItem(list, i) : NULL;
        if (item == NULL || !PyLong_CheckExact(item)) {
            Py_DECREF(data);
            return NULL;
        }
        long long number = PyLong_AsLongLong(item);
        if ((uint64_t)number & TOO_WIDE) {
            PyErr_Clear();
            Py_DECREF(data);
            return NULL;
        }
        to[i] = (uint32_t)number;
    }
    return data;
}

/* A format of one letter, with or without the sign of native order. */
static char format_of(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    return format[0] != 0 && format[1] == 0 ? format[0] : 0;
}

static PyObject *words_of_row(const Py_buffer *view)
{
    char format = format_of(view);
    if (view->ndim != 1 || format == 0 || strchr("iIlLqQ", format) == NULL)
        return NULL;
    if (view->itemsize == 4)
        return PyBytes_FromStringAndSize(view->buf, view->len);
    if (view->itemsize != 8)
        return NULL;
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
