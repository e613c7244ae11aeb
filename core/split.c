/* Cuts a node in two: see `front` and `split` of columns.py. */
#include "core.h"

/* Sets `to` to `length` bytes of a column from `from` on; to NULL where the column has no value. */
static int part(PyObject **to, PyObject *column, long long from, long long length)
{
    char *row;
    Py_ssize_t size;
    PyObject *cut = NULL;
    if (is_some(column)) {
        if (row_of(column, &row, &size) < 0)
            return -1;
        from = from > size ? size : from;
        cut = PyBytes_FromStringAndSize(row + from, length > size - from ? size - from : length);
        if (cut == NULL)
            return -1;
    }
    put(to, cut);
    return 0;
}

static int front_held(Columns *self, Node *front, Node *node, long long ids)
{
    for (Py_ssize_t i = 0; i < held_count(node); i++) {
        ComponentPages *held = held_of(node, i), *mine = held_of(front, i);
        int counted = is_per_page(self, i);
        if (held == NULL || mine == NULL || counted < 0)
            return -1;
        if (!counted)
            continue;
        if (part(&mine->pages, held->pages, 0, ids) < 0 || part(&mine->host, held->host, 0, ids) < 0)
            return -1;
        mine->locks = held->locks, mine->host_locks = held->host_locks, mine->busy = held->busy;
    }
    return 0;
}

static Node *front_of(Columns *self, Node *node, long long pages, long long id)
{
    PyObject *none = PyBytes_FromStringAndSize(NULL, 0);
    Node *front = none == NULL ? NULL : columns_make(self, id, node->parent, none, node->start, node->start + pages);
    Py_XDECREF(none);
    if (front == NULL)
        return NULL;
    front->hits = node->hits, front->used = node->used, front->created = node->created;
    put(&front->priority, Py_XNewRef(node->priority));
    front->locks = node->locks > 0, front->host_locks = node->host_locks > 0;
    front->use = node->use, front->backing = node->backing, front->loading = node->loading;
    if (part(&front->pages, node->pages, 0, pages * ID_BYTES) < 0 ||
        part(&front->host, node->host, 0, pages * ID_BYTES) < 0 ||
        part(&front->hashes, node->hashes, 0, pages * HASH_BYTES) < 0 ||
        front_held(self, front, node, pages * ID_BYTES) < 0)
        Py_CLEAR(front);
    return front;
}

/* A node with a parent, and pages that are some of it; NULL with an error for anything else. */
static Node *cut_of(PyObject *const *args, Py_ssize_t count, long long *pages, long long *id)
{
    Node *node = count == 3 ? as_node(args[0]) : NULL;
    *pages = node == NULL ? 0 : PyLong_AsLongLong(args[1]);
    *id = node == NULL || PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (node == NULL || !is_some(node->parent) || *pages < 0 || *pages > node->end - node->start) {
        PyErr_SetString(PyExc_ValueError, "a node below a root, some of its pages and an id are due");
        return NULL;
    }
    return node;
}

PyObject *columns_front(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    long long pages, id;
    Node *node = cut_of(args, count, &pages, &id);
    return node == NULL ? NULL : (PyObject *)front_of(self, node, pages, id);
}

/* The end keeps what `front` did not take. */
static int keep_end(Columns *self, Node *node, long long pages)
{
    const long long all = LLONG_MAX;
    if (part(&node->pages, node->pages, pages * ID_BYTES, all) < 0 ||
        part(&node->host, node->host, pages * ID_BYTES, all) < 0 ||
        part(&node->hashes, node->hashes, pages * HASH_BYTES, all) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < held_count(node); i++) {
        ComponentPages *held = held_of(node, i);
        int counted = is_per_page(self, i);
        if (held == NULL || counted < 0 ||
            (counted && (part(&held->pages, held->pages, pages * ID_BYTES, all) < 0 ||
                         part(&held->host, held->host, pages * ID_BYTES, all) < 0)))
            return -1;
    }
    return 0;
}

/* Puts `node` under its parent's, or another's, name for the page at `page`. */
static int name_child(Node *parent, const char *page, Py_ssize_t page_bytes, Node *node)
{
    PyObject *children = node_children(parent, NULL);
    PyObject *name = children == NULL ? NULL : PyBytes_FromStringAndSize(page, page_bytes);
    int failed = name == NULL ? -1 : children_put(children, name, (PyObject *)node);
    Py_XDECREF(name);
    Py_XDECREF(children);
    return failed;
}

Node *split_node(Columns *self, Node *node, long long pages, long long id)
{
    if ((PyObject *)node == self->trimmed && columns_whole(self) < 0)
        return NULL;
    Py_ssize_t page_bytes = (Py_ssize_t)self->page_bytes, cut = (Py_ssize_t)pages * page_bytes, length;
    char *data = row_data(&node->tokens, &length);
    if (data == NULL || cut < page_bytes || length < cut + page_bytes) {
        PyErr_Format(PyExc_ValueError, "node %lld has no page before and after %lld", node->id, pages);
        return NULL;
    }
    Node *parent = as_node(node->parent), *front = front_of(self, node, pages, id ? id : self->next_id);
    if (parent == NULL || front == NULL)
        goto failed;
    self->next_id += !id;
    front->used = self->clock;
    put(&front->tokens.bytes, Py_NewRef(node->tokens.bytes));
    front->tokens.at = node->tokens.at, front->tokens.length = node->tokens.length;
    if (row_cut(&front->tokens, 0, cut) < 0 || enter(self->nodes, front) < 0 ||
        name_child(parent, data, page_bytes, front) < 0 || name_child(front, data + cut, page_bytes, node) < 0)
        goto failed;
    put(&node->parent, Py_NewRef((PyObject *)front));
    if (row_cut(&node->tokens, cut, length - cut) < 0 || keep_end(self, node, pages) < 0)
        goto failed;
    node->start = front->end;
    front->device_children = is_some(node->pages);
    if (settle(self, front) < 0)
        goto failed;
    return front;
failed:
    Py_XDECREF((PyObject *)front);
    return NULL;
}

PyObject *columns_split(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    long long pages, id;
    Node *node = cut_of(args, count, &pages, &id);
    return node == NULL ? NULL : (PyObject *)split_node(self, node, pages, id);
}
