/* Steps of requests on a plain tree of one tier, each in one call: `find` and `insert` of columns.py. */
#include "core.h"

/* Marks a node and all above it as used, deepest first. -1 with an error. */
static int touch_up(Columns *self, Node *node)
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

PyObject *columns_find(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Reached found;
    Node *root = walk_asked(self, args, count, &found);
    if (root == NULL)
        return NULL;
    if (found.nodes && touch_up(self, found.last) < 0)
        return NULL;
    Node *node = found.inside != NULL ? found.inside : found.last;
    PyObject *ids = ids_of_path(node, found.end), *end = node == root ? Py_None : (PyObject *)node;
    return ids == NULL ? NULL : Py_BuildValue("OLNn", end, found.end, ids, found.nodes);
}

/* The end of the path, with the rest of it split off and grown, borrowed; NULL with an error. */
static Node *lengthen(Columns *self, Reached *found, PyObject *data, PyObject *ids, long long pages)
{
    Node *end = found->last;
    if (found->inside != NULL) {
        end = split_node(self, found->inside, found->inner, 0);
        if (end == NULL)
            return NULL;
        Py_DECREF((PyObject *)end); /* the tree has it */
    }
    if (found->end < pages) {
        PyObject *stop = PyLong_FromLongLong(pages);
        PyObject *const args[] = {(PyObject *)end, data, stop, ids};
        end = stop == NULL ? NULL : (Node *)columns_grow(self, args, 4);
        Py_XDECREF(stop);
        if (end == NULL)
            return NULL;
        Py_DECREF((PyObject *)end);
    }
    return touch_up(self, end) < 0 ? NULL : end;
}

PyObject *columns_insert(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Reached found;
    Node *root = count == 5 ? as_node(args[0]) : NULL;
    long long first = root != NULL ? PyLong_AsLongLong(args[3]) : -1, page_bytes = self->page_bytes;
    if (root == NULL || page_bytes < 1 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "a root, data, ids, the first page and the pages in use are due");
    long long pages = PyBytes_Size(args[1]) / page_bytes;
    if (PyErr_Occurred())
        return NULL;
    if (!pages || first < 0 || first > pages || PyBytes_Size(args[2]) != (pages - first) * ID_BYTES)
        Py_RETURN_NONE;
    PyObject *stop = PyLong_FromLongLong(pages * page_bytes);
    int failed = stop == NULL || walk_down(self, root, args[1], stop, &found) < 0;
    Py_XDECREF(stop);
    if (failed)
        return NULL;
    int able = found.end == first ? claim_ids(args[4], args[2]) : 0;
    if (able <= 0)
        return able < 0 ? NULL : Py_NewRef(Py_None);
    Node *end = lengthen(self, &found, args[1], args[2], pages);
    return end == NULL ? NULL : Py_NewRef((PyObject *)end);
}
