/* Steps of requests on one tier, each in one call: `find` and `insert` of columns.py, and the same with further components. */
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
    if (found.nodes && (touch_up(self, found.last) < 0 || touch_held(self, end < found.end ? node : found.last) < 0))
        return NULL;
    PyObject *ids = ids_of_path(node, end), *held = ids == NULL ? NULL : held_at(self, node, end);
    if (held == NULL) {
        Py_XDECREF(ids);
        return NULL;
    }
    PyObject *none = Py_None;
    return Py_BuildValue("OLnOLNN", last == root ? none : (PyObject *)last, found.end, found.nodes,
                         node == root ? none : (PyObject *)node, end, ids, held);
}

/* Ids of a component that came with a prompt, for its pages from `first` on. */
typedef struct {
    Py_ssize_t index;
    PyObject *ids, *in_use;
    long long first;
} Brought;

/* Components' ids for the last pages of `pages`, each (index, ids, pages in use). 1 if all are for new pages, so behind
 * the `known`; 0 if not; -1 with an error. */
static int read_brought(Columns *self, PyObject *rows, long long known, long long pages, Brought *brought)
{
    for (Py_ssize_t k = 0; k < PyTuple_Size(rows); k++) {
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, k), "nO!O", &brought[k].index, &PyBytes_Type, &brought[k].ids,
                              &brought[k].in_use))
            return -1;
        long long ids = PyBytes_Size(brought[k].ids) / ID_BYTES;
        int per_page = is_per_page(self, brought[k].index);
        if (per_page < 0)
            return -1;
        brought[k].first = pages - ids;
        if (brought[k].first < known || (!per_page && ids > 1))
            return 0;
    }
    return 1;
}

/* Where the node that begins at page `start` has to end: where ids begin, or the reach of a component before the end. */
static long long next_cut(Columns *self, const Brought *brought, Py_ssize_t rows, long long start, long long pages)
{
    long long cut = pages;
    for (Py_ssize_t i = 0; i < component_count(self); i++) {
        long long at = pages - reach_pages_of(self, i);
        if (is_per_page(self, i) > 0 && at > start && at < cut)
            cut = at;
    }
    for (Py_ssize_t k = 0; k < rows; k++)
        if (is_per_page(self, brought[k].index) > 0 && brought[k].first > start && brought[k].first < cut)
            cut = brought[k].first;
    return cut;
}

/* Gives a new node those ids of components that belong to its pages. */
static int give_brought(Columns *self, Node *node, const Brought *brought, Py_ssize_t rows, long long pages)
{
    for (Py_ssize_t k = 0; k < rows; k++) {
        int per_page = is_per_page(self, brought[k].index);
        if (per_page ? node->start < brought[k].first : node->end < pages || brought[k].first == pages)
            continue;
        char *ids;
        Py_ssize_t size;
        ComponentPages *held = held_of(node, brought[k].index);
        EvictableSet *set = held == NULL ? NULL : as_set(PyList_GetItem(self->held_device, brought[k].index));
        if (set == NULL || row_of(brought[k].ids, &ids, &size) < 0)
            return -1;
        long long first = per_page ? node->start - brought[k].first : 0, count = per_page ? node->end - node->start : 1;
        PyObject *part = PyBytes_FromStringAndSize(ids + first * ID_BYTES, count * ID_BYTES);
        if (part == NULL || order_add(set->order, node) < 0) {
            Py_XDECREF(part);
            return -1;
        }
        put(&held->pages, part);
        set->evictable += count;
    }
    return 0;
}

/* A new leaf below `parent` for the pages up to `end`, of which `ids` are those from page `first` on; borrowed. */
static Node *grow_to(Columns *self, Node *parent, PyObject *data, PyObject *ids, long long first, long long end)
{
    char *row;
    Py_ssize_t size;
    if (row_of(ids, &row, &size) < 0)
        return NULL;
    long long skipped = parent->end - first, pages = end - parent->end;
    PyObject *stop = PyLong_FromLongLong(end);
    PyObject *own = skipped == 0 && pages * ID_BYTES == size ? Py_NewRef(ids)
                                                            : PyBytes_FromStringAndSize(row + skipped * ID_BYTES, pages * ID_BYTES);
    PyObject *const args[] = {(PyObject *)parent, data, stop, own};
    Node *node = stop == NULL || own == NULL ? NULL : (Node *)columns_grow(self, args, 4);
    Py_XDECREF(stop);
    Py_XDECREF(own);
    Py_XDECREF((PyObject *)node); /* the tree has it */
    return node;
}

