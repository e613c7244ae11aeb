/* Storage of a replay, and what it looks for in rows of pages: see simulated_tiers.py. Uses are a ring through all pages.
 */
#include "core.h"

PyTypeObject *SimulatedStorageType;

/* Page p stands at p + 1; what is at 0 comes before the page used least recently and behind the one used last. */
typedef struct {
    uint32_t before, after;
} Use;

static const uint32_t ABSENT = UINT32_MAX;

typedef struct {
    PyObject_HEAD
    Use *uses;
    size_t room;
    long long limit, pages;
} SimulatedStorage;

/* A row of page numbers, each taken to be without a sign. */
typedef struct {
    Py_buffer view;
    Py_ssize_t count;
} Pages;

static int pages_open(Pages *pages, PyObject *row)
{
    if (PyObject_GetBuffer(row, &pages->view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (!is_row_of_words(&pages->view)) {
        PyErr_Format(PyExc_TypeError, "one row of page numbers is due, got items of %zd bytes", pages->view.itemsize);
        PyBuffer_Release(&pages->view);
        return -1;
    }
    pages->count = pages->view.len / pages->view.itemsize;
    return 0;
}

static uint64_t page_at(const Pages *pages, Py_ssize_t i)
{
    return pages->view.itemsize == 4 ? ((const uint32_t *)pages->view.buf)[i] : ((const uint64_t *)pages->view.buf)[i];
}

static void ring_out(Use *uses, uint32_t at)
{
    uses[uses[at].before].after = uses[at].after;
    uses[uses[at].after].before = uses[at].before;
    uses[at].before = uses[at].after = ABSENT;
}

static void ring_in_last(Use *uses, uint32_t at)
{
    uses[at] = (Use){uses[0].before, 0};
    uses[uses[0].before].after = at;
    uses[0].before = at;
}

/* Makes room for all of `pages`; -1 with an error. */
static int reach(SimulatedStorage *self, const Pages *pages)
{
    uint64_t most = 0;
    for (Py_ssize_t i = 0; i < pages->count; i++)
        most = page_at(pages, i) > most ? page_at(pages, i) : most;
    if (most >= ABSENT - 1) {
        PyErr_Format(PyExc_ValueError, "no page has the number %llu", (unsigned long long)most);
        return -1;
    }
    if (most + 2 <= self->room)
        return 0;
    size_t room = most + 2 > 2 * self->room ? (size_t)most + 2 : 2 * self->room;
    Use *uses = realloc(self->uses, room * sizeof *uses);
    if (uses == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(uses + self->room, 0xff, (room - self->room) * sizeof *uses);
    self->uses = uses, self->room = room;
    return 0;
}

/* The first `count` pages were used, deepest first, so that a prefix always outlives what follows it. */
static void touch(SimulatedStorage *self, const Pages *pages, Py_ssize_t count)
{
    while (count-- > 0) {
        uint32_t at = (uint32_t)page_at(pages, count) + 1;
        if (self->uses[at].after == ABSENT)
            self->pages++;
        else
            ring_out(self->uses, at);
        ring_in_last(self->uses, at);
    }
}

static PyObject *storage_leading(SimulatedStorage *self, PyObject *row)
{
    Pages pages;
    Py_ssize_t count = 0;
    if (pages_open(&pages, row) < 0)
        return NULL;
    while (count < pages.count && page_at(&pages, count) < self->room - 1 &&
           self->uses[page_at(&pages, count) + 1].after != ABSENT)
        count++;
    touch(self, &pages, count);
    PyBuffer_Release(&pages.view);
    return PyLong_FromSsize_t(count);
}

static PyObject *storage_put(SimulatedStorage *self, PyObject *row)
{
    Pages pages;
    if (pages_open(&pages, row) < 0)
        return NULL;
    int failed = reach(self, &pages);
    if (!failed) {
        touch(self, &pages, pages.count);
        for (; self->pages > self->limit; self->pages--)
            ring_out(self->uses, self->uses[0].after);
    }
    PyBuffer_Release(&pages.view);
    return failed ? NULL : Py_NewRef(Py_None);
}

static Py_ssize_t storage_length(SimulatedStorage *self) { return (Py_ssize_t)self->pages; }

static PyObject *storage_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names))
{
    long long limit;
    if (!PyArg_ParseTuple(args, "L", &limit))
        return NULL;
    if (limit < 0)
        return PyErr_Format(PyExc_ValueError, "storage of %lld pages", limit);
    SimulatedStorage *self = (SimulatedStorage *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->limit = limit, self->room = 1 << 16;
    self->uses = malloc(self->room * sizeof *self->uses);
    if (self->uses == NULL) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    memset(self->uses, 0xff, self->room * sizeof *self->uses);
    self->uses[0] = (Use){0, 0};
    return (PyObject *)self;
}

static void storage_dealloc(SimulatedStorage *self)
{
    free(self->uses);
    object_free((PyObject *)self);
}

/* Those of a row of pages that a number divides, as a list. */
PyObject *multiples(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Pages pages;
    unsigned long long of = count == 2 ? PyLong_AsUnsignedLongLong(args[1]) : 0;
    if (PyErr_Occurred() || of == 0 || of > UINT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "pages and a number of 32 bits above 0 are due");
        return NULL;
    }
    if (pages_open(&pages, args[0]) < 0)
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < pages.count; i++) {
        uint64_t page = page_at(&pages, i);
        if (page > UINT32_MAX ? page % of : (uint32_t)page % (uint32_t)of)
            continue;
        PyObject *number = PyLong_FromUnsignedLongLong(page);
        if (number == NULL || PyList_Append(found, number) < 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    PyBuffer_Release(&pages.view);
    return found;
}

static PyMemberDef storage_members[] = {{"limit", T_LONGLONG, offsetof(SimulatedStorage, limit), READONLY, NULL},
                                        {NULL, 0, 0, 0, NULL}};
static PyMethodDef storage_methods[] = {{"leading", (PyCFunction)storage_leading, METH_O, NULL},
                                        {"put", (PyCFunction)storage_put, METH_O, NULL},
                                        {NULL, NULL, 0, NULL}};
static PyType_Slot storage_slots[] = {{Py_tp_new, storage_new},         {Py_tp_dealloc, storage_dealloc},
                                      {Py_sq_length, storage_length},   {Py_tp_members, storage_members},
                                      {Py_tp_methods, storage_methods}, {0, NULL}};
PyType_Spec simulated_storage_spec = {"kvmover._core.SimulatedStorage", sizeof(SimulatedStorage), 0,
                                      Py_TPFLAGS_DEFAULT, storage_slots};
