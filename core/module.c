/* The module `_core`: types and functions, and nothing else. */
#include "core.h"

#define FASTCALL(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {{"words", words, METH_O, NULL},
                                  FASTCALL("multiples", multiples),
                                  FASTCALL("pack_words", pack_words),
                                  FASTCALL("id_runs", id_runs),
                                  {"pack_hashes", pack_hashes, METH_O, NULL},
                                  FASTCALL("copy_rows", copy_rows),
                                  FASTCALL("digest_rows", digest_rows),
                                  FASTCALL("cell_digests", cell_digests),
                                  FASTCALL("unit_offsets", unit_offsets),
                                  FASTCALL("descriptors", descriptors),
                                  {"least_and_most", least_and_most, METH_O, NULL},
                                  {"run_count", run_count, METH_O, NULL},
                                  {"short_strides", short_strides, METH_O, NULL},
                                  FASTCALL("runs_fit", runs_fit),
                                  {"gather", gather, METH_O, NULL},
                                  {"vectors", vectors, METH_NOARGS, NULL},
                                  {NULL, NULL, 0, NULL}};
static PyMethodDef chain_function[] = {FASTCALL("chain", chain), {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "What is defined in Python, in C.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    const struct {
        PyTypeObject **type;
        PyType_Spec *spec;
    } types[] = {{&NodeType, &node_spec},       {&ComponentPagesType, &component_pages_spec},
                 {&RecencyType, &recency_spec}, {&EvictableSetType, &evictable_set_spec},
                 {&ReuseHistoryType, &reuse_history_spec}, {&HazardOrderType, &hazard_order_spec}, {&ColumnsType, &columns_spec}, {&PagesInUseType, &pages_in_use_spec},
                 {&ChildrenType, &children_spec}, {&PageTableType, &page_table_spec},
                 {&IdealType, &ideal_spec},     {&SimulatedStorageType, &simulated_storage_spec}};
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
