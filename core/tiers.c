/* Evicts from tier to tier where a tree keeps attention KV alone, by recency and by pages: what evict.py does there. */
#include "core.h"

enum { DEVICE, HOST };

/* One call: what is given up is gathered, by tier, and what is to be copied to the host, into the ids at `room`. */
typedef struct {
    Columns *columns;
    EvictableSet *device, *host;
    PyObject *freed[2], *copies, *spared;
    const char *room;
    long long room_pages;
} Eviction;

static long long pages_of(Node *node) { return node->end - node->start; }

static int append(PyObject *list, PyObject *owned)
{
    int failed = owned == NULL ? -1 : PyList_Append(list, owned);
    Py_XDECREF(owned);
    return failed;
}

/* The tree has no pages of `node` on a tier any more. */
static int take(Eviction *self, Node *node, int tier)
{
    Columns *columns = self->columns;
    PyObject **column = tier == DEVICE ? &node->pages : &node->host;
    if (((PyObject *)node == columns->trimmed && columns_whole(columns) < 0) ||
        note_removed(columns, node, 0, tier) < 0 || weigh(columns, node, -1) < 0 ||
        PyList_Append(self->freed[tier], *column) < 0)
        return -1;
    put(column, NULL);
    if (weigh(columns, node, 1) < 0 || settle(columns, node) < 0)
        return -1;
    Node *parent = tier == DEVICE ? parent_of(node) : NULL;
    if (parent == NULL)
        return tier == DEVICE ? -1 : 0;
    parent->device_children--;
    return !parent->locks && is_some(parent->pages) ? order_add(self->device->order, parent) : 0;
}

/* Takes out a childless node, which somebody else has a reference to, with all it holds. */
static int uproot(Eviction *self, Node *node)
{
    Columns *columns = self->columns;
    if ((is_some(node->pages) && take(self, node, DEVICE) < 0) || (is_some(node->host) && take(self, node, HOST) < 0))
        return -1;
    Py_ssize_t length;
    char *tokens = row_data(&node->tokens, &length);
    Node *parent = parent_of(node);
    PyObject *name = tokens == NULL || parent == NULL ? NULL : PyBytes_FromStringAndSize(tokens, columns->page_bytes);
    if (name == NULL)
        return -1;
    int failed = children_drop(parent->children, name) < 0 || strike(columns->nodes, node) < 0;
    Py_DECREF(name);
    put(&node->tokens.bytes, PyBytes_FromStringAndSize(NULL, 0));
    node->tokens.length = -1;
    put(&node->hashes, NULL);
    if (failed)
        return -1;
    return is_some(parent->parent) ? settle(columns, parent) : forget_root(columns, parent);
}

static int has_children(Node *node) { return children_count(node->children) > 0; }

/* Takes out a childless node, and those above that nothing is left of to find. */
static int uproot_upwards(Eviction *self, Node *node)
{
    Py_INCREF((PyObject *)node);
    for (;;) {
        Node *parent = parent_of(node);
        Py_XINCREF((PyObject *)parent);
        int failed = parent == NULL || uproot(self, node) < 0;
        Py_DECREF((PyObject *)node);
        if (failed) {
            Py_XDECREF((PyObject *)parent);
            return -1;
        }
        node = parent;
        if (has_children(node) || node->locks || node->host_locks || is_some(node->pages) || is_some(node->host)) {
            Py_DECREF((PyObject *)node);
            return 0;
        }
    }
}

/* All nodes below, parents first, as a new list; NULL with an error, or without one where somebody needs one of them. */
static PyObject *unused_below(Node *node)
{
    PyObject *below = PyList_New(0), *waiting = children_values(node->children);
    while (below != NULL && waiting != NULL && PyList_Size(waiting)) {
        Py_ssize_t last = PyList_Size(waiting) - 1;
        Node *each = as_node(PyList_GetItem(waiting, last));
        if (each == NULL || each->locks || each->host_locks || PyList_Append(below, (PyObject *)each) < 0) {
            Py_CLEAR(below);
            break;
        }
        PyObject *children = children_values(each->children);
        if (children == NULL || PyList_SetSlice(waiting, last, last + 1, children) < 0)
            Py_CLEAR(below);
        Py_XDECREF(children);
    }
    if (waiting == NULL)
        Py_CLEAR(below);
    Py_XDECREF(waiting);
    return below;
}

