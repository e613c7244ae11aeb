/* A table in host memory from page id to page number: see index_table.py. */
#include "core.h"

/* A row of int64, or of int32 ids; -1 with an error. */
static int get_row(PyObject *object, Py_buffer *view, int flags, Py_ssize_t itemsize)
{
    if (PyObject_GetBuffer(object, view, flags | PyBUF_STRIDES) < 0)
        return -1;
    if (view->ndim == 1 && (view->itemsize == itemsize || (itemsize == 0 && (view->itemsize == 4 || view->itemsize == 8))))
        return 0;
    PyErr_Format(PyExc_ValueError, "a row of numbers is due, got %d axes of %zd bytes", view->ndim, view->itemsize);
    PyBuffer_Release(view);
    return -1;
}

/* A table, its ids and a row beside them, which has `page_tokens` items a page. */
typedef struct {
    Py_buffer table, ids, row;
    Py_ssize_t pages, page_tokens;
} Places;

static void release(Places *self)
{
    PyBuffer_Release(&self->table);
    PyBuffer_Release(&self->ids);
    PyBuffer_Release(&self->row);
}

static int get_places(Places *self, PyObject *const *args, Py_ssize_t count, int writes_table)
{
    self->page_tokens = count == 4 ? PyLong_AsSsize_t(args[3]) : -1;
    if (self->page_tokens < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a table, ids, a row and tokens a page are due");
        return -1;
    }
    if (get_row(args[0], &self->table, writes_table ? PyBUF_WRITABLE : 0, 8) < 0)
        return -1;
    if (get_row(args[1], &self->ids, 0, ID_BYTES) < 0) {
        PyBuffer_Release(&self->table);
        return -1;
    }
    if (get_row(args[2], &self->row, writes_table ? 0 : PyBUF_WRITABLE, writes_table ? 0 : 8) < 0) {
        PyBuffer_Release(&self->table);
        PyBuffer_Release(&self->ids);
        return -1;
    }
    self->pages = self->ids.shape[0];
    int even = self->table.strides[0] == 8 && self->ids.strides[0] == ID_BYTES;
    const int32_t *ids = self->ids.buf;
    if (!even || self->row.shape[0] / self->page_tokens < self->pages) {
        PyErr_Format(PyExc_ValueError, "%zd items are not %zd pages", self->row.shape[0], self->pages);
    } else {
        for (Py_ssize_t i = 0; i < self->pages; i++) {
            if ((size_t)ids[i] >= (size_t)self->table.shape[0]) {
                PyErr_Format(PyExc_ValueError, "page %d is not in a table of %zd", (int)ids[i], self->table.shape[0]);
                break;
            }
        }
    }
    if (!PyErr_Occurred())
        return 0;
    release(self);
    return -1;
}

/* keep_pages(table, ids, token indices, page_tokens) */
PyObject *keep_pages(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Places places;
    if (get_places(&places, args, count, 1) < 0)
        return NULL;
    int64_t *table = places.table.buf;
    const int32_t *ids = places.ids.buf;
    const char *from = places.row.buf;
    Py_ssize_t step = places.row.strides[0] * places.page_tokens, tokens = places.page_tokens;
    int shift = (tokens & (tokens - 1)) == 0 ? __builtin_ctzll((unsigned long long)tokens) : -1;
    for (Py_ssize_t i = 0; i < places.pages; i++) {
        int64_t index = places.row.itemsize == 8 ? *(const int64_t *)(from + i * step) : *(const int32_t *)(from + i * step);
        table[ids[i]] = shift >= 0 ? index >> shift : index / tokens;
    }
    release(&places);
    Py_RETURN_NONE;
}

/* page_tokens_of(table, ids, row for the token indices, page_tokens) */
PyObject *page_tokens_of(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Places places;
    if (get_places(&places, args, count, 0) < 0)
        return NULL;
    const int64_t *table = places.table.buf;
    const int32_t *ids = places.ids.buf;
    int64_t *to = places.row.buf;
    Py_ssize_t tokens = places.page_tokens;
    if (places.row.strides[0] != 8) {
        release(&places);
        PyErr_SetString(PyExc_ValueError, "a row without gaps is due");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < places.pages; i++) {
        int64_t first = table[ids[i]] * tokens;
        for (Py_ssize_t j = 0; j < tokens; j++)
            to[i * tokens + j] = first + j;
    }
    release(&places);
    Py_RETURN_NONE;
}
