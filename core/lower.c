/* Page tables to byte offsets of units, and boxes to descriptors: what plan/lower.py and its callers define. Integers only. */
#include "core.h"

enum { COLUMNS = 5, ADDRESS = 0, NBYTES, DEVICE, STRIDE, COUNT };

int column_of(PyObject *of, int flags, Column *column)
{
    if (PyObject_GetBuffer(of, &column->view, flags) < 0)
        return -1;
    column->numbers = column->view.buf;
    column->count = column->view.len / (Py_ssize_t)sizeof(int64_t);
    if (column->view.len % (Py_ssize_t)sizeof(int64_t) == 0 && (uintptr_t)column->view.buf % sizeof(int64_t) == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd bytes are no numbers of 64 bits", column->view.len);
    PyBuffer_Release(&column->view);
    return -1;
}

static int numbers_of(PyObject *const *args, Py_ssize_t count, int64_t *numbers)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int given(const char *function, Py_ssize_t count, Py_ssize_t wanted)
{
    if (count == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", function, wanted, count);
    return 0;
}

/* least_and_most(table): the smallest and the largest of its numbers. Raises ValueError if there are none. */
PyObject *least_and_most(PyObject *Py_UNUSED(module), PyObject *of)
{
    Column table;
    int64_t least = INT64_MAX, most = INT64_MIN;
    Py_ssize_t count;
    if (column_of(of, PyBUF_SIMPLE, &table) < 0)
        return NULL;
    count = table.count;
    for (Py_ssize_t at = 0; at < count; at++) {
        least = table.numbers[at] < least ? table.numbers[at] : least;
        most = table.numbers[at] > most ? table.numbers[at] : most;
    }
    PyBuffer_Release(&table.view);
    if (count > 0)
        return Py_BuildValue("(LL)", (long long)least, (long long)most);
    PyErr_SetString(PyExc_ValueError, "a table of no numbers has no least one");
    return NULL;
}

/* unit_offsets(units, tokens_at, table, page_tokens, pool_pages, page_bytes, token_bytes, head_bytes): where each unit
 * begins, by its first token, written to `units`. False where a page is not in the table or its id not in the pool: what is
 * wrong is then for Python to say. */
PyObject *unit_offsets(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { PAGE_TOKENS, POOL_PAGES, PAGE_BYTES, TOKEN_BYTES, HEAD_BYTES, NUMBERS };
    int64_t number[NUMBERS];
    Column units, tokens, table;
    Py_ssize_t at = 0;
    if (!given("unit_offsets", count, 3 + NUMBERS) || numbers_of(args + 3, NUMBERS, number) < 0 ||
        column_of(args[0], PyBUF_WRITABLE, &units) < 0)
        return NULL;
    if (column_of(args[1], PyBUF_SIMPLE, &tokens) < 0)
        goto release_units;
    if (column_of(args[2], PyBUF_SIMPLE, &table) < 0)
        goto release_tokens;
    if (units.count != tokens.count || number[PAGE_TOKENS] < 1) {
        PyErr_Format(PyExc_ValueError, "%zd units of %zd tokens in pages of %lld", units.count, tokens.count,
                     (long long)number[PAGE_TOKENS]);
        goto release_table;
    }
    for (; at < units.count; at++) {
        int64_t token = tokens.numbers[at], page = token / number[PAGE_TOKENS];
        if (token < 0 || page >= table.count || (uint64_t)table.numbers[page] >= (uint64_t)number[POOL_PAGES])
            break;
        units.numbers[at] = table.numbers[page] * number[PAGE_BYTES] + number[HEAD_BYTES] +
                            token % number[PAGE_TOKENS] * number[TOKEN_BYTES];
    }
release_table:
    PyBuffer_Release(&table.view);
release_tokens:
    PyBuffer_Release(&tokens.view);
release_units:
    PyBuffer_Release(&units.view);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(at == units.count);
}

/* One side of a box: `rows` of descriptors to fill, the bases of its allocations, and where planes and units begin. */
typedef struct {
    Column rows, bases, allocation, offset, units;
    int64_t device, stride, step; /* from a run to the next, and from a place of the outer loop to the next */
    int held;
} Side;

static int side_of(PyObject *of, Side *side)
{
    Column *columns[] = {&side->rows, &side->bases, &side->allocation, &side->offset, &side->units};
    int64_t *numbers[] = {&side->device, &side->stride, &side->step};
    PyObject *item;
    if (!PyTuple_Check(of) || PyTuple_Size(of) != 8) {
        PyErr_SetString(PyExc_TypeError, "a side is a tuple of five tables and three numbers");
        return -1;
    }
    for (; side->held < 5; side->held++)
        if (column_of(PyTuple_GetItem(of, side->held), side->held ? PyBUF_SIMPLE : PyBUF_WRITABLE, columns[side->held]) < 0)
            return -1;
    for (int i = 0; i < 3; i++) {
        item = PyTuple_GetItem(of, 5 + i);
        if (numbers_of(&item, 1, numbers[i]) < 0)
            return -1;
    }
    return 0;
}

static void side_release(Side *side)
{
    Column *columns[] = {&side->rows, &side->bases, &side->allocation, &side->offset, &side->units};
    while (side->held)
        PyBuffer_Release(&columns[--side->held]->view);
}

static int side_fits(const Side *side, int64_t places)
{
    int fits = side->allocation.count == side->offset.count &&
               side->rows.count == side->offset.count * side->units.count * places * COLUMNS;
    for (Py_ssize_t plane = 0; fits && plane < side->allocation.count; plane++)
        fits = side->allocation.numbers[plane] >= 0 && side->allocation.numbers[plane] < side->bases.count;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "the tables of a side do not fit each other");
    return fits;
}

static void side_fill(const Side *side, int64_t run_bytes, int64_t runs, int64_t places)
{
    int64_t *row = side->rows.numbers;
    for (Py_ssize_t plane = 0; plane < side->offset.count; plane++) {
        int64_t start = side->bases.numbers[side->allocation.numbers[plane]] + side->offset.numbers[plane];
        for (Py_ssize_t unit = 0; unit < side->units.count; unit++)
            for (int64_t place = 0; place < places; place++, row += COLUMNS) {
                row[ADDRESS] = start + side->units.numbers[unit] + place * side->step;
                row[NBYTES] = run_bytes;
                row[DEVICE] = side->device;
                row[STRIDE] = side->stride;
                row[COUNT] = runs;
            }
    }
}

/* descriptors(run_bytes, runs, places, side, ...): fills the rows of each side, plane by plane, unit by unit, place by
 * place of the outer loop. A row is `runs` runs. */
PyObject *descriptors(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    int64_t number[3];
    if (count < 3) {
        PyErr_Format(PyExc_TypeError, "descriptors takes 3 numbers and sides, got %zd", count);
        return NULL;
    }
    if (numbers_of(args, 3, number) < 0)
        return NULL;
    for (Py_ssize_t i = 3; i < count; i++) {
        Side side = {.held = 0};
        int done = side_of(args[i], &side) == 0 && side_fits(&side, number[2]);
        if (done)
            side_fill(&side, number[0], number[1], number[2]);
        side_release(&side);
        if (!done)
            return NULL;
    }
    return Py_NewRef(Py_None);
}
