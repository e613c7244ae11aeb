/* Steps of requests on a plain tree of one tier, each in one call: `find` and `insert` of columns.py. */
#include "core.h"

/* A descent's parts, borrowed: the path, the node that is left midway, or NULL, and the pages that match to its end. */
typedef struct {
    PyObject *whole, *path;
    Node *inside;
    long long inner, end;
} Descent;

static int descend(Descent *found, Columns *self, PyObject *root, PyObject *data, PyObject *stop)
{
    PyObject *const args[] = {root, data, stop};
    *found = (Descent){.whole = columns_descend(self, args, 3)};
    if (found->whole == NULL)
        return -1;
    PyObject *inside = PyTuple_GetItem(found->whole, 1);
    found->path = PyTuple_GetItem(found->whole, 0);
    found->inner = PyLong_AsLongLong(PyTuple_GetItem(found->whole, 2));
    Py_ssize_t nodes = PyList_Size(found->path);
    if (inside != Py_None) {
        found->inside = as_node(inside);
        found->end = found->inside == NULL ? 0 : found->inside->start + found->inner;
    } else if (nodes > 0) {
        found->end = ((Node *)PyList_GetItem(found->path, nodes - 1))->end;
    }
    if (PyErr_Occurred())
        Py_CLEAR(found->whole);
    return found->whole == NULL ? -1 : 0;
}

/* Marks a path, root first, as used. */
static int touch(Columns *self, PyObject *path)
{
    PyObject *deepest_first = PyList_GetSlice(path, 0, PyList_Size(path));
    PyObject *done = deepest_first == NULL || PyList_Reverse(deepest_first) < 0 ? NULL : columns_touch(self, deepest_first);
    Py_XDECREF(deepest_first);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *columns_find(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Descent found;
    PyObject *told = NULL;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "a root, data and where to stop are due");
    if (descend(&found, self, args[0], args[1], args[2]) < 0 || (PyList_Size(found.path) && touch(self, found.path) < 0)) {
        Py_XDECREF(found.whole);
        return NULL;
    }
    PyObject *rows = PyList_GetSlice(found.path, 0, PyList_Size(found.path)), *end = PyLong_FromLongLong(found.end);
    if (rows != NULL && end != NULL && (found.inside == NULL || PyList_Append(rows, (PyObject *)found.inside) == 0)) {
        PyObject *const of[] = {rows, end};
        PyObject *ids = columns_gather(self, of, 2);
        PyObject *inside = found.inside == NULL ? Py_None : (PyObject *)found.inside;
        told = ids == NULL ? NULL : PyTuple_Pack(4, found.path, inside, end, ids);
        Py_XDECREF(ids);
    }
    Py_XDECREF(rows);
    Py_XDECREF(end);
    Py_DECREF(found.whole);
    return told;
}

/* 1 where all `ids` are in use from here on, 0 where one was already. */
static int claim(PyObject *in_use, PyObject *ids)
{
    PyObject *page = PyObject_CallMethod(in_use, "claim", "O", ids);
    long long number = page == NULL ? 0 : PyLong_AsLongLong(page);
    Py_XDECREF(page);
    return PyErr_Occurred() ? -1 : number < 0;
}

/* The end of the path, with the rest of it split off and grown; NULL with an error. */
static Node *lengthen(Columns *self, Descent *found, PyObject *root, PyObject *data, PyObject *ids, long long pages)
{
    if (found->inside != NULL) {
        Node *front = split_node(self, found->inside, found->inner, 0);
        int failed = front == NULL || PyList_Append(found->path, (PyObject *)front) < 0;
        Py_XDECREF((PyObject *)front);
        if (failed)
            return NULL;
    }
    Py_ssize_t nodes = PyList_Size(found->path);
    if (found->end < pages) {
        PyObject *end = PyLong_FromLongLong(pages);
        PyObject *const args[] = {nodes ? PyList_GetItem(found->path, nodes - 1) : root, data, end, ids};
        PyObject *node = end == NULL ? NULL : columns_grow(self, args, 4);
        int failed = node == NULL || PyList_Append(found->path, node) < 0;
        Py_XDECREF(end);
        Py_XDECREF(node);
        if (failed)
            return NULL;
        nodes++;
    }
    return touch(self, found->path) < 0 ? NULL : (Node *)PyList_GetItem(found->path, nodes - 1);
}

PyObject *columns_insert(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Descent found;
    long long first = count == 5 ? PyLong_AsLongLong(args[3]) : -1, page_bytes = self->page_bytes;
    if (count != 5 || page_bytes < 1 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "a root, data, ids, the first page and the pages in use are due");
    long long pages = PyBytes_Size(args[1]) / page_bytes;
    if (PyErr_Occurred())
        return NULL;
    if (!pages || first < 0 || first > pages || PyBytes_Size(args[2]) != (pages - first) * ID_BYTES)
        Py_RETURN_NONE;
    PyObject *stop = PyLong_FromLongLong(pages * page_bytes);
    int failed = stop == NULL || descend(&found, self, args[0], args[1], stop) < 0;
    Py_XDECREF(stop);
    if (failed)
        return NULL;
    int able = found.end == first ? claim(args[4], args[2]) : 0;
    Node *end = able > 0 ? lengthen(self, &found, args[0], args[1], args[2], pages) : NULL;
    PyObject *told = end != NULL ? Py_NewRef((PyObject *)end) : able == 0 ? Py_NewRef(Py_None) : NULL;
    Py_DECREF(found.whole);
    return told;
}
