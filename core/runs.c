/* Runs of memory on their way to a transport, counted and held to registered ranges: what transport/base.py and
 * transport/checks.py define. A row is an address, a length, a device, a stride and a count of runs. */
#include "core.h"

enum { ADDRESS, NBYTES, DEVICE, STRIDE, COUNT, COLUMNS };

/* run_count(table): the runs of all rows, at most 2^63 - 1; 0 where a row moves nothing. */
PyObject *run_count(PyObject *Py_UNUSED(module), PyObject *of)
{
    Column table;
    int64_t runs = 0;
    if (column_of(of, PyBUF_SIMPLE, &table) < 0)
        return NULL;
    for (Py_ssize_t at = 0; at + COLUMNS <= table.count; at += COLUMNS) {
        const int64_t *row = table.numbers + at;
        if (row[NBYTES] <= 0 || row[COUNT] <= 0) {
            runs = 0;
            break;
        }
        runs = row[COUNT] > INT64_MAX - runs ? INT64_MAX : runs + row[COUNT];
    }
    PyBuffer_Release(&table.view);
    return PyLong_FromLongLong(runs);
}

/* short_strides(table): True where the stride of a row is below its length. */
PyObject *short_strides(PyObject *Py_UNUSED(module), PyObject *of)
{
    Column table;
    int found = 0;
    if (column_of(of, PyBUF_SIMPLE, &table) < 0)
        return NULL;
    for (Py_ssize_t at = 0; at + COLUMNS <= table.count && !found; at += COLUMNS)
        found = table.numbers[at + STRIDE] < table.numbers[at + NBYTES];
    PyBuffer_Release(&table.view);
    return PyBool_FromLong(found);
}

/* The rows of one side, and the registered ranges of the first row's device: ascending, the first a sentinel. */
typedef struct {
    Column rows, starts, ends;
    int held;
} Checked;

static int checked_of(PyObject *const *args, Checked *side)
{
    Column *columns[] = {&side->rows, &side->starts, &side->ends};
    for (; side->held < 3; side->held++)
        if (column_of(args[side->held], PyBUF_SIMPLE, columns[side->held]) < 0)
            return -1;
    if (side->rows.count % COLUMNS == 0 && side->starts.count == side->ends.count && side->starts.count > 0)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the tables of a side do not fit each other");
    return -1;
}

static void checked_release(Checked *side)
{
    Column *columns[] = {&side->rows, &side->starts, &side->ends};
    while (side->held)
        PyBuffer_Release(&columns[--side->held]->view);
}

/* The last range that begins at or before an address. `near`: tried first, as neighbours share a range. */
static Py_ssize_t range_at(const Checked *side, int64_t address, Py_ssize_t near)
{
    const int64_t *starts = side->starts.numbers;
    Py_ssize_t low = 0, high = side->starts.count;
    if (starts[near] <= address && (near + 1 == high || address < starts[near + 1]))
        return near;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (starts[middle] <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

static int rows_inside(const Checked *side)
{
    Py_ssize_t range = 0;
    for (Py_ssize_t at = 0; at < side->rows.count; at += COLUMNS) {
        const int64_t *row = side->rows.numbers + at;
        int64_t room;
        if (row[DEVICE] != side->rows.numbers[DEVICE] || row[NBYTES] < 1 || row[COUNT] < 1)
            return 0;
        range = range_at(side, row[ADDRESS], range < 0 ? 0 : range);
        if (range < 1)
            return 0;
        /* Compared before it is subtracted: an address and a length near 2^63 wrap round to one that fits. */
        room = side->ends.numbers[range] - row[ADDRESS];
        if (room < row[NBYTES])
            return 0;
        /* By division: a product of two hostile numbers wraps round to one that fits. */
        if (row[COUNT] > 1 && (row[STRIDE] < row[NBYTES] || row[STRIDE] > (room - row[NBYTES]) / (row[COUNT] - 1)))
            return 0;
    }
    return 1;
}

static int rows_pair(const Column *local, const Column *remote)
{
    if (local->count != remote->count)
        return 0;
    for (Py_ssize_t at = 0; at < local->count; at += COLUMNS)
        if (local->numbers[at + NBYTES] != remote->numbers[at + NBYTES] ||
            local->numbers[at + COUNT] != remote->numbers[at + COUNT])
            return 0;
    return 1;
}

/* runs_fit(local, starts, ends, remote, starts, ends): True where the rows of both sides pair one by one and each side's
 * lie in its ranges. False: Python looks again, and says what is wrong. */
PyObject *runs_fit(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Checked local = {.held = 0}, remote = {.held = 0};
    int fits = 0;
    if (count != 6) {
        PyErr_Format(PyExc_TypeError, "runs_fit takes 6 tables, got %zd", count);
        return NULL;
    }
    if (checked_of(args, &local) == 0 && checked_of(args + 3, &remote) == 0)
        fits = rows_pair(&local.rows, &remote.rows) && rows_inside(&local) && rows_inside(&remote);
    checked_release(&remote);
    checked_release(&local);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}