/* A prompt's `pages`, with `ids` for those that the tree lacks, and what came for components. */
typedef struct {
    PyObject *data, *ids;
    long long pages;
    Brought *brought;
    Py_ssize_t rows;
} Prompt;

/* The end of the path, with the rest of it split off and grown, borrowed; NULL with an error. */
static Node *lengthen(Columns *self, Reached *found, const Prompt *prompt)
{
    Node *end = found->last;
    if (found->inside != NULL) {
        end = split_node(self, found->inside, found->inner, 0);
        if (end == NULL)
            return NULL;
        Py_DECREF((PyObject *)end); /* the tree has it */
    }
    while (end->end < prompt->pages) {
        long long cut = next_cut(self, prompt->brought, prompt->rows, end->end, prompt->pages);
        end = grow_to(self, end, prompt->data, prompt->ids, found->end, cut);
        if (end == NULL || give_brought(self, end, prompt->brought, prompt->rows, prompt->pages) < 0)
            return NULL;
    }
    return touch_up(self, end) < 0 || touch_held(self, end) < 0 || PyErr_Occurred() ? NULL : end;
}

/* 1 if all ids, of attention KV and of components, are in use from here on; 0 if none, as one was; -1 with an error. */
static int claim_all(PyObject *in_use, const Prompt *prompt)
{
    int able = claim_ids(in_use, prompt->ids);
    for (Py_ssize_t k = 0; able > 0 && k < prompt->rows; k++) {
        able = claim_ids(prompt->brought[k].in_use, prompt->brought[k].ids);
        if (able > 0)
            continue;
        while (k-- > 0)
            release_ids(prompt->brought[k].in_use, prompt->brought[k].ids);
        release_ids(in_use, prompt->ids);
        break;
    }
    return able;
}

/* The path's end, borrowed, and 1; 0, before any change, where the prompt does not fit or its ids are in use; -1 with an
 * error. */
static int insert(Columns *self, Node *root, PyObject *in_use, PyObject *rows, Prompt *prompt, Node **end)
{
    long long first = prompt->pages - PyBytes_Size(prompt->ids) / ID_BYTES;
    PyObject *stop = PyLong_FromLongLong(prompt->pages * self->page_bytes);
    Reached found;
    int able = stop == NULL || walk_down(self, root, prompt->data, stop, &found) < 0 ? -1 : found.end == first;
    Py_XDECREF(stop);
    if (able > 0 && prompt->rows)
        able = read_brought(self, rows, first, prompt->pages, prompt->brought);
    if (able > 0)
        able = claim_all(in_use, prompt);
    if (able > 0 && (*end = lengthen(self, &found, prompt)) == NULL)
        able = -1;
    return able;
}

PyObject *columns_insert(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Node *root = count == 6 ? as_node(args[0]) : NULL, *end = NULL;
    long long first = root != NULL ? PyLong_AsLongLong(args[3]) : -1, page_bytes = self->page_bytes;
    if (root == NULL || page_bytes < 1 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[2]) || !PyTuple_Check(args[5]))
        return PyErr_Format(PyExc_TypeError, "a root, data, ids, the first page, the pages in use and rows are due");
    Prompt prompt = {args[1], args[2], PyBytes_Size(args[1]) / page_bytes, NULL, PyTuple_Size(args[5])};
    if (PyErr_Occurred())
        return NULL;
    if (!prompt.pages || first < 0 || first > prompt.pages || PyBytes_Size(args[2]) != (prompt.pages - first) * ID_BYTES)
        Py_RETURN_NONE;
    if (prompt.rows && (prompt.brought = PyMem_Calloc(prompt.rows, sizeof *prompt.brought)) == NULL)
        return PyErr_NoMemory();
    int able = insert(self, root, args[4], args[5], &prompt, &end);
    PyMem_Free(prompt.brought);
    return able < 0 ? NULL : Py_NewRef(able ? (PyObject *)end : Py_None);
}
