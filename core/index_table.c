/* PageTable: what a HostIndices of index_table.py keeps, a table in host memory from page id to page number. */
#include "core.h"

PyTypeObject *PageTableType;

typedef struct {
    PyObject_HEAD
    Py_ssize_t page_tokens, size, kept;
    int64_t *pages; /* by id */
    int32_t *ids;   /* each once: `kept` that are in use or were, then those that `keep` gives next */
} PageTable;

/* A row of numbers of 4 bytes, or of 4 or 8 where `itemsize` is 0; -1 with an error. */
static int get_row(PyObject *object, Py_buffer *view, Py_ssize_t itemsize)
{
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES) < 0)
        return -1;
    if (view->ndim == 1 && (view->itemsize == itemsize || (itemsize == 0 && (view->itemsize == 4 || view->itemsize == 8))))
        return 0;
    PyErr_Format(PyExc_ValueError, "a row of numbers is due, got %d axes of %zd bytes", view->ndim, view->itemsize);
    PyBuffer_Release(view);
    return -1;
}

/* Page ids, all of them in the table; -1 with an error. */
static int get_ids(const PageTable *self, PyObject *object, Py_buffer *view)
{
    if (get_row(object, view, ID_BYTES) < 0)
        return -1;
    const int32_t *ids = view->buf;
    Py_ssize_t count = view->shape[0];
    if (view->strides[0] != ID_BYTES)
        PyErr_SetString(PyExc_ValueError, "ids without gaps are due");
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++)
        if ((size_t)ids[i] >= (size_t)self->size)
            PyErr_Format(PyExc_ValueError, "page %d is not in a table of %zd", (int)ids[i], self->size);
    if (!PyErr_Occurred())
        return 0;
    PyBuffer_Release(view);
    return -1;
}

/* Writes the page numbers of `row` from its item `first` on, in order of the ids. */
static void write_pages(PageTable *self, const int32_t *ids, Py_ssize_t count, const Py_buffer *row, Py_ssize_t first)
{
    const char *from = (const char *)row->buf + first * row->strides[0];
    Py_ssize_t tokens = self->page_tokens, step = row->strides[0] * tokens;
    int shift = (tokens & (tokens - 1)) == 0 ? __builtin_ctzll((unsigned long long)tokens) : -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t index = row->itemsize == 8 ? *(const int64_t *)(from + i * step) : *(const int32_t *)(from + i * step);
        self->pages[ids[i]] = shift >= 0 ? index >> shift : index / tokens;
    }
}

