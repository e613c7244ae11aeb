/* What a node counts in the sums of a tree, and the orders it stands in: by component and tier. */
#include "core.h"

ComponentPages *held_of(Node *node, Py_ssize_t i)
{
    PyObject *held = PyTuple_GetItem(node->held, i);
    if (held != NULL && Py_TYPE(held) == ComponentPagesType)
        return (ComponentPages *)held;
    if (held != NULL)
        PyErr_Format(PyExc_TypeError, "pages of a component are due, got %R", held);
    return NULL;
}

Py_ssize_t held_count(Node *node) { return node->held == NULL ? 0 : PyTuple_Size(node->held); }

static int count_in(PyObject *value, int is_protected, long long pages)
{
    EvictableSet *set = as_set(value);
    if (set != NULL)
        *(is_protected ? &set->protected_ : &set->evictable) += pages;
    return set == NULL ? -1 : 0;
}

int weigh(Columns *self, Node *node, long long sign)
{
    long long pages = sign * (node->end - node->start);
    int on_device = is_some(node->pages);
    if (on_device && count_in(self->device, node->locks != 0, pages) < 0)
        return -1;
    if (is_some(node->host) && count_in(self->host, on_device || node->locks || node->host_locks, pages) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < held_count(node); i++) {
        ComponentPages *held = held_of(node, i);
        int per_page = held == NULL ? -1 : is_per_page(self, i);
        if (per_page < 0)
            return -1;
        long long ids = per_page ? pages : sign;
        on_device = is_some(held->pages);
        if (on_device && count_in(PyList_GetItem(self->held_device, i), held->locks != 0, ids) < 0)
            return -1;
        if (is_some(held->host) &&
            count_in(PyList_GetItem(self->held_host, i), on_device || held->host_locks, ids) < 0)
            return -1;
    }
    return 0;
}

PyObject *columns_weigh(Columns *self, PyObject *const *args, Py_ssize_t count)
{
    Node *node = count == 2 ? as_node(args[0]) : NULL;
    long long sign = node == NULL ? 0 : PyLong_AsLongLong(args[1]);
    if (node == NULL || PyErr_Occurred() || weigh(self, node, sign) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int place(PyObject *value, Node *node, int belongs)
{
    EvictableSet *set = as_set(value);
    if (set == NULL)
        return -1;
    return belongs ? order_add(set->order, node) : order_discard(set->order, node);
}

int settle(Columns *self, Node *node)
{
    int device = is_some(node->pages), host = is_some(node->host);
    if (place(self->device, node, device && !node->locks) < 0)
        return -1;
    if (self->hosted && place(self->host, node, !device && host && !node->locks && !node->host_locks) < 0)
        return -1;
    if (self->writes_back) {
        int both = device && host && !node->host_locks;
        if ((both ? order_add(self->doubles, node) : order_discard(self->doubles, node)) < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < held_count(node); i++) {
        ComponentPages *held = held_of(node, i);
        if (held == NULL)
            return -1;
        device = is_some(held->pages), host = is_some(held->host);
        if (place(PyList_GetItem(self->held_device, i), node, device && !held->locks) < 0)
            return -1;
        if (self->hosted && place(PyList_GetItem(self->held_host, i), node, !device && host && !held->host_locks) < 0)
            return -1;
    }
    return 0;
}

PyObject *columns_settle(Columns *self, PyObject *value)
{
    Node *node = as_node(value);
    return node == NULL || settle(self, node) < 0 ? NULL : Py_NewRef(Py_None);
}
