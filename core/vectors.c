/* Finds out at run time which vectors the processor has: the wheel is built for the oldest of its kind. */
#include "vectors.h"

static const char *NAMES[KINDS] = {"plain", "avx2", "avx512"};

Vectors widest_vectors(void)
{
#ifdef HAS_AVX
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return PLAIN;
}

/* vectors(): names of those that the processor has, the widest last. */
PyObject *vectors(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    Vectors widest = widest_vectors();
    PyObject *names = PyTuple_New(widest + 1);
    for (int i = 0; names != NULL && i <= (int)widest; i++) {
        PyObject *name = PyUnicode_FromString(NAMES[i]);
        if (name == NULL || PyTuple_SetItem(names, i, name) < 0)
            Py_CLEAR(names);
    }
    return names;
}

/* Of a name, where the processor has them; the widest where `name` is NULL. -1 with a ValueError. */
int vectors_named(PyObject *name, Vectors *found)
{
    *found = widest_vectors();
    if (name == NULL)
        return 0;
    for (int i = *found; i >= 0; i--) {
        PyObject *other = PyUnicode_FromString(NAMES[i]);
        int differs = other == NULL ? -1 : PyUnicode_Compare(name, other);
        Py_XDECREF(other);
        if (PyErr_Occurred())
            return -1;
        if (differs == 0) {
            *found = (Vectors)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "this processor has no vectors %R", name);
    return -1;
}