/* Makes room for `size` ids; -1 with an error. */
static int make_room(PageTable *self, Py_ssize_t size)
{
    int64_t *pages = size <= INT32_MAX ? realloc(self->pages, (size_t)size * sizeof *pages) : NULL;
    self->pages = pages == NULL ? self->pages : pages;
    int32_t *ids = pages == NULL ? NULL : realloc(self->ids, (size_t)size * sizeof *ids);
    if (ids == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(pages + self->size, 0, (size_t)(size - self->size) * sizeof *pages);
    for (self->ids = ids; self->size < size; self->size++)
        ids[self->size] = (int32_t)self->size;
    return 0;
}

/* PageTable(tokens a page, pages) */
static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names))
{
    Py_ssize_t page_tokens, pages;
    if (!PyArg_ParseTuple(args, "nn", &page_tokens, &pages))
        return NULL;
    if (page_tokens < 1 || pages < 1)
        return PyErr_Format(PyExc_ValueError, "a table of %zd pages of %zd tokens", pages, page_tokens);
    PageTable *self = (PageTable *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->page_tokens = page_tokens;
        if (make_room(self, pages) < 0)
            Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void table_dealloc(PageTable *self)
{
    free(self->pages);
    free(self->ids);
    object_free((PyObject *)self);
}

static Py_ssize_t table_length(PageTable *self) { return self->kept; }

/* keep(token indices, first token, stop): new ids, as bytes. */
static PyObject *table_keep(PageTable *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer row;
    Py_ssize_t first = count == 3 ? PyLong_AsSsize_t(args[1]) : -1, stop;
    if (first < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "token indices, a first token and where to stop are due");
        return NULL;
    }
    if (get_row(args[0], &row, 0) < 0)
        return NULL;
    stop = args[2] == Py_None ? row.shape[0] : PyLong_AsSsize_t(args[2]);
    stop = stop < row.shape[0] ? stop : row.shape[0];
    Py_ssize_t pages = stop > first ? (stop - first) / self->page_tokens : 0, size = self->size;
    while (size < self->kept + pages)
        size *= 2;
    PyObject *ids = NULL;
    if (!PyErr_Occurred() && (size == self->size || make_room(self, size) == 0))
        ids = PyBytes_FromStringAndSize((const char *)(self->ids + self->kept), pages * ID_BYTES);
    if (ids != NULL && pages) {
        write_pages(self, self->ids + self->kept, pages, &row, first);
        self->kept += pages;
    }
    PyBuffer_Release(&row);
    return ids;
}

/* replace(ids, token indices) */
static PyObject *table_replace(PageTable *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer ids, row;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "ids and token indices are due");
    if (get_ids(self, args[0], &ids) < 0)
        return NULL;
    if (get_row(args[1], &row, 0) == 0) {
        Py_ssize_t pages = ids.shape[0];
        if (row.shape[0] / self->page_tokens < pages)
            PyErr_Format(PyExc_ValueError, "%zd items are not %zd pages", row.shape[0], pages);
        else
            write_pages(self, ids.buf, pages, &row, 0);
        PyBuffer_Release(&row);
    }
    PyBuffer_Release(&ids);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* The token indices of pages, as a bytearray of 64-bit numbers. */
static PyObject *table_tokens(PageTable *self, PyObject *of)
{
    Py_buffer ids;
    if (get_ids(self, of, &ids) < 0)
        return NULL;
    Py_ssize_t pages = ids.shape[0], tokens = self->page_tokens;
    if (pages && tokens > PY_SSIZE_T_MAX / 8 / pages) {
        PyBuffer_Release(&ids);
        return PyErr_NoMemory();
    }
    PyObject *row = PyByteArray_FromStringAndSize(NULL, pages * tokens * 8);
    int64_t *to = row == NULL ? NULL : (int64_t *)PyByteArray_AsString(row);
    for (Py_ssize_t i = 0; to != NULL && i < pages; i++) {
        int64_t first = self->pages[((const int32_t *)ids.buf)[i]] * tokens;
        for (Py_ssize_t j = 0; j < tokens; j++)
            to[i * tokens + j] = first + j;
    }
    PyBuffer_Release(&ids);
    return row;
}

/* Frees ids, which `keep` gives first from here on. Their page numbers, as a bytearray of 64-bit numbers. */
static PyObject *table_forget(PageTable *self, PyObject *of)
{
    Py_buffer ids;
    if (get_ids(self, of, &ids) < 0)
        return NULL;
    Py_ssize_t pages = ids.shape[0];
    PyObject *row = NULL;
    if (pages > self->kept)
        PyErr_Format(PyExc_ValueError, "%zd pages to forget, of %zd that are kept", pages, self->kept);
    else
        row = PyByteArray_FromStringAndSize(NULL, pages * 8);
    if (row != NULL) {
        int64_t *to = (int64_t *)PyByteArray_AsString(row);
        for (Py_ssize_t i = 0; i < pages; i++)
            to[i] = self->pages[((const int32_t *)ids.buf)[i]];
        self->kept -= pages;
        memcpy(self->ids + self->kept, ids.buf, (size_t)pages * ID_BYTES);
    }
    PyBuffer_Release(&ids);
    return row;
}

static PyMethodDef table_methods[] = {{"keep", (PyCFunction)(void (*)(void))table_keep, METH_FASTCALL, NULL},
                                      {"replace", (PyCFunction)(void (*)(void))table_replace, METH_FASTCALL, NULL},
                                      {"tokens", (PyCFunction)table_tokens, METH_O, NULL},
                                      {"forget", (PyCFunction)table_forget, METH_O, NULL},
                                      {NULL, NULL, 0, NULL}};
static PyType_Slot table_slots[] = {{Py_tp_new, table_new},
                                    {Py_tp_dealloc, table_dealloc},
                                    {Py_sq_length, table_length},
                                    {Py_tp_methods, table_methods},
                                    {0, NULL}};
PyType_Spec page_table_spec = {"kvmover._core.PageTable", sizeof(PageTable), 0, Py_TPFLAGS_DEFAULT, table_slots};
