/* Reads many runs of files to their places in memory, without Python's lock: what kvmover/store/keeper/sweep.py defines. */
#include "core.h"

#include <sys/types.h>
#include <sys/uio.h>

enum { VECTORS = 64 };

/* Runs that follow each other in one file, of which `whole` says whether it came. */
static Py_ssize_t read_some(const int64_t *run, Py_ssize_t left, unsigned char *whole)
{
    struct iovec vectors[VECTORS];
    int64_t end = run[1], got;
    Py_ssize_t count = 0;
    for (; count < left && count < VECTORS; count++) {
        const int64_t *next = run + 4 * count;
        if (count && (next[0] != run[0] || next[1] != end))
            break;
        vectors[count] = (struct iovec){(void *)(uintptr_t)next[2], (size_t)next[3]};
        end += next[3];
    }
    got = preadv((int)run[0], vectors, (int)count, (off_t)run[1]);
    for (Py_ssize_t i = 0; i < count; i++)
        whole[i] = got >= run[4 * i + 1] + run[4 * i + 3] - run[1];
    return count;
}

/* gather(runs): a run is four int64: descriptor, offset, address, bytes. A byte for each: 1 where it came whole. */
PyObject *gather(PyObject *Py_UNUSED(module), PyObject *runs)
{
    Py_buffer view;
    PyObject *answers = NULL;
    if (PyObject_GetBuffer(runs, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (view.len % 32 || (uintptr_t)view.buf % sizeof(int64_t))
        PyErr_Format(PyExc_ValueError, "%zd bytes are no runs of four numbers", view.len);
    else
        answers = PyBytes_FromStringAndSize(NULL, view.len / 32);
    if (answers != NULL) {
        unsigned char *whole = (unsigned char *)PyBytes_AsString(answers);
        Py_ssize_t count = view.len / 32;
        PyThreadState *others = PyEval_SaveThread();
        for (Py_ssize_t at = 0; at < count;)
            at += read_some((const int64_t *)view.buf + 4 * at, count - at, whole + at);
        PyEval_RestoreThread(others);
    }
    PyBuffer_Release(&view);
    return answers;
}
