/* What an end needs of further components, windows and states: where it is usable, the ids there, locks and uses. */
#include "core.h"

Py_ssize_t component_count(Columns *self) { return self->per_page == NULL ? 0 : PyTuple_Size(self->per_page); }

/* A number of component `i`; -1 with an error. */
static long long number_of(PyObject *column, Py_ssize_t i)
{
    PyObject *number = column == NULL ? NULL : PyTuple_GetItem(column, i);
    if (number == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "the columns lack a number for each component");
    return number == NULL ? -1 : PyLong_AsLongLong(number);
}

long long reach_pages_of(Columns *self, Py_ssize_t i) { return number_of(self->reach_pages, i); }

long long rank_of(Columns *self, Py_ssize_t i) { return number_of(self->ranks, i); }

int is_per_page(Columns *self, Py_ssize_t i)
{
    PyObject *each = self->per_page == NULL ? NULL : PyTuple_GetItem(self->per_page, i);
    return each == NULL ? -1 : PyObject_IsTrue(each);
}

/* The pages of a node that the path has: of the last one, which a prompt may leave midway, those up to `end`. */
static long long pages_up_to(Node *node, long long end) { return (end < node->end ? end : node->end) - node->start; }

/* Whether the path has the component's ids at a node: a node that is left midway has no state at that place. 0 or 1; -1
 * with an error. */
static int is_held(Columns *self, Node *node, long long end, Py_ssize_t i)
{
    ComponentPages *held = held_of(node, i);
    int per_page = is_per_page(self, i);
    if (held == NULL || per_page < 0)
        return -1;
    return is_some(held->pages) && (per_page || node->end <= end);
}

/* Clears `fits` of those nodes of a path, root first, at whose ends not all of component `i` is there. */
static int fit_component(Columns *self, Node **path, char *fits, Py_ssize_t nodes, long long end, Py_ssize_t i)
{
    long long reach = reach_pages_of(self, i), run = 0;
    int unbroken = 1;
    if (reach < 0)
        return -1;
    for (Py_ssize_t k = 0; k < nodes; k++) {
        int held = is_held(self, path[k], end, i);
        if (held < 0)
            return -1;
        run = held ? run + pages_up_to(path[k], end) : 0;
        unbroken &= held;
        fits[k] &= unbroken || run >= reach;
    }
    return 0;
}

