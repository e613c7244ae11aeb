/* The module `_core`: types and functions, and nothing else. */
#include "core.h"

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef functions[] = {{"words", words, METH_O, NULL},
                                  {"copy_rows", FAST(copy_rows), METH_FASTCALL, NULL},
                                  {"digest_rows", FAST(digest_rows), METH_FASTCALL, NULL},
                                  {"cell_digests", FAST(cell_digests), METH_FASTCALL, NULL},
                                  {"vectors", vectors, METH_NOARGS, NULL},
                                  {NULL, NULL, 0, NULL}};
static PyMethodDef chain_function[] = {
    {"chain", FAST(chain), METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "What is defined in Python, in C.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    const struct {
        PyTypeObject **type;
        PyType_Spec *spec;
    } types[] = {{&NodeType, &node_spec},       {&ComponentPagesType, &component_pages_spec},
                 {&RecencyType, &recency_spec}, {&EvictableSetType, &evictable_set_spec},
                 {&ColumnsType, &columns_spec}};
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module != NULL && i < sizeof types / sizeof *types; i++) {
        *types[i].type = (PyTypeObject *)PyType_FromSpec(types[i].spec);
        if (*types[i].type == NULL || PyModule_AddType(module, *types[i].type) < 0)
            Py_CLEAR(module);
    }
    if (module != NULL && words_init() < 0)
        Py_CLEAR(module);
    if (module != NULL && has_sha_instructions() && PyModule_AddFunctions(module, chain_function) < 0)
        Py_CLEAR(module);
    return module;
}
