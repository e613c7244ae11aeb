/* EvictableSet and Columns: what columns.py says of them, with its steps in steps.c and accounts.c. */
#include "core.h"

PyTypeObject *EvictableSetType, *ColumnsType;

EvictableSet *as_set(PyObject *value)
{
    if (value != NULL && Py_TYPE(value) == EvictableSetType && ((EvictableSet *)value)->order != NULL)
        return (EvictableSet *)value;
    PyErr_Format(PyExc_TypeError, "an evictable set of this core is due, got %R", value == NULL ? Py_None : value);
    return NULL;
}

static PyMemberDef set_members[] = {{"order", T_OBJECT, offsetof(EvictableSet, order), READONLY, NULL},
                                    {"evictable", T_LONGLONG, offsetof(EvictableSet, evictable), 0, NULL},
                                    {"protected", T_LONGLONG, offsetof(EvictableSet, protected_), 0, NULL},
                                    {NULL, 0, 0, 0, NULL}};

static void set_dealloc(EvictableSet *self)
{
    put(&self->order, NULL);
    object_free((PyObject *)self);
}

static PyType_Slot set_slots[] = {{Py_tp_dealloc, set_dealloc}, {Py_tp_members, set_members}, {0, NULL}};
PyType_Spec evictable_set_spec = {"kvmover._core.EvictableSet", sizeof(EvictableSet), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, set_slots};

static int columns_init(Columns *self, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(names))
{
    put(&self->nodes, PyDict_New());
    put(&self->roots, PyDict_New());
    put(&self->per_page, PyTuple_New(0));
    put(&self->reach_pages, PyTuple_New(0));
    put(&self->ranks, PyTuple_New(0));
    put(&self->held_device, PyList_New(0));
    put(&self->held_host, PyList_New(0));
    put(&self->doubles, PyObject_CallFunction((PyObject *)RecencyType, "i", DOUBLES));
    return PyErr_Occurred() ? -1 : 0;
}

static void columns_dealloc(Columns *self)
{
    PyObject **columns[] = {&self->nodes,   &self->roots,       &self->trimmed,   &self->device,
                            &self->host,    &self->doubles,     &self->held_device, &self->held_host,
                            &self->per_page, &self->reach_pages, &self->ranks,      &self->journal};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        put(columns[i], NULL);
    object_free((PyObject *)self);
}

/* A node that nobody knows yet, with places for the ids of each component. */
Node *columns_make(Columns *self, long long id, PyObject *parent, PyObject *tokens, long long start, long long end)
{
    Py_ssize_t count = component_count(self);
    Node *node = node_new(self->hosted || count ? HELD + 2 * count : 1, id, parent, tokens, start, end);
    PyObject *held = node == NULL || !count ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; held != NULL && i < count; i++) {
        PyObject *each = PyType_GenericAlloc(ComponentPagesType, 0);
        if (each == NULL || PyTuple_SetItem(held, i, each) < 0)
            Py_CLEAR(held);
    }
    if (held != NULL)
        put(&node->held, held);
    else if (PyErr_Occurred())
        Py_CLEAR(node);
    return node;
}

static PyObject *columns_node(Columns *self, PyObject *args)
{
    long long id, start, end;
    PyObject *parent, *tokens;
    if (!PyArg_ParseTuple(args, "LOO!LL", &id, &parent, &PyBytes_Type, &tokens, &start, &end))
        return NULL;
    if (parent != Py_None && as_node(parent) == NULL)
        return NULL;
    return (PyObject *)columns_make(self, id, parent, tokens, start, end);
}

static PyObject *columns_recency(Columns *Py_UNUSED(self), PyObject *slot)
{
    return PyObject_CallFunctionObjArgs((PyObject *)RecencyType, slot, NULL);
}

static PyObject *columns_set_of(Columns *self, PyObject *args)
{
    PyObject *order, *slot;
    if (!PyArg_ParseTuple(args, "OO", &order, &slot))
        return NULL;
    EvictableSet *set = (EvictableSet *)PyType_GenericAlloc(EvictableSetType, 0);
    if (set != NULL) {
        set->order = order == Py_None ? columns_recency(self, slot) : Py_NewRef(order);
        if (set->order == NULL)
            Py_CLEAR(set);
    }
    return (PyObject *)set;
}

