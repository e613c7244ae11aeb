/* Recency: least recently used first, as a ring of links that lie in the nodes, so that every step is O(1). */
#include "core.h"

PyTypeObject *RecencyType;

/* NULL without an error for a node that was made for fewer orders, and so is in none that is not its own. */
Link *link_of(Node *node, Py_ssize_t slot) { return slot < Py_SIZE((PyObject *)node) ? node->links + slot : NULL; }

Node *node_of(Link *link, Py_ssize_t slot) { return (Node *)((char *)(link - slot) - offsetof(Node, links)); }

void link_behind(Link *before, Link *link)
{
    link->before = before, link->after = before->after;
    before->after->before = link;
    before->after = link;
}

void link_out(Link *link)
{
    link->before->after = link->after;
    link->after->before = link->before;
    link->before = link->after = NULL;
}

Node *recency_first(Recency *order)
{
    return order->ends.after != &order->ends ? node_of(order->ends.after, order->slot) : NULL;
}

int order_add(PyObject *order, Node *node)
{
    if (Py_TYPE(order) == HazardOrderType)
        return hazard_add((HazardOrder *)order, node);
    if (Py_TYPE(order) != RecencyType) {
        PyObject *none = PyObject_CallMethod(order, "add", "O", node);
        Py_XDECREF(none);
        return none == NULL ? -1 : 0;
    }
    Recency *mine = (Recency *)order;
    Link *link = link_of(node, mine->slot);
    if (link == NULL) {
        PyErr_Format(PyExc_ValueError, "node %lld was not made for order %zd", node->id, mine->slot);
        return -1;
    }
    if (link->after == NULL) {
        link_behind(mine->ends.before, link);
        mine->count++;
        Py_INCREF((PyObject *)node);
    }
    return 0;
}

int order_discard(PyObject *order, Node *node)
{
    if (Py_TYPE(order) == HazardOrderType)
        return hazard_discard((HazardOrder *)order, node), 0;
    if (Py_TYPE(order) != RecencyType) {
        PyObject *none = PyObject_CallMethod(order, "discard", "O", node);
        Py_XDECREF(none);
        return none == NULL ? -1 : 0;
    }
    Recency *mine = (Recency *)order;
    Link *link = link_of(node, mine->slot);
    if (link != NULL && link->after != NULL) {
        link_out(link);
        mine->count--;
        Py_DECREF(node);
    }
    return 0;
}

int order_contains(PyObject *order, Node *node)
{
    if (Py_TYPE(order) == HazardOrderType)
        return hazard_contains((HazardOrder *)order, node);
    if (Py_TYPE(order) != RecencyType)
        return PySequence_Contains(order, (PyObject *)node);
    Link *link = link_of(node, ((Recency *)order)->slot);
    return link != NULL && link->after != NULL;
}

/* Behind all others, if it is in the order. */
void recency_touch(Recency *order, Node *node)
{
    Link *link = link_of(node, order->slot);
    if (link != NULL && link->after != NULL) {
        link_out(link);
        link_behind(order->ends.before, link);
    }
}

/* Nodes of one path, deepest first, each behind all others. */
int order_touch(PyObject *order, PyObject *path)
{
    if (Py_TYPE(order) == HazardOrderType)
        return hazard_touch((HazardOrder *)order, path);
    if (Py_TYPE(order) != RecencyType) {
        PyObject *none = PyObject_CallMethod(order, "touch", "O", path);
        Py_XDECREF(none);
        return none == NULL ? -1 : 0;
    }
    Recency *mine = (Recency *)order;
    Py_ssize_t count = PyList_Size(path);
    for (Py_ssize_t i = 0; i < count; i++) {
        Node *node = as_node(PyList_GetItem(path, i));
        if (node == NULL)
            return -1;
        recency_touch(mine, node);
    }
    return count < 0 ? -1 : 0;
}

static int recency_put_first(Recency *order, Node *node)
{
    if (order_add((PyObject *)order, node) < 0)
        return -1;
    Link *link = node->links + order->slot;
    link_out(link);
    link_behind(&order->ends, link);
    return 0;
}

