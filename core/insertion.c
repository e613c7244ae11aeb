/* An insertion on one tier in one call: `insert` of columns.py, and what insert.py does with further components. */
#include "core.h"

enum { ATTENTION = -1 };

/* Ids of attention KV or of a component that came with a prompt, for its pages from `first` on. `fresh` are those that
 * the tree does not have at their place, and `twice` those of them for whose place it has others. */
typedef struct {
    Py_ssize_t index;
    PyObject *in_use, *given, *claimed;
    const char *ids;
    long long first;
    int per_page;
    char *fresh, *twice;
    Py_ssize_t fresh_size, twice_size;
} Brought;

/* A prompt of `pages`, of which the tree knows the first `known`. The first of the rows is that of attention KV. */
typedef struct {
    PyObject *data;
    long long pages, known;
    Brought *rows, few[3];
    Py_ssize_t count;
} Prompt;

static void forget_prompt(Prompt *prompt)
{
    for (Py_ssize_t k = 0; prompt->rows != NULL && k < prompt->count; k++) {
        PyMem_Free(prompt->rows[k].fresh);
        Py_XDECREF(prompt->rows[k].claimed);
    }
    if (prompt->rows != prompt->few)
        PyMem_Free(prompt->rows);
}

/* 1 if the row has no more ids than pages, or than one state; 0 if it has; -1 with an error. */
static int read_row(Brought *row, long long pages)
{
    Py_ssize_t size = PyBytes_Size(row->given);
    if (size < 0)
        return -1;
    row->ids = PyBytes_AsString(row->given);
    row->first = pages - size / ID_BYTES;
    return row->first >= 0 && (row->per_page || size <= ID_BYTES);
}

/* Attention KV, and (index, ids, pages in use) of each component that brings ids. As `read_row`. */
static int read_rows(Columns *self, Prompt *prompt, PyObject *ids, PyObject *in_use, PyObject *others)
{
    prompt->count = 1 + PyTuple_Size(others);
    int are_few = prompt->count <= (Py_ssize_t)(sizeof prompt->few / sizeof *prompt->few);
    prompt->rows = are_few ? prompt->few : PyMem_Calloc(prompt->count, sizeof *prompt->rows);
    if (prompt->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    prompt->rows[0] = (Brought){.index = ATTENTION, .in_use = in_use, .given = ids, .per_page = 1};
    int able = read_row(prompt->rows, prompt->pages);
    for (Py_ssize_t k = 1; able > 0 && k < prompt->count; k++) {
        Brought *row = prompt->rows + k;
        PyObject *other = PyTuple_GetItem(others, k - 1);
        if (!PyArg_ParseTuple(other, "nO!O", &row->index, &PyBytes_Type, &row->given, &row->in_use))
            return -1;
        row->per_page = is_per_page(self, row->index);
        able = row->per_page < 0 ? -1 : read_row(row, prompt->pages);
    }
    return able;
}

/* Which ids of a row, from its `*from` on, are for pages [start, end) of a path, a state's for its last page alone. */
static Py_ssize_t ids_within(const Brought *row, long long pages, long long start, long long end, Py_ssize_t *from)
{
    *from = row->per_page && start > row->first ? (Py_ssize_t)(start - row->first) : 0;
    if (!row->per_page)
        return end == pages && row->first < pages;
    return end > row->first ? (Py_ssize_t)(end - row->first) - *from : 0;
}

/* Sets `*ids` to what a node has of a row's component, NULL for nothing: of a path up to `end`, from page `start` on.
 * -1 with an error. */
static int own_ids(Node *node, const Brought *row, long long start, long long end, char **ids)
{
    ComponentPages *held = row->index < 0 ? NULL : held_of(node, row->index);
    if (row->index >= 0 && held == NULL)
        return -1;
    PyObject *column = row->index < 0 ? node->pages : held->pages;
    Py_ssize_t size, skipped = row->per_page ? (Py_ssize_t)(start - node->start) : 0;
    *ids = NULL;
    if (!is_some(column) || (!row->per_page && node->end > end))
        return 0;
    if (row_of(column, ids, &size) < 0)
        return -1;
    if (size < (row->per_page ? end - node->start : 1) * ID_BYTES) {
        PyErr_Format(PyExc_ValueError, "node %lld has fewer ids than pages", node->id);
        return -1;
    }
    *ids += skipped * ID_BYTES;
    return 0;
}

/* Notes which of the ids that a row brings for a node are fresh, and which of these come twice. */
static int compare(Prompt *prompt, Brought *row, Node *node)
{
    long long end = node->end < prompt->known ? node->end : prompt->known;
    Py_ssize_t from, count = ids_within(row, prompt->pages, node->start, end, &from);
    char *own;
    if (!count || own_ids(node, row, row->per_page ? row->first + from : node->start, end, &own) < 0)
        return count ? -1 : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *mine = row->ids + (from + i) * ID_BYTES;
        if (own != NULL && memcmp(mine, own + i * ID_BYTES, ID_BYTES) == 0)
            continue;
        memcpy(row->fresh + row->fresh_size, mine, ID_BYTES);
        row->fresh_size += ID_BYTES;
        if (own != NULL) {
            memcpy(row->twice + row->twice_size, mine, ID_BYTES);
            row->twice_size += ID_BYTES;
        }
    }
    return 0;
}