int columns_whole(Columns *self)
{
    if (!is_some(self->trimmed))
        return 0;
    Node *node = as_node(self->trimmed);
    if (node == NULL)
        return -1;
    Py_ssize_t pages = (Py_ssize_t)(node->end - node->start);
    if (row_cut(&node->tokens, 0, pages * (Py_ssize_t)self->page_bytes) < 0)
        return -1;
    if (is_some(node->pages) && PyBytes_Size(node->pages) > pages * ID_BYTES) {
        PyObject *front = PyBytes_FromStringAndSize(PyBytes_AsString(node->pages), pages * ID_BYTES);
        if (front == NULL)
            return -1;
        put(&node->pages, front);
    }
    put(&self->trimmed, NULL);
    return 0;
}

/* Tells the journal, where there is one, of a node that has come to a tier, or of its pages from `first` on that leave
 * one. -1 with an error.
 */
int note_stored(Columns *self, Node *node, int tier)
{
    if (!is_some(self->journal))
        return 0;
    PyObject *told = PyObject_CallMethod(self->journal, "stored", "Oi", (PyObject *)node, tier);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

int note_removed(Columns *self, Node *node, long long first, int tier)
{
    if (!is_some(self->journal))
        return 0;
    PyObject *told = PyObject_CallMethod(self->journal, "removed", "OLi", (PyObject *)node, first, tier);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

static PyObject *columns_py_whole(Columns *self, PyObject *Py_UNUSED(none))
{
    return columns_whole(self) < 0 ? NULL : Py_NewRef(Py_None);
}

#define COUNT(name) {#name, T_LONGLONG, offsetof(Columns, name), 0, NULL}
#define COLUMN(name) {#name, T_OBJECT, offsetof(Columns, name), 0, NULL}
static PyMemberDef columns_members[] = {
    COUNT(page_bytes), COUNT(clock), COUNT(next_id), COLUMN(trimmed), COLUMN(device),
    COLUMN(host), COLUMN(doubles), COLUMN(held_device), COLUMN(held_host), COLUMN(per_page),
    COLUMN(reach_pages), COLUMN(ranks), COLUMN(journal),
    {"nodes", T_OBJECT, offsetof(Columns, nodes), READONLY, NULL},
    {"roots", T_OBJECT, offsetof(Columns, roots), READONLY, NULL},
    {"hosted", T_BOOL, offsetof(Columns, hosted), 0, NULL},
    {"writes_back", T_BOOL, offsetof(Columns, writes_back), 0, NULL}, {NULL, 0, 0, 0, NULL}};
#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))function, flags, NULL}
static PyMethodDef columns_methods[] = {METHOD("node", columns_node, METH_VARARGS),
                                        METHOD("set_of", columns_set_of, METH_VARARGS),
                                        METHOD("recency", columns_recency, METH_O),
                                        METHOD("whole", columns_py_whole, METH_NOARGS),
                                        METHOD("descend", columns_descend, METH_FASTCALL),
                                        METHOD("gather", columns_gather, METH_FASTCALL),
                                        METHOD("touch", columns_touch, METH_O),
                                        METHOD("find", columns_find, METH_FASTCALL),
                                        METHOD("insert", columns_insert, METH_FASTCALL),
                                        METHOD("lock", columns_lock, METH_O),
                                        METHOD("unlock", columns_unlock, METH_O),
                                        METHOD("front", columns_front, METH_FASTCALL),
                                        METHOD("split", columns_split, METH_FASTCALL),
                                        METHOD("grow", columns_grow, METH_FASTCALL),
                                        METHOD("evict", columns_evict, METH_FASTCALL),
                                        METHOD("evict_device", columns_evict_device, METH_FASTCALL),
                                        METHOD("evict_host", columns_evict_host, METH_O),
                                        METHOD("evict_nodes", columns_evict_nodes, METH_FASTCALL),
                                        METHOD("trim", columns_trim, METH_FASTCALL),
                                        METHOD("forget_root", columns_forget_root, METH_O),
                                        METHOD("weigh", columns_weigh, METH_FASTCALL),
                                        METHOD("settle", columns_settle, METH_O),
                                        METHOD("first_held", columns_first_held, METH_FASTCALL),
                                        METHOD("shift", columns_shift, METH_FASTCALL),
                                        {NULL, NULL, 0, NULL}};
static PyType_Slot columns_slots[] = {{Py_tp_init, columns_init}, {Py_tp_dealloc, columns_dealloc},
                                      {Py_tp_members, columns_members}, {Py_tp_methods, columns_methods}, {0, NULL}};
PyType_Spec columns_spec = {"kvmover._core.Columns", sizeof(Columns), 0, Py_TPFLAGS_DEFAULT,
                            columns_slots};