int is_linked(PyObject *order) { return Py_TYPE(order) == RecencyType || Py_TYPE(order) == HazardOrderType; }

Node *linked_first(PyObject *order)
{
    return Py_TYPE(order) == RecencyType ? recency_first((Recency *)order) : hazard_first((HazardOrder *)order);
}

int linked_put_first(PyObject *order, Node *node)
{
    return Py_TYPE(order) == RecencyType ? recency_put_first((Recency *)order, node)
                                         : hazard_put_first((HazardOrder *)order, node);
}

static PyObject *done(int failed) { return failed < 0 ? NULL : Py_NewRef(Py_None); }

static PyObject *linked_add(PyObject *self, PyObject *value)
{
    Node *node = as_node(value);
    return node == NULL ? NULL : done(order_add(self, node));
}

static PyObject *linked_discard(PyObject *self, PyObject *value)
{
    Node *node = as_node(value);
    return node == NULL ? NULL : done(order_discard(self, node));
}

static PyObject *linked_touch(PyObject *self, PyObject *path)
{
    PyObject *nodes = PySequence_List(path);
    if (nodes == NULL)
        return NULL;
    int failed = order_touch(self, nodes);
    Py_DECREF(nodes);
    return done(failed);
}

static PyObject *linked_front(PyObject *self, PyObject *value)
{
    Node *node = as_node(value);
    return node == NULL ? NULL : done(linked_put_first(self, node));
}

static PyObject *linked_get_first(PyObject *self, PyObject *Py_UNUSED(none))
{
    Node *node = linked_first(self);
    return Py_NewRef(node == NULL ? Py_None : (PyObject *)node);
}

int linked_contains(PyObject *self, PyObject *value)
{
    Node *node = as_node(value);
    return node == NULL ? -1 : order_contains(self, node);
}

PyMethodDef linked_methods[] = {{"add", linked_add, METH_O, NULL},
                                {"discard", linked_discard, METH_O, NULL},
                                {"touch", linked_touch, METH_O, NULL},
                                {"front", linked_front, METH_O, NULL},
                                {"first", linked_get_first, METH_NOARGS, NULL},
                                {NULL, NULL, 0, NULL}};

/* Appends the nodes of a ring. */
int list_ring(PyObject *nodes, Link *ends, Py_ssize_t slot)
{
    for (Link *link = ends->after; link != ends; link = link->after)
        if (PyList_Append(nodes, (PyObject *)node_of(link, slot)) < 0)
            return -1;
    return 0;
}

/* Over the nodes of this moment. */
static PyObject *recency_iter(Recency *self)
{
    PyObject *nodes = PyList_New(0);
    PyObject *each = nodes == NULL || list_ring(nodes, &self->ends, self->slot) < 0 ? NULL : PyObject_GetIter(nodes);
    Py_XDECREF(nodes);
    return each;
}

/* Another order of the same slot may have taken nodes out of this ring: the count is then wrong, and the ring is not. */
static Py_ssize_t recency_length(Recency *self) { return self->count < 0 ? 0 : self->count; }

static PyObject *recency_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names))
{
    Py_ssize_t slot = 0;
    if (!PyArg_ParseTuple(args, "|n", &slot))
        return NULL;
    Recency *self = (Recency *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->slot = slot < 0 ? 0 : slot;
        self->ends.before = self->ends.after = &self->ends;
    }
    return (PyObject *)self;
}

static void recency_dealloc(Recency *self)
{
    Node *node;
    while ((node = recency_first(self)) != NULL) {
        link_out(self->ends.after);
        Py_DECREF(node);
    }
    object_free((PyObject *)self);
}

static PyType_Slot recency_slots[] = {{Py_tp_new, recency_new},         {Py_tp_dealloc, recency_dealloc},
                                      {Py_tp_iter, recency_iter},       {Py_sq_contains, linked_contains},
                                      {Py_sq_length, recency_length},   {Py_tp_methods, linked_methods},
                                      {0, NULL}};
PyType_Spec recency_spec = {"kvmover._core.Recency", sizeof(Recency), 0, Py_TPFLAGS_DEFAULT,
                            recency_slots};
