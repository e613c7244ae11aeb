/* A look-up on one tier in one call: `find` of columns.py, and the same with further components. */
#include "core.h"

int touch_up(Columns *self, Node *node)
{
    EvictableSet *device = as_set(self->device);
    if (device == NULL)
        return -1;
    if (Py_TYPE(device->order) != RecencyType || self->hosted) {
        PyObject *path = node_path(node, NULL), *done = path == NULL ? NULL : columns_touch(self, path);
        Py_XDECREF(path);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    self->clock++;
    for (; node != NULL && is_some(node->parent); node = parent_of(node)) {
        node->used = self->clock;
        recency_touch((Recency *)device->order, node);
    }
    return node == NULL ? -1 : 0;
}

/* The device ids of the first `end` pages of the path to `node`; NULL with an error. */
static PyObject *ids_of_path(Node *node, long long end)
{
    PyObject *ids = PyBytes_FromStringAndSize(NULL, end * ID_BYTES);
    char *to = ids == NULL ? NULL : PyBytes_AsString(ids), *own;
    Py_ssize_t size;
    for (; to != NULL && node != NULL && is_some(node->parent); node = parent_of(node)) {
        long long length = (end < node->end ? end : node->end) - node->start;
        if (row_of(node->pages, &own, &size) < 0)
            break;
        if (size < length * ID_BYTES) {
            PyErr_Format(PyExc_ValueError, "node %lld has fewer ids than pages", node->id);
            break;
        }
        memcpy(to + node->start * ID_BYTES, own, length * ID_BYTES);
    }
    if (PyErr_Occurred())
        Py_CLEAR(ids);
    return ids;
}

/* The node of a path that ends in `node` which has the last page before `end`, or the root; NULL with an error. */
static Node *node_before(Node *node, long long end)
{
    while (node != NULL && is_some(node->parent) && node->start >= end)
        node = parent_of(node);
    return node;
}

PyObject *columns_find(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Reached found;
    Node *root = walk_asked(self, args, count, &found);
    if (root == NULL)
        return NULL;
    Node *last = found.inside != NULL ? found.inside : found.last;
    long long end = found.end;
    if (usable_end(self, last, found.nodes + (found.inside != NULL), &end) < 0)
        return NULL;
    Node *node = node_before(last, end);
    if (node == NULL)
        return NULL;
    Node *used = end < found.end ? node : found.last;
    if (found.nodes && (touch_up(self, found.last) < 0 || touch_held(self, used) < 0))
        return NULL;
    PyObject *ends[] = {last == root ? Py_None : (PyObject *)last, node == root ? Py_None : (PyObject *)node};
    PyObject *rest[] = {Py_NewRef(ends[0]), PyLong_FromLongLong(found.end), PyLong_FromSsize_t(found.nodes),
                        Py_NewRef(ends[1]), PyLong_FromLongLong(end), ids_of_path(node, end), held_at(self, node, end)};
    enum { FIELDS = sizeof rest / sizeof *rest };
    PyObject *told = PyTuple_New(FIELDS);
    for (Py_ssize_t i = 0; i < FIELDS; i++) {
        if (told == NULL)
            Py_XDECREF(rest[i]);
        else if (rest[i] == NULL || PyTuple_SetItem(told, i, rest[i]) < 0)
            Py_CLEAR(told);
    }
    return told;
}