int usable_end(Columns *self, Node *node, Py_ssize_t nodes, long long *end)
{
    Py_ssize_t count = component_count(self), usable = nodes;
    if (!count || !nodes)
        return 0;
    Node **path = PyMem_Malloc(nodes * (sizeof *path + 1));
    if (path == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    char *fits = (char *)(path + nodes);
    memset(fits, 1, nodes);
    for (Py_ssize_t k = nodes; k-- > 0 && node != NULL; node = parent_of(node))
        path[k] = node;
    int failed = node == NULL;
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = fit_component(self, path, fits, nodes, *end, i) < 0;
    while (usable > 0 && !fits[usable - 1])
        usable--;
    if (usable < nodes)
        *end = usable ? path[usable - 1]->end : 0;
    PyMem_Free(path);
    return failed ? -1 : 0;
}

/* The bytes of ids of component `i` that a path up to `end` has at a node, 0 for none, and where they are; -1 with an
 * error. */
static Py_ssize_t ids_at(Columns *self, Node *node, long long end, Py_ssize_t i, char **row)
{
    ComponentPages *held = held_of(node, i);
    int per_page = is_per_page(self, i);
    Py_ssize_t size = 0, most = (Py_ssize_t)pages_up_to(node, end) * ID_BYTES;
    if (held == NULL || per_page < 0 || (is_some(held->pages) && row_of(held->pages, row, &size) < 0))
        return -1;
    return per_page && size > most ? most : size;
}

/* The node above, if the one below does not hold all of the `*left` pages that are to be reached; else NULL. */
static Node *next_in_reach(Node *node, long long end, long long *left)
{
    *left -= pages_up_to(node, end);
    Node *parent = *left > 0 ? parent_of(node) : NULL;
    return parent != NULL && is_some(parent->parent) ? parent : NULL;
}

/* The ids of component `i` at the nodes that hold what page `end` needs, the last of them `node`; NULL with an error. */
static PyObject *ids_in_reach(Columns *self, Node *node, long long end, Py_ssize_t i)
{
    long long reach = reach_pages_of(self, i), left = reach;
    Py_ssize_t size = 0, own = 0;
    char *row;
    Node *first = is_some(node->parent) && reach > 0 ? node : NULL;
    for (Node *at = first; at != NULL && own >= 0; at = next_in_reach(at, end, &left), size += own)
        own = ids_at(self, at, end, i, &row);
    PyObject *ids = PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize(NULL, size);
    char *to = ids == NULL ? NULL : PyBytes_AsString(ids) + size;
    left = reach;
    for (Node *at = first; to != NULL && at != NULL; at = next_in_reach(at, end, &left)) {
        own = ids_at(self, at, end, i, &row);
        if (own > 0)
            memcpy(to -= own, row, own);
    }
    return ids;
}

PyObject *held_at(Columns *self, Node *node, long long end)
{
    Py_ssize_t count = component_count(self);
    PyObject *rows = PyTuple_New(count);
    for (Py_ssize_t i = 0; rows != NULL && i < count; i++) {
        PyObject *ids = ids_in_reach(self, node, end, i);
        if (ids == NULL || PyTuple_SetItem(rows, i, ids) < 0)
            Py_CLEAR(rows);
    }
    return rows;
}

int touch_held(Columns *self, Node *node)
{
    for (Py_ssize_t i = 0; i < component_count(self); i++) {
        EvictableSet *set = as_set(PyList_GetItem(self->held_device, i));
        long long left = set == NULL ? -1 : reach_pages_of(self, i);
        if (left < 0)
            return -1;
        if (Py_TYPE(set->order) != RecencyType) {
            PyErr_SetString(PyExc_TypeError, "further components are ordered by an order of this core");
            return -1;
        }
        Node *first = is_some(node->parent) && left > 0 ? node : NULL;
        for (Node *at = first; at != NULL; at = next_in_reach(at, at->end, &left))
            recency_touch((Recency *)set->order, at);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

PyObject *columns_first_held(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Node *node = count == 2 ? as_node(args[0]) : NULL;
    Py_ssize_t i = node == NULL ? -1 : PyLong_AsSsize_t(args[1]);
    int per_page = PyErr_Occurred() ? -1 : is_per_page(self, i);
    long long left = per_page < 0 ? -1 : reach_pages_of(self, i);
    if (left < 0 || !is_some(node->parent)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a node below a root and a component are due");
        return NULL;
    }
    if (!per_page)
        return PyLong_FromLongLong(node->end - 1);
    Node *first = node;
    for (Node *at = node; at != NULL; at = next_in_reach(at, at->end, &left))
        first = at;
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(first->start);
}

PyObject *columns_shift(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    long long numbers[5];
    Node *node = count == 6 ? as_node(args[0]) : NULL;
    for (int i = 0; node != NULL && !PyErr_Occurred() && i < 5; i++)
        numbers[i] = PyLong_AsLongLong(args[i + 1]);
    if (node == NULL || PyErr_Occurred()) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a node, a component, first and stop, and two numbers of locks are due");
        return NULL;
    }
    long long first = numbers[1] < 0 ? 0 : numbers[1], stop = numbers[2];
    for (; node != NULL && node->end > first; node = parent_of(node)) {
        ComponentPages *held = node->end <= stop ? held_of(node, (Py_ssize_t)numbers[0]) : NULL;
        if (node->end > stop)
            continue;
        if (held == NULL || weigh(self, node, -1) < 0)
            return NULL;
        held->locks += numbers[3], held->host_locks += numbers[4];
        if (weigh(self, node, 1) < 0 || settle(self, node) < 0)
            return NULL;
    }
    return node == NULL ? NULL : Py_NewRef(Py_None);
}
