/* A Node and what it keeps of a further component: node.py, as structures that steps read without a look-up. */
#include "core.h"

PyTypeObject *NodeType, *ComponentPagesType;

Node *as_node(PyObject *value)
{
    if (value != NULL && Py_TYPE(value) == NodeType)
        return (Node *)value;
    PyErr_Format(PyExc_TypeError, "a node of this core is due, got %R", value == NULL ? Py_None : value);
    return NULL;
}

void object_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Where it begins and how long it is; NULL with a TypeError where it is no bytes. */
char *row_data(const Row *row, Py_ssize_t *length)
{
    char *data;
    if (row_of(row->bytes, &data, length) < 0)
        return NULL;
    if (row->length < 0)
        return data;
    *length = row->length;
    return data + row->at;
}

/* Leaves of a row `length` bytes from `from` on: without a copy where that is no less than 7/8 of the bytes that it then
 * keeps in memory. */
int row_cut(Row *row, Py_ssize_t from, Py_ssize_t length)
{
    Py_ssize_t own;
    char *data = row_data(row, &own);
    if (data == NULL || from < 0 || length < 0 || from + length > own) {
        if (data != NULL)
            PyErr_Format(PyExc_ValueError, "a row of %zd bytes has none from %zd to %zd", own, from, from + length);
        return -1;
    }
    Py_ssize_t size = PyBytes_Size(row->bytes);
    if (length >= size - size / 8) {
        row->at = (row->length < 0 ? 0 : row->at) + from, row->length = length;
        return 0;
    }
    PyObject *part = PyBytes_FromStringAndSize(data + from, length);
    if (part == NULL)
        return -1;
    put(&row->bytes, part);
    row->length = -1;
    return 0;
}

Node *node_new(Py_ssize_t orders, long long id, PyObject *parent, PyObject *tokens, long long start, long long end)
{
    Node *node = (Node *)PyType_GenericAlloc(NodeType, orders);
    if (node == NULL)
        return NULL;
    node->id = id, node->start = start, node->end = end;
    node->parent = Py_NewRef(parent);
    node->tokens = (Row){Py_NewRef(tokens), 0, -1};
    node->priority = PyLong_FromLong(0);
    node->held = PyTuple_New(0);
    return node;
}

static void node_clear(Node *node)
{
    PyObject **columns[] = {&node->parent, &node->tokens.bytes, &node->children, &node->pages, &node->host,
                            &node->priority, &node->hashes, &node->held, &node->namespace};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        put(columns[i], NULL);
}

static void node_dealloc(Node *node)
{
    node_clear(node);
    object_free((PyObject *)node);
}

static PyObject *node_repr(Node *node)
{
    return PyUnicode_FromFormat("Node(%lld, pages %lld to %lld)", node->id, node->start, node->end);
}

/* Most nodes are leaves: the map is made when somebody asks. */
PyObject *node_children(Node *node, void *Py_UNUSED(unused))
{
    if (node->children == NULL && (node->children = children_new(NULL)) == NULL)
        return NULL;
    return Py_NewRef(node->children);
}

static int node_set_children(Node *node, PyObject *children, void *Py_UNUSED(unused))
{
    if (children == NULL || !PyDict_Check(children)) {
        PyErr_SetString(PyExc_TypeError, "children are a dict");
        return -1;
    }
    PyObject *own = children_new(children);
    if (own != NULL)
        put(&node->children, own);
    return own == NULL ? -1 : 0;
}

/* Python sees bytes of its own: the part becomes a copy. */
static PyObject *node_tokens(Node *node, void *Py_UNUSED(unused))
{
    Row *row = &node->tokens;
    if (row->length >= 0) {
        Py_ssize_t length;
        char *data = row_data(row, &length);
        PyObject *part = data == NULL ? NULL : PyBytes_FromStringAndSize(data, length);
        if (part == NULL)
            return NULL;
        put(&row->bytes, part);
        row->length = -1;
    }
    return Py_NewRef(row->bytes == NULL ? Py_None : row->bytes);
}

static int node_set_tokens(Node *node, PyObject *tokens, void *Py_UNUSED(unused))
{
    put(&node->tokens.bytes, Py_XNewRef(tokens));
    node->tokens.length = -1;
    return 0;
}

static PyObject *node_unlink(Node *node, PyObject *Py_UNUSED(none))
{
    put(&node->children, NULL);
    put(&node->parent, NULL);
    Py_RETURN_NONE;
}

PyObject *node_path(Node *node, PyObject *Py_UNUSED(none))
{
    PyObject *path = PyList_New(0);
    while (path != NULL && is_some(node->parent)) {
        Node *parent = as_node(node->parent);
        if (parent == NULL || PyList_Append(path, (PyObject *)node) < 0)
            Py_CLEAR(path);
        node = parent;
    }
    return path;
}

#define COUNT(name) {#name, T_LONGLONG, offsetof(Node, name), 0, NULL}
#define COLUMN(name) {#name, T_OBJECT, offsetof(Node, name), 0, NULL}
static PyMemberDef node_members[] = {
    COUNT(id),     COUNT(start),  COUNT(end),     COUNT(locks),  COUNT(host_locks), COUNT(device_children),
    COUNT(hits),   COUNT(used),   COUNT(created), COUNT(backing), COUNT(loading),   COUNT(use),    COLUMN(parent),
    COLUMN(pages), COLUMN(host),  COLUMN(priority), COLUMN(hashes), COLUMN(held), COLUMN(namespace),
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef node_getset[] = {{"children", (getter)node_children, (setter)node_set_children, NULL, NULL},
                                    {"tokens", (getter)node_tokens, (setter)node_set_tokens, NULL, NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef node_methods[] = {{"path", (PyCFunction)node_path, METH_NOARGS, NULL},
                                     {"unlink", (PyCFunction)node_unlink, METH_NOARGS, NULL},
                                     {NULL, NULL, 0, NULL}};
static PyType_Slot node_slots[] = {{Py_tp_dealloc, node_dealloc}, {Py_tp_repr, node_repr},
                                   {Py_tp_members, node_members}, {Py_tp_getset, node_getset},
                                   {Py_tp_methods, node_methods}, {0, NULL}};
PyType_Spec node_spec = {"kvmover._core.Node", offsetof(Node, links), sizeof(Link),
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, node_slots};

static void component_pages_dealloc(ComponentPages *held)
{
    put(&held->pages, NULL);
    put(&held->host, NULL);
    object_free((PyObject *)held);
}

#undef COUNT
#undef COLUMN
#define COUNT(name) {#name, T_LONGLONG, offsetof(ComponentPages, name), 0, NULL}
#define COLUMN(name) {#name, T_OBJECT, offsetof(ComponentPages, name), 0, NULL}
static PyMemberDef component_pages_members[] = {COLUMN(pages), COLUMN(host), COUNT(locks), COUNT(host_locks),
                                                COUNT(busy),   {NULL, 0, 0, 0, NULL}};
static PyType_Slot component_pages_slots[] = {
    {Py_tp_dealloc, component_pages_dealloc}, {Py_tp_members, component_pages_members}, {0, NULL}};
PyType_Spec component_pages_spec = {"kvmover._core.ComponentPages", sizeof(ComponentPages), 0,
                                    Py_TPFLAGS_DEFAULT, component_pages_slots};