/* Whether a leaf of the device, or `need` pages of its end, can go. Of one that would be deleted, what hangs below it on
 * the host goes first. -1 with an error. */
static int may_go(Eviction *self, Node *node, long long need)
{
    long long pages = pages_of(node);
    if (is_some(node->host) || (self->room_pages && self->room_pages >= (need < pages ? need : pages)))
        return 1;
    if (node->host_locks)
        return 0;
    if (!has_children(node))
        return 1;
    PyObject *below = unused_below(node);
    if (below == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int able = 1;
    for (Py_ssize_t i = PyList_Size(below); able > 0 && i-- > 0;)
        able = uproot(self, (Node *)PyList_GetItem(below, i)) < 0 ? -1 : 1;
    Py_DECREF(below);
    return able;
}

/* A victim without a copy on the host gets the first ids that are left of the room. */
static int copy_out(Eviction *self, Node *node)
{
    Columns *columns = self->columns;
    long long pages = pages_of(node);
    if ((PyObject *)node == columns->trimmed && columns_whole(columns) < 0)
        return -1;
    PyObject *ids = PyBytes_FromStringAndSize(self->room, pages * ID_BYTES);
    if (ids == NULL || append(self->copies, Py_BuildValue("LOO", node->start, node->pages, ids)) < 0 ||
        weigh(columns, node, -1) < 0) {
        Py_XDECREF(ids);
        return -1;
    }
    self->room += pages * ID_BYTES, self->room_pages -= pages;
    put(&node->host, ids);
    return weigh(columns, node, 1) < 0 || settle(columns, node) < 0 ? -1 : note_stored(columns, node, HOST);
}

/* The part of `node` that has to go: its end. The front takes its place in the order. */
static int keep_front(Columns *columns, Node *node, long long need, EvictableSet *set)
{
    long long pages = pages_of(node);
    if (need >= pages)
        return 0;
    Node *front = split_node(columns, node, pages - need, 0);
    if (front == NULL)
        return -1;
    front->used = node->used;
    int failed = linked_put_first(set->order, front);
    Py_DECREF((PyObject *)front);
    return failed;
}

/* A leaf of the device, or its end, of which `need` pages are due. */
static int give_up(Eviction *self, Node *node, long long need)
{
    if (keep_front(self->columns, node, need, self->device) < 0)
        return -1;
    if (!is_some(node->host) && self->room_pages >= pages_of(node) && copy_out(self, node) < 0)
        return -1;
    return is_some(node->host) ? take(self, node, DEVICE) : uproot_upwards(self, node);
}

/* How many of so many pages are asked for by any number. */
static long long within(long long pages, long long most) { return pages < 0 ? 0 : pages > most ? most : pages; }

static int evict_device(Eviction *self, long long pages)
{
    EvictableSet *device = self->device;
    long long aim = device->evictable - within(pages, device->evictable);
    Node *node;
    while (device->evictable > aim && (node = linked_first(device->order)) != NULL) {
        long long need = device->evictable - aim;
        int leaf = !node->device_children, able = leaf ? may_go(self, node, need) : 0;
        if (able < 0)
            return -1;
        if (!able) {
            /* One with children comes back with the end of the last; where that is spared, it keeps its place. */
            if ((leaf || PyList_Size(self->spared)) && PyList_Append(self->spared, (PyObject *)node) < 0)
                return -1;
            order_discard(device->order, node);
        } else if (!is_some(node->host) && !self->room_pages && need < pages_of(node)) {
            PyObject *ids = PyBytes_FromStringAndSize(NULL, need * ID_BYTES);
            if (ids == NULL || note_removed(self->columns, node, pages_of(node) - need, DEVICE) < 0 || trim(self->columns, node, need, PyBytes_AsString(ids)) < 0) {
                Py_XDECREF(ids);
                return -1;
            }
            if (append(self->freed[DEVICE], ids) < 0)
                return -1;
        } else if (give_up(self, node, need) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t i = PyList_Size(self->spared); i-- > 0;) {
        node = (Node *)PyList_GetItem(self->spared, i);
        /* One above others may have gone in this very call, after its last child. */
        if (is_some(node->pages) && linked_put_first(device->order, node) < 0)
            return -1;
    }
    return 0;
}

static int evict_host(Eviction *self, long long pages)
{
    EvictableSet *host = self->host;
    Node *node;
    while (pages > 0 && (node = recency_first((Recency *)self->columns->doubles)) != NULL) {
        pages -= pages_of(node);
        if (take(self, node, HOST) < 0)
            return -1;
    }
    long long aim = host->evictable - within(pages, host->evictable);
    while (host->evictable > aim && (node = linked_first(host->order)) != NULL) {
        if (has_children(node)) {
            order_discard(host->order, node);
        } else if (keep_front(self->columns, node, host->evictable - aim, host) < 0 ||
                   uproot_upwards(self, node) < 0) {
            return -1;
        }
    }
    return 0;
}

static int eviction_begin(Eviction *self, Columns *columns)
{
    memset(self, 0, sizeof *self);
    self->columns = columns;
    self->device = as_set(columns->device), self->host = self->device == NULL ? NULL : as_set(columns->host);
    if (self->host == NULL)
        return -1;
    if (!is_linked(self->device->order) || !is_linked(self->host->order) || Py_TYPE(columns->doubles) != RecencyType) {
        PyErr_SetString(PyExc_TypeError, "these steps evict by an order of this core");
        return -1;
    }
    PyObject **lists[] = {&self->freed[DEVICE], &self->freed[HOST], &self->copies, &self->spared};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if ((*lists[i] = PyList_New(0)) == NULL)
            return -1;
    return 0;
}

static PyObject *joined(PyObject *rows)
{
    if (PyList_Size(rows) == 1)
        return Py_NewRef(PyList_GetItem(rows, 0));
    PyObject *none = PyBytes_FromStringAndSize(NULL, 0);
    PyObject *all = none == NULL ? NULL : PyObject_CallMethod(none, "join", "O", rows);
    Py_XDECREF(none);
    return all;
}

/* (ids given up on the device, those on the host, copies to carry out before: (first page, ids here, ids there)). */
static PyObject *eviction_end(Eviction *self, int failed)
{
    PyObject *device = failed ? NULL : joined(self->freed[DEVICE]);
    PyObject *host = device == NULL ? NULL : joined(self->freed[HOST]);
    PyObject *told = host == NULL ? NULL : PyTuple_Pack(3, device, host, self->copies);
    PyObject *all[] = {device, host, self->freed[DEVICE], self->freed[HOST], self->copies, self->spared};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        Py_XDECREF(all[i]);
    return told;
}

PyObject *columns_evict_device(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Eviction eviction;
    char *room = NULL;
    Py_ssize_t size = 0;
    long long pages = count == 2 ? PyLong_AsLongLong(args[0]) : -1;
    if (count != 2)
        PyErr_SetString(PyExc_TypeError, "pages and the room for them are due");
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[1], &room, &size) < 0)
        return NULL;
    int failed = eviction_begin(&eviction, self) < 0;
    eviction.room = room, eviction.room_pages = size / ID_BYTES;
    return eviction_end(&eviction, failed || evict_device(&eviction, pages) < 0);
}

PyObject *columns_evict_host(Columns *self, PyObject *value)
{
    Eviction eviction;
    long long pages = PyLong_AsLongLong(value);
    if (PyErr_Occurred())
        return NULL;
    int failed = eviction_begin(&eviction, self) < 0;
    return eviction_end(&eviction, failed || evict_host(&eviction, pages) < 0);
}
