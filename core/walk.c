/* Nests of loops as Python describes them, and their rows shared out to threads. */
#include "walk.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    MOST_THREADS = 16,
    THREAD_BYTES = 1 << 20, /* a thread is not started for less: that takes as long as copying 100 KB */
    WITHOUT_GIL_BYTES = 1 << 16
};

static const int64_t MOST_BYTES = (int64_t)1 << 47;

/* A number that each place adds `step` to, or a table with an int64 a place. */
static int read_number(Nest *nest, Loop *loop, PyObject *value, int number)
{
    if (PyLong_Check(value)) {
        loop->step[number] = (int64_t)PyLong_AsUnsignedLongLongMask(value);
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_buffer *buffer = &nest->buffers[nest->held];
    if (PyObject_GetBuffer(value, buffer, PyBUF_SIMPLE) < 0)
        return -1;
    nest->held++;
    if (buffer->len != loop->count * (Py_ssize_t)sizeof(int64_t) || (uintptr_t)buffer->buf % sizeof(int64_t)) {
        PyErr_Format(PyExc_ValueError, "a table of %zd bytes for %lld places", buffer->len, (long long)loop->count);
        return -1;
    }
    loop->table[number] = buffer->buf;
    return 0;
}

static int read_loop(Nest *nest, PyObject *described)
{
    PyObject *count, *first, *second;
    if (!PyTuple_Check(described) || !PyArg_ParseTuple(described, "OOO", &count, &first, &second)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a loop is a tuple: places, and what they add to each number");
        return -1;
    }
    Loop *loop = &nest->loops[nest->depth];
    *loop = (Loop){.count = PyLong_AsLongLong(count)};
    if (loop->count < 1) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "a loop of %lld places", (long long)loop->count);
        return -1;
    }
    if (read_number(nest, loop, first, FIRST) < 0 || read_number(nest, loop, second, SECOND) < 0)
        return -1;
    nest->depth++;
    return 0;
}

static int read_nest(Nest *nest, PyObject *description)
{
    Py_ssize_t depth = PyTuple_Check(description) ? PyTuple_Size(description) : 0;
    if (depth < 1 || depth >= MOST_LOOPS) { /* room for one more, which a copy may add */
        PyErr_Format(PyExc_ValueError, "a nest of %zd loops: 1 to %d are due", depth, MOST_LOOPS - 1);
        return -1;
    }
    for (Py_ssize_t i = 0; i < depth; i++)
        if (read_loop(nest, PyTuple_GetItem(description, i)) < 0)
            return -1;
    return 0;
}

static int64_t nest_rows(const Nest *nest)
{
    int64_t rows = 1;
    for (int i = 0; i < nest->depth; i++)
        rows *= nest->loops[i].count;
    return rows;
}

/* Bytes of all rows; -1 with an error for more than any memory has, whose sums would not fit 64 bits. */
static int64_t nest_bytes(const Nest *nest, int64_t row_bytes)
{
    int64_t nbytes = row_bytes;
    for (int i = 0; i < nest->depth && nbytes <= MOST_BYTES; i++)
        if (__builtin_mul_overflow(nbytes, nest->loops[i].count, &nbytes))
            nbytes = INT64_MAX;
    if (nbytes > MOST_BYTES) {
        PyErr_Format(PyExc_ValueError, "rows of %lld bytes are more than memory has", (long long)row_bytes);
        return -1;
    }
    return nbytes;
}

/* Of loops, bytes of a row and a number of threads. -1 with an error; it is to be released either way. */
int rows_of(PyObject *const *args, Py_ssize_t count, Rows *rows)
{
    *rows = (Rows){.row_bytes = count == 3 ? PyLong_AsLongLong(args[1]) : -1};
    long threads = count == 3 && !PyErr_Occurred() ? PyLong_AsLong(args[2]) : -1;
    if (rows->row_bytes < 1 || threads < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "loops, bytes of a row and a number of threads are due");
        return -1;
    }
    if (read_nest(&rows->nest, args[0]) < 0)
        return -1;
    rows->nbytes = nest_bytes(&rows->nest, rows->row_bytes);
    if (rows->nbytes < 0)
        return -1;
    int64_t most = rows->nbytes / THREAD_BYTES + 1;
    most = most > MOST_THREADS ? MOST_THREADS : most;
    rows->threads = threads < most ? (int)threads : (int)most;
    return 0;
}

void rows_release(Rows *rows)
{
    while (rows->nest.held > 0)
        PyBuffer_Release(&rows->nest.buffers[--rows->nest.held]);
}

/* How far a place of a loop is from the next, on average. */
static double distance(const Loop *loop, int number)
{
    if (loop->table[number] == NULL)
        return fabs((double)loop->step[number]);
    double sum = 0;
    for (int64_t i = 1; i < loop->count; i++)
        sum += fabs((double)(loop->table[number][i] - loop->table[number][i - 1]));
    return sum / (double)(loop->count > 1 ? loop->count - 1 : 1);
}

/* The shortest way innermost, by the first `numbers` numbers; loops of one place go outside, where they cost nothing. */
void nest_order(Nest *nest, int numbers)
{
    double far[MOST_LOOPS];
    for (int i = 0; i < nest->depth; i++) {
        Loop loop = nest->loops[i];
        double mine = loop.count == 1 ? HUGE_VAL : distance(&loop, FIRST) * (numbers > 1 ? distance(&loop, SECOND) : 1);
        int at = i;
        for (; at > 0 && far[at - 1] > mine; at--) {
            far[at] = far[at - 1];
            nest->loops[at] = nest->loops[at - 1];
        }
        far[at] = mine;
        nest->loops[at] = loop;
    }
}

/* Rows that are taken a grain at a time by whichever thread is free: another process may have one of the cores. */
typedef struct {
    _Atomic int64_t next;
    int64_t count, grain;
    Work work;
    void *of;
} Shared;

static void *take(void *argument)
{
    Shared *shared = argument;
    for (;;) {
        int64_t first = atomic_fetch_add(&shared->next, shared->grain);
        if (first >= shared->count)
            return NULL;
        int64_t left = shared->count - first;
        shared->work(shared->of, first, first + (left < shared->grain ? left : shared->grain));
    }
}

/* `work` on all rows of the nest, by this thread and others, which have ended when it returns; Python's lock is given up
 * meanwhile where that pays. Where the system gives no thread, fewer do it all.
 */
void share(const Rows *rows, int64_t grain_bytes, Work work, void *of)
{
    int64_t count = nest_rows(&rows->nest), grain = grain_bytes / (rows->nbytes / count);
    Shared shared = {.count = count, .grain = grain < 1 ? 1 : grain, .work = work, .of = of};
    int64_t grains = (count + shared.grain - 1) / shared.grain;
    pthread_t others[MOST_THREADS];
    int started = 0;
    PyThreadState *lock = rows->nbytes < WITHOUT_GIL_BYTES ? NULL : PyEval_SaveThread();
    while (started + 1 < rows->threads && started + 1 < grains && !pthread_create(&others[started], NULL, take, &shared))
        started++;
    take(&shared);
    while (started > 0)
        pthread_join(others[--started], NULL);
    if (lock != NULL)
        PyEval_RestoreThread(lock);
}
