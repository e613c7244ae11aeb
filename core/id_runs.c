/* Runs of consecutive ids as slices: see runs_of_ids.py. */
#include "core.h"

/* slice(first, stop) */
static PyObject *slice_of(long long first, long long stop)
{
    PyObject *from = PyLong_FromLongLong(first), *to = PyLong_FromLongLong(stop), *slice = NULL;
    if (from != NULL && to != NULL)
        slice = PySlice_New(from, to, NULL);
    Py_XDECREF(from);
    Py_XDECREF(to);
    return slice;
}

/* id_runs(buffer of int32, most): a list of slices; an empty one where there are more than `most`. */
PyObject *id_runs(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Py_buffer view;
    Py_ssize_t most = count == 2 ? PyLong_AsSsize_t(args[1]) : -1;
    if (most < 1 || PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "ids and the most runs are due");
        return NULL;
    }
    const char *ids = view.buf;
    Py_ssize_t left = view.len / ID_BYTES;
    PyObject *runs = PyList_New(0);
    while (runs != NULL && left > 0) {
        int32_t first, next;
        Py_ssize_t run = 1;
        memcpy(&first, ids, ID_BYTES);
        for (; run < left; run++) {
            memcpy(&next, ids + run * ID_BYTES, ID_BYTES);
            if (next != first + run)
                break;
        }
        if (PyList_Size(runs) == most) {
            Py_DECREF(runs);
            runs = PyList_New(0);
            break;
        }
        PyObject *slice = slice_of(first, (long long)first + run);
        if (slice == NULL || PyList_Append(runs, slice) < 0)
            Py_CLEAR(runs);
        Py_XDECREF(slice);
        ids += run * ID_BYTES, left -= run;
    }
    PyBuffer_Release(&view);
    return runs;
}