/* Compares a row, of which some ids are for pages that the tree knows, with the nodes of a path, root first. */
static int compare_row(Prompt *prompt, Brought *row, Node *const *path, Py_ssize_t nodes)
{
    Py_ssize_t size = PyBytes_Size(row->given);
    row->fresh = PyMem_Malloc(2 * size);
    if (row->fresh == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    row->twice = row->fresh + size;
    for (Py_ssize_t k = 0; k < nodes; k++)
        if (compare(prompt, row, path[k]) < 0)
            return -1;
    Py_ssize_t from, rest = 0;
    if (prompt->known < prompt->pages)
        rest = ids_within(row, prompt->pages, prompt->known, prompt->pages, &from);
    if (rest)
        memcpy(row->fresh + row->fresh_size, row->ids + from * ID_BYTES, rest * ID_BYTES);
    row->claimed = PyBytes_FromStringAndSize(row->fresh, row->fresh_size + rest * ID_BYTES);
    return row->claimed == NULL ? -1 : 0;
}

/* 1 if all fresh ids are in use from here on; 0 if none, as one was; -1 with an error. */
static int claim_all(Prompt *prompt)
{
    for (Py_ssize_t k = 0; k < prompt->count; k++) {
        Brought *row = prompt->rows + k;
        if (row->claimed == NULL)
            row->claimed = Py_NewRef(row->given);
        int able = claim_ids(row->in_use, row->claimed);
        if (able > 0)
            continue;
        while (k-- > 0)
            release_ids(prompt->rows[k].in_use, prompt->rows[k].claimed);
        return able;
    }
    return 1;
}

/* Gives a node those ids of components for its pages that it lacks. */
static int give(Columns *self, const Prompt *prompt, Node *node)
{
    for (Py_ssize_t k = 1; k < prompt->count; k++) {
        const Brought *row = prompt->rows + k;
        Py_ssize_t from, count = ids_within(row, prompt->pages, node->start, node->end, &from);
        ComponentPages *held = count ? held_of(node, row->index) : NULL;
        if (!count || (held != NULL && is_some(held->pages)))
            continue;
        PyObject *ids = held == NULL ? NULL : PyBytes_FromStringAndSize(row->ids + from * ID_BYTES, count * ID_BYTES);
        if (ids == NULL || weigh(self, node, -1) < 0) {
            Py_XDECREF(ids);
            return -1;
        }
        put(&held->pages, ids);
        if (weigh(self, node, 1) < 0 || settle(self, node) < 0)
            return -1;
    }
    return 0;
}

/* The first page inside a node where ids begin that it lacks; its end without such. -1 with an error. */
static long long first_lacking(const Prompt *prompt, Node *node)
{
    long long cut = node->end;
    for (Py_ssize_t k = 1; k < prompt->count; k++) {
        const Brought *row = prompt->rows + k;
        if (!row->per_page || row->first <= node->start || row->first >= cut)
            continue;
        ComponentPages *held = held_of(node, row->index);
        if (held == NULL)
            return -1;
        if (!is_some(held->pages))
            cut = row->first;
    }
    return cut;
}

/* Gives a known node, split where ids begin that it lacks, those of components. */
static int pass(Columns *self, const Prompt *prompt, Node *node)
{
    for (;;) {
        long long cut = first_lacking(prompt, node);
        if (cut < 0 || cut == node->end)
            return cut < 0 ? -1 : give(self, prompt, node);
        Node *front = split_node(self, node, cut - node->start, 0);
        int failed = front == NULL || give(self, prompt, front) < 0;
        Py_XDECREF((PyObject *)front); /* the tree has it */
        if (failed)
            return -1;
    }
}

/* Where the node that begins at page `start` has to end: where ids begin, or a component's reach before the end. */
static long long next_cut(Columns *self, const Prompt *prompt, long long start)
{
    long long cut = prompt->pages;
    for (Py_ssize_t i = 0; i < component_count(self); i++) {
        long long at = prompt->pages - reach_pages_of(self, i);
        if (is_per_page(self, i) > 0 && at > start && at < cut)
            cut = at;
    }
    for (Py_ssize_t k = 1; k < prompt->count; k++)
        if (prompt->rows[k].per_page && prompt->rows[k].first > start && prompt->rows[k].first < cut)
            cut = prompt->rows[k].first;
    return cut;
}

/* A new leaf below `parent` for the pages up to `end`; borrowed. */
static Node *grow_to(Columns *self, const Prompt *prompt, Node *parent, long long end)
{
    const Brought *row = prompt->rows;
    long long skipped = parent->end - row->first, pages = end - parent->end;
    int all = !skipped && end == prompt->pages;
    PyObject *stop = PyLong_FromLongLong(end);
    const char *from = row->ids + skipped * ID_BYTES;
    PyObject *ids = all ? Py_NewRef(row->given) : PyBytes_FromStringAndSize(from, pages * ID_BYTES);
    PyObject *const args[] = {(PyObject *)parent, prompt->data, stop, ids};
    Node *node = stop == NULL || ids == NULL ? NULL : (Node *)columns_grow(self, args, 4);
    Py_XDECREF(stop);
    Py_XDECREF(ids);
    Py_XDECREF((PyObject *)node); /* the tree has it */
    return node;
}

/* The end of the path, with the rest of it split off and grown, borrowed; NULL with an error. */
static Node *lengthen(Columns *self, const Prompt *prompt, const Reached *found, Node *const *path, Py_ssize_t nodes)
{
    Node *end = found->last;
    for (Py_ssize_t k = 0; k < nodes; k++)
        if (path[k] != found->inside && pass(self, prompt, path[k]) < 0)
            return NULL;
    if (found->inside != NULL) {
        end = split_node(self, found->inside, found->inner, 0);
        Py_XDECREF((PyObject *)end); /* the tree has it */
        if (end == NULL || (nodes && pass(self, prompt, end) < 0))
            return NULL;
    }
    while (end->end < prompt->pages) {
        end = grow_to(self, prompt, end, next_cut(self, prompt, end->end));
        if (end == NULL || give(self, prompt, end) < 0)
            return NULL;
    }
    return touch_up(self, end) < 0 || touch_held(self, end) < 0 || PyErr_Occurred() ? NULL : end;
}

/* The nodes of a path, root first, with pages from `first` on, in memory that is the caller's; NULL with an error. */
static Node **path_from(const Reached *found, long long first, Py_ssize_t *nodes)
{
    Node **path = PyMem_Malloc((found->nodes + 1) * sizeof *path);
    Node *node = found->inside != NULL ? found->inside : found->last;
    if (path == NULL)
        return (Node **)PyErr_NoMemory();
    Py_ssize_t count = 0;
    for (; node != NULL && node->end > first && count <= found->nodes; node = parent_of(node))
        path[count++] = node;
    for (Py_ssize_t k = 0; k < count / 2; k++) {
        Node *other = path[k];
        path[k] = path[count - 1 - k], path[count - 1 - k] = other;
    }
    *nodes = count;
    if (node != NULL)
        return path;
    PyMem_Free(path);
    return NULL;
}

/* The path's end, borrowed, and 1; 0, before any change, if an id is in use; -1 with an error. */
static int insert(Columns *self, Prompt *prompt, const Reached *found, Node **end)
{
    long long first = prompt->pages;
    for (Py_ssize_t k = 0; k < prompt->count; k++)
        first = prompt->rows[k].first < first ? prompt->rows[k].first : first;
    Py_ssize_t nodes = 0;
    Node **path = first < prompt->known ? path_from(found, first, &nodes) : NULL;
    int able = path == NULL && PyErr_Occurred() ? -1 : 1;
    for (Py_ssize_t k = 0; able > 0 && k < prompt->count; k++)
        if (prompt->rows[k].first < prompt->known && compare_row(prompt, prompt->rows + k, path, nodes) < 0)
            able = -1;
    if (able > 0)
        able = claim_all(prompt);
    if (able > 0 && (*end = lengthen(self, prompt, found, path, nodes)) == NULL)
        able = -1;
    PyMem_Free(path);
    return able;
}

/* The ids that came twice, no longer in use, a row for each of the prompt; an empty tuple where there are none. */
static PyObject *give_back(Prompt *prompt)
{
    Py_ssize_t twice = 0;
    for (Py_ssize_t k = 0; k < prompt->count; k++)
        twice += prompt->rows[k].twice_size;
    PyObject *rows = PyTuple_New(twice ? prompt->count : 0);
    for (Py_ssize_t k = 0; twice && rows != NULL && k < prompt->count; k++) {
        Brought *row = prompt->rows + k;
        PyObject *ids = PyBytes_FromStringAndSize(row->twice, row->twice_size);
        if (ids == NULL || release_ids(row->in_use, ids) < 0 || PyTuple_SetItem(rows, k, Py_NewRef(ids)) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(ids);
    }
    return rows;
}

PyObject *columns_insert(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Node *root = count == 6 ? as_node(args[0]) : NULL, *end = NULL;
    long long first = root != NULL ? PyLong_AsLongLong(args[3]) : -1, page_bytes = self->page_bytes;
    if (root == NULL || page_bytes < 1 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[2]) || !PyTuple_Check(args[5]))
        return PyErr_Format(PyExc_TypeError, "a root, data, ids, the first page, the pages in use and rows are due");
    Prompt prompt = {.data = args[1], .pages = PyBytes_Size(args[1]) / page_bytes};
    if (PyErr_Occurred())
        return NULL;
    long long due = prompt.pages - first;
    if (!prompt.pages || first < 0 || due < 0 || PyBytes_Size(args[2]) != due * ID_BYTES)
        Py_RETURN_NONE;
    Reached found;
    PyObject *stop = PyLong_FromLongLong(prompt.pages * page_bytes);
    int able = stop == NULL || walk_down(self, root, args[1], stop, &found) < 0 ? -1 : found.end >= first;
    Py_XDECREF(stop);
    prompt.known = able > 0 ? found.end : 0;
    if (able > 0)
        able = read_rows(self, &prompt, args[2], args[4], args[5]);
    if (able > 0)
        able = insert(self, &prompt, &found, &end);
    PyObject *twice = able > 0 ? give_back(&prompt) : NULL;
    PyObject *known = twice == NULL ? NULL : PyLong_FromLongLong(prompt.known);
    PyObject *told = known == NULL ? NULL : PyTuple_Pack(3, (PyObject *)end, known, twice);
    Py_XDECREF(known);
    Py_XDECREF(twice);
    forget_prompt(&prompt);
    return able ? told : Py_NewRef(Py_None);
}
