/* Walks down and up a tree: what a match, a lock, an insertion and an eviction of a plain tree are made of. */
#include "core.h"

Node *parent_of(Node *node) { return as_node(node->parent); }

/* Memory is compared in steps of so many bytes, and by halves in the one that differs: each byte about once. */
enum { STRIDE_BYTES = 1 << 12 };

/* How many whole pages of two rows of `length` bytes are equal from the front on. */
static Py_ssize_t common_pages(const char *one, const char *other, Py_ssize_t length, Py_ssize_t page_bytes)
{
    Py_ssize_t low = 0, high = length / page_bytes, stride = page_bytes < STRIDE_BYTES ? STRIDE_BYTES / page_bytes : 1;
    while (high - low > stride && memcmp(one + low * page_bytes, other + low * page_bytes, stride * page_bytes) == 0)
        low += stride;
    if (memcmp(one + low * page_bytes, other + low * page_bytes, (high - low) * page_bytes) == 0)
        return high;
    high = high - low > stride ? low + stride - 1 : high - 1;
    while (low < high) {
        Py_ssize_t middle = (low + high + 1) / 2, at = low * page_bytes;
        if (memcmp(one + at, other + at, (middle - low) * page_bytes) == 0)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The child under the page at `page`, borrowed; NULL without an error where there is none. */
static Node *child_under(Node *node, const char *page, Py_ssize_t page_bytes)
{
    PyObject *name = children_count(node->children) ? PyBytes_FromStringAndSize(page, page_bytes) : NULL;
    if (name == NULL)
        return NULL;
    PyObject *child = children_get(node->children, name);
    Py_DECREF(name);
    return child == NULL ? NULL : as_node(child);
}

int walk_down(Columns *self, Node *root, PyObject *key, PyObject *until, Reached *found)
{
    char *data;
    Py_ssize_t length, offset = 0, page_bytes = (Py_ssize_t)self->page_bytes;
    if (PyBytes_AsStringAndSize(key, &data, &length) < 0)
        return -1;
    Py_ssize_t stop = PyLong_AsSsize_t(until);
    if (stop == -1 && PyErr_Occurred())
        return -1;
    if (page_bytes < 1) {
        PyErr_Format(PyExc_ValueError, "a page of %zd bytes", page_bytes);
        return -1;
    }
    if (stop > length)
        stop = length;
    *found = (Reached){.last = root, .end = root->end};
    while (offset < stop) {
        Py_ssize_t room = stop - offset, own;
        Node *child = child_under(found->last, data + offset, room < page_bytes ? room : page_bytes);
        if (child == NULL || ((PyObject *)child == self->trimmed && columns_whole(self) < 0))
            break;
        char *tokens = row_data(&child->tokens, &own);
        if (tokens == NULL)
            break;
        Py_ssize_t pages = common_pages(data + offset, tokens, own < room ? own : room, page_bytes);
        if (pages * page_bytes != own) {
            found->inside = child, found->inner = pages, found->end = child->start + pages;
            break;
        }
        offset += own, found->last = child, found->end = child->end, found->nodes++;
    }
    return PyErr_Occurred() ? -1 : 0;
}

Node *walk_asked(Columns *self, PyObject *const *args, Py_ssize_t count, Reached *found)
{
    Node *root = count == 3 ? as_node(args[0]) : NULL;
    if (root != NULL && walk_down(self, root, args[1], args[2], found) == 0)
        return root;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a root, data and where to stop are due");
    return NULL;
}

PyObject *columns_descend(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Reached found;
    if (walk_asked(self, args, count, &found) == NULL)
        return NULL;
    PyObject *path = PyList_New(found.nodes);
    Node *node = found.last;
    for (Py_ssize_t i = found.nodes; path != NULL && i-- > 0; node = (Node *)node->parent)
        PyList_SetItem(path, i, Py_NewRef((PyObject *)node));
    PyObject *inside = found.inside == NULL ? Py_None : (PyObject *)found.inside;
    return path == NULL ? NULL : Py_BuildValue("NOn", path, inside, found.inner);
}

PyObject *columns_gather(Columns *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t left = count == 2 && PyList_Check(args[0]) ? PyLong_AsSsize_t(args[1]) : -1;
    if (left < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a path and a count of pages are due");
        return NULL;
    }
    left *= ID_BYTES;
    PyObject *ids = PyBytes_FromStringAndSize(NULL, left);
    char *to = ids == NULL ? NULL : PyBytes_AsString(ids);
    for (Py_ssize_t i = 0; to != NULL && left > 0; i++) {
        PyObject *value = PyList_GetItem(args[0], i);
        Node *node = value == NULL ? NULL : as_node(value);
        char *own;
        Py_ssize_t size;
        if (node == NULL || row_of(node->pages, &own, &size) < 0) {
            Py_CLEAR(ids);
            break;
        }
        size = size < left ? size : left;
        memcpy(to, own, size);
        to += size, left -= size;
    }
    return ids;
}

PyObject *columns_touch(Columns *self, PyObject *path)
{
    EvictableSet *device = as_set(self->device), *host = self->hosted ? as_set(self->host) : NULL;
    if (device == NULL || (self->hosted && host == NULL))
        return NULL;
    Py_ssize_t count = PyList_Size(path);
    self->clock++;
    for (Py_ssize_t i = 0; i < count; i++) {
        Node *node = as_node(PyList_GetItem(path, i));
        if (node == NULL)
            return NULL;
        node->used = self->clock;
    }
    if (count < 0 || order_touch(device->order, path) < 0 || (host != NULL && order_touch(host->order, path) < 0))
        return NULL;
    Py_RETURN_NONE;
}

/* The set that counts the attention KV of a node that was or becomes free: the device's, or the host's where it is
 * there alone and not kept there. `*set` is NULL where none does. */
static int set_that_counts(Columns *self, Node *node, EvictableSet **set)
{
    *set = NULL;
    if (!is_some(node->pages) && node->host_locks)
        return 0;
    *set = as_set(is_some(node->pages) ? self->device : self->host);
    return *set == NULL ? -1 : 0;
}

PyObject *columns_lock(Columns *self, PyObject *value)
{
    EvictableSet *set;
    Node *node = as_node(value);
    for (; node != NULL && ++node->locks == 1; node = parent_of(node)) {
        if (set_that_counts(self, node, &set) < 0)
            return NULL;
        if (set != NULL) {
            long long pages = node->end - node->start;
            set->evictable -= pages, set->protected_ += pages;
            if (order_discard(set->order, node) < 0)
                return NULL;
        }
    }
    return node == NULL ? NULL : Py_NewRef(Py_None);
}

PyObject *columns_unlock(Columns *self, PyObject *value)
{
    EvictableSet *set;
    Node *node = as_node(value);
    self->clock++;
    for (; node != NULL && --node->locks == 0; node = parent_of(node)) {
        node->used = self->clock;
        if (set_that_counts(self, node, &set) < 0)
            return NULL;
        if (set != NULL) {
            long long pages = node->end - node->start;
            set->evictable += pages, set->protected_ -= pages;
            if (order_add(set->order, node) < 0)
                return NULL;
        }
    }
    return node == NULL ? NULL : Py_NewRef(Py_None);
}

int enter(PyObject *nodes, Node *node)
{
    PyObject *id = PyLong_FromLongLong(node->id);
    int failed = id == NULL ? -1 : PyDict_SetItem(nodes, id, (PyObject *)node);
    Py_XDECREF(id);
    return failed;
}

int strike(PyObject *nodes, Node *node)
{
    PyObject *id = PyLong_FromLongLong(node->id);
    int failed = id == NULL ? -1 : PyDict_DelItem(nodes, id);
    Py_XDECREF(id);
    return failed;
}

PyObject *columns_grow(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    char *data;
    Py_ssize_t length, page_bytes = (Py_ssize_t)self->page_bytes;
    Node *parent = count == 4 ? as_node(args[0]) : NULL;
    EvictableSet *device = as_set(self->device);
    if (parent == NULL || device == NULL || PyBytes_AsStringAndSize(args[1], &data, &length) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a parent, data, an end and pages are due");
        return NULL;
    }
    long long end = PyLong_AsLongLong(args[2]), pages = end - parent->end;
    if (!PyErr_Occurred() && (page_bytes < 1 || pages < 1 || end > length / page_bytes || !PyBytes_Check(args[3])))
        PyErr_SetString(PyExc_ValueError, "the data does not fill these pages");
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t first = (Py_ssize_t)parent->end * page_bytes;
    PyObject *name = PyBytes_FromStringAndSize(data + first, page_bytes), *children = node_children(parent, NULL);
    Node *node = NULL;
    if (name != NULL && children != NULL)
        node = columns_make(self, self->next_id, (PyObject *)parent, args[1], parent->end, end);
    if (node != NULL && row_cut(&node->tokens, first, (Py_ssize_t)pages * page_bytes) < 0)
        Py_CLEAR(node);
    if (node != NULL) {
        self->next_id++;
        node->pages = Py_NewRef(args[3]);
        node->created = node->used = self->clock;
        node->hits = 1;
        if (enter(self->nodes, node) < 0 || children_put(children, name, (PyObject *)node) < 0 ||
            order_add(device->order, node) < 0) {
            Py_CLEAR(node);
        } else {
            parent->device_children++;
            device->evictable += pages;
        }
    }
    Py_XDECREF(name);
    Py_XDECREF(children);
    return (PyObject *)node;
}

int forget_root(Columns *self, Node *root)
{
    return !children_count(root->children) && is_some(root->namespace) ? PyDict_DelItem(self->roots, root->namespace) : 0;
}

PyObject *columns_forget_root(Columns *self, PyObject *value)
{
    Node *root = as_node(value);
    return root == NULL || forget_root(self, root) < 0 ? NULL : Py_NewRef(Py_None);
}

int trim(Columns *self, Node *node, long long pages, char *to)
{
    EvictableSet *device = as_set(self->device);
    long long keep = node->end - node->start - pages;
    char *ids;
    Py_ssize_t size;
    if (device == NULL || row_of(node->pages, &ids, &size) < 0)
        return -1;
    if (keep < 0 || pages < 0 || size < (keep + pages) * ID_BYTES) {
        PyErr_Format(PyExc_ValueError, "node %lld has no %lld pages to trim", node->id, pages);
        return -1;
    }
    memcpy(to, ids + keep * ID_BYTES, pages * ID_BYTES);
    if (is_some(node->hashes) && PyBytes_Size(node->hashes) >= keep * HASH_BYTES) {
        PyObject *front = PyBytes_FromStringAndSize(PyBytes_AsString(node->hashes), keep * HASH_BYTES);
        if (front == NULL)
            return -1;
        put(&node->hashes, front);
    }
    if (strike(self->nodes, node) < 0)
        return -1;
    node->id = self->next_id++;
    if (enter(self->nodes, node) < 0)
        return -1;
    if ((PyObject *)node != self->trimmed) {
        if (columns_whole(self) < 0)
            return -1;
        put(&self->trimmed, Py_NewRef((PyObject *)node));
    }
    node->end -= pages;
    device->evictable -= pages;
    return 0;
}

PyObject *columns_trim(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Node *node = count == 2 ? as_node(args[0]) : NULL;
    long long pages = node == NULL ? -1 : PyLong_AsLongLong(args[1]);
    if (node == NULL || PyErr_Occurred())
        return NULL;
    int some = 0 < pages && pages <= node->end - node->start;  // else `trim` refuses
    PyObject *ids = PyBytes_FromStringAndSize(NULL, some ? pages * ID_BYTES : 0);
    if (ids != NULL && trim(self, node, pages, PyBytes_AsString(ids)) < 0)
        Py_CLEAR(ids);
    return ids;
}

int uproot_leaf(Columns *self, EvictableSet *device, Node *node, char *to)
{
    char *ids, *tokens;
    Py_ssize_t size, length, pages = (Py_ssize_t)(node->end - node->start);
    Node *parent = parent_of(node);
    if (parent == NULL || row_of(node->pages, &ids, &size) < 0 ||
        (tokens = row_data(&node->tokens, &length)) == NULL)
        return -1;
    memcpy(to, ids, pages * ID_BYTES);
    PyObject *name = PyBytes_FromStringAndSize(tokens, (Py_ssize_t)self->page_bytes);
    if (name == NULL)
        return -1;
    Py_INCREF((PyObject *)node);
    if ((PyObject *)node == self->trimmed)
        put(&self->trimmed, NULL);
    device->evictable -= pages;
    int failed = order_discard(device->order, node) < 0 || strike(self->nodes, node) < 0 ||
                 children_drop(parent->children, name) < 0;
    put(&node->pages, NULL);
    put(&node->hashes, NULL);
    put(&node->tokens.bytes, PyBytes_FromStringAndSize(NULL, 0));
    node->tokens.length = -1;
    parent->device_children--;
    Py_DECREF(name);
    if (!failed && !is_some(parent->parent)) {
        failed = forget_root(self, parent) < 0;
    } else if (!failed && !parent->locks) {
        failed = order_add(device->order, parent) < 0;
    }
    Py_DECREF(node);
    return failed ? -1 : 0;
}

PyObject *columns_evict(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    EvictableSet *device = as_set(self->device);
    long long left = count == 2 ? PyLong_AsLongLong(args[0]) : -1, leaves = left < 0 ? -1 : PyLong_AsLongLong(args[1]);
    if (leaves < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "pages and the most leaves are due, none of them negative");
    if (device == NULL || PyErr_Occurred())
        return NULL;
    left = left > device->evictable ? device->evictable : left;
    PyObject *ids = PyBytes_FromStringAndSize(NULL, left * ID_BYTES);
    char *from = ids == NULL ? NULL : PyBytes_AsString(ids), *to = from;
    if (!is_linked(device->order))
        PyErr_SetString(PyExc_TypeError, "a plain tree evicts by an order of this core");
    while (to != NULL && left > 0 && leaves > 0 && !PyErr_Occurred()) {
        Node *node = linked_first(device->order);
        if (node == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "no leaf is left in the order, and pages are");
            break;
        }
        long long pages = node->end - node->start;
        if (node->device_children) { /* it comes back with the end of its last child */
            order_discard(device->order, node);
            continue;
        }
        if (note_removed(self, node, pages > left ? pages - left : 0, 0) < 0)
            break;
        if (pages > left)
            pages = left, trim(self, node, pages, to);
        else
            uproot_leaf(self, device, node, to);
        to += pages * ID_BYTES, left -= pages, leaves--;
    }
    if (PyErr_Occurred())
        Py_CLEAR(ids);
    if (ids == NULL || left == 0)
        return ids;
    PyObject *part = PyBytes_FromStringAndSize(from, to - from);
    Py_DECREF(ids);
    return part;
}
