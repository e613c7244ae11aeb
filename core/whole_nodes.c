/* Evicts by whole nodes on one tier, where a tree has further components: what evict.py does there. */
#include "core.h"

enum { DEVICE };

/* Freed ids of attention KV or of a component. */
typedef struct {
    char *ids;
    Py_ssize_t size, room;
} Freed;

/* The freed ids of attention KV, and behind them those of each component. At most `left` more nodes are given up. */
typedef struct {
    Columns *columns;
    EvictableSet *device;
    Py_ssize_t count;
    long long left;
    Freed *freed;
} Eviction;

/* Where so many further bytes of ids have room; NULL with an error. */
static char *room_for(Freed *freed, Py_ssize_t size)
{
    if (freed->size + size > freed->room) {
        Py_ssize_t room = 2 * freed->room > freed->size + size ? 2 * freed->room : freed->size + size;
        char *ids = PyMem_Realloc(freed->ids, room);
        if (ids == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        freed->ids = ids, freed->room = room;
    }
    return freed->ids + freed->size;
}

/* Takes a node's ids of component `i`. */
static int take(Eviction *self, Node *node, Py_ssize_t i)
{
    ComponentPages *held = held_of(node, i);
    Freed *freed = self->freed + 1 + i;
    char *ids, *to;
    Py_ssize_t size;
    if (held == NULL || row_of(held->pages, &ids, &size) < 0 || (to = room_for(freed, size)) == NULL ||
        weigh(self->columns, node, -1) < 0)
        return -1;
    memcpy(to, ids, size);
    freed->size += size;
    put(&held->pages, NULL);
    return weigh(self->columns, node, 1) < 0 || settle(self->columns, node) < 0 ? -1 : 0;
}

/* Takes out a leaf with all it holds. */
static int evict_leaf(Eviction *self, Node *node)
{
    Py_ssize_t size = (Py_ssize_t)(node->end - node->start) * ID_BYTES;
    if (note_removed(self->columns, node, 0, DEVICE) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        ComponentPages *held = held_of(node, i);
        if (held == NULL || (is_some(held->pages) && take(self, node, i) < 0))
            return -1;
    }
    char *to = room_for(self->freed, size);
    self->freed->size += to == NULL ? 0 : size;
    return to == NULL ? -1 : uproot_leaf(self->columns, self->device, node, to);
}

static int evict_leaves(Eviction *self, long long pages)
{
    EvictableSet *device = self->device;
    long long aim = device->evictable - pages;
    Node *node;
    while (device->evictable > aim && self->left > 0 && (node = linked_first(device->order)) != NULL) {
        if (node->device_children) { /* it comes back with the end of its last child */
            order_discard(device->order, node);
            continue;
        }
        if (evict_leaf(self, node) < 0)
            return -1;
        self->left--;
    }
    return 0;
}

/* Makes `node` a tombstone of a component, and of those of lower rank. */
static int bury(Eviction *self, Node *node, Py_ssize_t i)
{
    long long rank = rank_of(self->columns, i);
    for (Py_ssize_t other = 0; other < self->count; other++) {
        ComponentPages *held = held_of(node, other);
        if (held == NULL)
            return -1;
        int lower = rank_of(self->columns, other) < rank && is_some(held->pages) && !held->locks;
        if (PyErr_Occurred() || ((other == i || lower) && take(self, node, other) < 0))
            return -1;
    }
    return 0;
}

static int evict_held(Eviction *self, Py_ssize_t i, long long pages)
{
    EvictableSet *set = as_set(PyList_GetItem(self->columns->held_device, i));
    long long aim = set == NULL ? 0 : set->evictable - pages;
    Node *node;
    if (set == NULL)
        return -1;
    while (set->evictable > aim && self->left > 0 && (node = linked_first(set->order)) != NULL) {
        if (bury(self, node, i) < 0)
            return -1;
        self->left--;
    }
    return 0;
}

static PyObject *eviction_end(Eviction *self, int failed)
{
    PyObject *rows = failed ? NULL : PyTuple_New(1 + self->count);
    for (Py_ssize_t i = 0; rows != NULL && i <= self->count; i++) {
        PyObject *ids = PyBytes_FromStringAndSize(self->freed[i].ids, self->freed[i].size);
        if (ids == NULL || PyTuple_SetItem(rows, i, ids) < 0)
            Py_CLEAR(rows);
    }
    for (Py_ssize_t i = 0; i <= self->count; i++)
        PyMem_Free(self->freed[i].ids);
    PyMem_Free(self->freed);
    return rows;
}

/* What was freed with attention KV or a component before counts. */
static int evict_wanted(Eviction *self, PyObject *wanted)
{
    for (Py_ssize_t i = 0; i <= self->count && self->left > 0; i++) {
        long long pages = PyLong_AsLongLong(PyTuple_GetItem(wanted, i)) - self->freed[i].size / ID_BYTES;
        if (PyErr_Occurred() || (pages > 0 && (i ? evict_held(self, i - 1, pages) : evict_leaves(self, pages)) < 0))
            return -1;
    }
    return 0;
}

PyObject *columns_evict_nodes(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Eviction eviction = {self, as_set(self->device), component_count(self), 0, NULL};
    if (eviction.device == NULL)
        return NULL;
    int fit = count == 2 && PyTuple_Check(args[0]) && PyTuple_Size(args[0]) == 1 + eviction.count;
    if (!fit || !is_linked(eviction.device->order))
        return PyErr_Format(PyExc_TypeError, "pages of attention KV and each component, and the most nodes are due");
    eviction.left = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    eviction.freed = PyMem_Calloc(1 + eviction.count, sizeof *eviction.freed);
    if (eviction.freed == NULL)
        return PyErr_NoMemory();
    return eviction_end(&eviction, evict_wanted(&eviction, args[0]) < 0);
}
