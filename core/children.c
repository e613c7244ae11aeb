/* Children: the children of a node by the bytes of their first page, as a mapping.
 *
 * One dict of 500,000 would be freed, or grown, in one step of milliseconds: under the root of a full cache that is what an
 * eviction ends with. So where they are many they are dealt to PARTS dicts by their hash, each of which is packed anew as it
 * empties. A step then costs no more than one part does.
 */
#include "core.h"

PyTypeObject *ChildrenType;

/* So many are still in one dict. A part is packed when it holds a 32nd to a quarter of the most that it held, each at a
 * share of its own: they empty alike, and would all be packed in the same steps.
 */
enum { FEW = 2048, PARTS = 1024, PACKED = 64, SPARSE = 32 };

typedef struct {
    PyObject *dict; /* NULL where it has none */
    Py_ssize_t most;
} Part;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    Part few, *many; /* one of them is used: `many` where it is not NULL */
} Children;

/* NULL with an error. The low bits of a hash find the place within a dict, so the high bits deal. */
static Part *part_of(Children *self, PyObject *name)
{
    if (self->many == NULL)
        return &self->few;
    Py_hash_t hash = PyObject_Hash(name);
    return hash == -1 && PyErr_Occurred() ? NULL : self->many + ((uint64_t)hash >> 48) % PARTS;
}

static int part_put(Part *part, PyObject *name, PyObject *child)
{
    if (part->dict == NULL && (part->dict = PyDict_New()) == NULL)
        return -1;
    int failed = PyDict_SetItem(part->dict, name, child);
    Py_ssize_t size = PyDict_Size(part->dict);
    part->most = size > part->most ? size : part->most;
    return failed;
}

static int deal(Children *self)
{
    PyObject *name, *child;
    Py_ssize_t at = 0;
    self->many = calloc(PARTS, sizeof *self->many);
    if (self->many == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    while (PyDict_Next(self->few.dict, &at, &name, &child)) {
        Part *part = part_of(self, name);
        if (part == NULL || part_put(part, name, child) < 0)
            return -1;
    }
    put(&self->few.dict, NULL);
    return 0;
}

PyObject *children_get(PyObject *children, PyObject *name)
{
    Part *part = children == NULL ? NULL : part_of((Children *)children, name);
    return part == NULL || part->dict == NULL ? NULL : PyDict_GetItemWithError(part->dict, name);
}

int children_put(PyObject *children, PyObject *name, PyObject *child)
{
    Children *self = (Children *)children;
    if (self->count == FEW && self->many == NULL && deal(self) < 0)
        return -1;
    Part *part = part_of(self, name);
    Py_ssize_t before = part == NULL || part->dict == NULL ? 0 : PyDict_Size(part->dict);
    if (part == NULL || part_put(part, name, child) < 0)
        return -1;
    self->count += PyDict_Size(part->dict) - before;
    return 0;
}

int children_drop(PyObject *children, PyObject *name)
{
    Children *self = (Children *)children;
    Part *part = part_of(self, name);
    if (part == NULL)
        return -1;
    if (part->dict == NULL) {
        PyErr_SetObject(PyExc_KeyError, name);
        return -1;
    }
    if (PyDict_DelItem(part->dict, name) < 0)
        return -1;
    self->count--;
    Py_ssize_t size = PyDict_Size(part->dict);
    Py_ssize_t turn = self->many == NULL ? 0 : part - self->many;
    if (part->most >= PACKED && size * SPARSE * PARTS <= part->most * (PARTS + (SPARSE / 4 - 1) * turn)) {
        PyObject *packed = size ? PyDict_Copy(part->dict) : NULL;
        if (PyErr_Occurred())
            return -1;
        put(&part->dict, packed);
        part->most = size;
    }
    return 0;
}

Py_ssize_t children_count(PyObject *children) { return children == NULL ? 0 : ((Children *)children)->count; }

/* The lists that `of` gives of each dict, one behind the other. */
static PyObject *listed(Children *self, PyObject *(*of)(PyObject *))
{
    PyObject *all = PyList_New(0);
    for (Py_ssize_t i = 0; all != NULL && i < (self->many == NULL ? 1 : PARTS); i++) {
        PyObject *dict = self->many == NULL ? self->few.dict : self->many[i].dict;
        PyObject *some = dict == NULL ? NULL : of(dict);
        Py_ssize_t end = PyList_Size(all);
        if (some != NULL && PyList_SetSlice(all, end, end, some) < 0)
            Py_CLEAR(all);
        Py_XDECREF(some);
        if (PyErr_Occurred())
            Py_CLEAR(all);
    }
    return all;
}

PyObject *children_values(PyObject *children)
{
    return children == NULL ? PyList_New(0) : listed((Children *)children, PyDict_Values);
}

static PyObject *py_values(Children *self, PyObject *Py_UNUSED(none)) { return listed(self, PyDict_Values); }

static PyObject *py_items(Children *self, PyObject *Py_UNUSED(none)) { return listed(self, PyDict_Items); }

static PyObject *py_iter(Children *self)
{
    PyObject *names = listed(self, PyDict_Keys), *each = names == NULL ? NULL : PyObject_GetIter(names);
    Py_XDECREF(names);
    return each;
}

static PyObject *py_get(PyObject *self, PyObject *name)
{
    PyObject *child = children_get(self, name);
    return child == NULL && PyErr_Occurred() ? NULL : Py_NewRef(child == NULL ? Py_None : child);
}

static PyObject *py_subscript(PyObject *self, PyObject *name)
{
    PyObject *child = children_get(self, name);
    if (child == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, name);
    return Py_XNewRef(child);
}

static int py_assign(PyObject *self, PyObject *name, PyObject *child)
{
    return child == NULL ? children_drop(self, name) : children_put(self, name, child);
}

static int py_contains(PyObject *self, PyObject *name)
{
    PyObject *child = children_get(self, name);
    return child == NULL && PyErr_Occurred() ? -1 : child != NULL;
}

PyObject *children_new(PyObject *dict)
{
    Children *self = (Children *)PyType_GenericAlloc(ChildrenType, 0);
    PyObject *name, *child;
    Py_ssize_t at = 0;
    while (self != NULL && dict != NULL && PyDict_Next(dict, &at, &name, &child))
        if (children_put((PyObject *)self, name, child) < 0)
            Py_CLEAR(self);
    return (PyObject *)self;
}

static void children_dealloc(Children *self)
{
    put(&self->few.dict, NULL);
    for (Py_ssize_t i = 0; self->many != NULL && i < PARTS; i++)
        put(&self->many[i].dict, NULL);
    free(self->many);
    object_free((PyObject *)self);
}

static PyMethodDef children_methods[] = {{"get", py_get, METH_O, NULL},
                                         {"values", (PyCFunction)py_values, METH_NOARGS, NULL},
                                         {"items", (PyCFunction)py_items, METH_NOARGS, NULL},
                                         {NULL, NULL, 0, NULL}};
static PyType_Slot children_slots[] = {{Py_tp_dealloc, children_dealloc}, {Py_tp_iter, py_iter},
                                       {Py_mp_length, children_count},    {Py_mp_subscript, py_subscript},
                                       {Py_mp_ass_subscript, py_assign},  {Py_sq_contains, py_contains},
                                       {Py_tp_methods, children_methods}, {0, NULL}};
PyType_Spec children_spec = {"kvmover._core.Children", sizeof(Children), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, children_slots};
