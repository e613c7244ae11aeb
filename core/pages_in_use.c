/* PagesInUse: what pages_in_use.py defines. One bit a page, in pieces that are made when an id first falls into them. */
#include "core.h"

PyTypeObject *PagesInUseType;

enum { PIECE_IDS = 1 << 15, WORD_IDS = 64 };

typedef struct {
    PyObject_HEAD
    uint64_t **pieces;
    size_t room;
    long long count;
} PagesInUse;

static const uint32_t NO_ID = (uint32_t)1 << 31;

static uint32_t id_at(const char *ids, Py_ssize_t i)
{
    uint32_t id;
    memcpy(&id, ids + i * ID_BYTES, ID_BYTES);
    return id;
}

/* The word with the bit of `id`; NULL where no id of its piece was ever in use. */
static inline uint64_t *known_word(const PagesInUse *self, uint32_t id)
{
    size_t piece = id / PIECE_IDS;
    uint64_t *words = piece < self->room ? self->pieces[piece] : NULL;
    return words == NULL ? NULL : words + id % PIECE_IDS / WORD_IDS;
}

/* The word with the bit of `id`, with its piece made; NULL with an error where there is no memory for it. */
static uint64_t *new_word(PagesInUse *self, uint32_t id)
{
    size_t piece = id / PIECE_IDS;
    if (piece >= self->room) {
        size_t room = piece + 1 > 2 * self->room ? piece + 1 : 2 * self->room;
        uint64_t **pieces = realloc(self->pieces, room * sizeof *pieces);
        if (pieces != NULL) {
            memset(pieces + self->room, 0, (room - self->room) * sizeof *pieces);
            self->pieces = pieces, self->room = room;
        }
    }
    if (piece < self->room && self->pieces[piece] == NULL)
        self->pieces[piece] = calloc(PIECE_IDS / WORD_IDS, sizeof(uint64_t));
    if (piece >= self->room || self->pieces[piece] == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    return self->pieces[piece] + id % PIECE_IDS / WORD_IDS;
}

static inline uint64_t bit_of(uint32_t id) { return (uint64_t)1 << id % WORD_IDS; }

static int ids_of(PyObject *row, char **ids, Py_ssize_t *count)
{
    if (row_of(row, ids, count) < 0)
        return -1;
    *count /= ID_BYTES;
    return 0;
}

/* The first `count` ids are in use, and are not from here on. */
static void clear(PagesInUse *self, const char *ids, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        *known_word(self, id_at(ids, i)) &= ~bit_of(id_at(ids, i));
    self->count -= count;
}

/* The first id that was in use already, with no other in use then; -1 where there was none, -2 with an error. */
static long long claim(PagesInUse *self, PyObject *row)
{
    char *ids;
    Py_ssize_t count;
    if (ids_of(row, &ids, &count) < 0)
        return -2;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t id = id_at(ids, i);
        uint64_t *word = known_word(self, id);
        if (word == NULL && id < NO_ID)
            word = new_word(self, id);
        if (word == NULL || (*word & bit_of(id))) {
            self->count += i;
            clear(self, ids, i);
            return PyErr_Occurred() ? -2 : (long long)id;
        }
        *word |= bit_of(id);
    }
    self->count += count;
    return -1;
}

static PyObject *pages_claim(PagesInUse *self, PyObject *row)
{
    long long id = claim(self, row);
    return id == -2 ? NULL : PyLong_FromLongLong(id);
}

int claim_ids(PyObject *in_use, PyObject *ids)
{
    if (Py_TYPE(in_use) != PagesInUseType) {
        PyErr_Format(PyExc_TypeError, "the pages in use of this core are due, got %R", in_use);
        return -1;
    }
    long long id = claim((PagesInUse *)in_use, ids);
    return id == -2 ? -1 : id == -1;
}

static PyObject *pages_release(PagesInUse *self, PyObject *row)
{
    char *ids;
    Py_ssize_t count;
    if (ids_of(row, &ids, &count) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t id = id_at(ids, i);
        uint64_t *word = known_word(self, id);
        if (word == NULL || !(*word & bit_of(id))) {
            while (i-- > 0)
                *known_word(self, id_at(ids, i)) |= bit_of(id_at(ids, i));
            return PyErr_Format(PyExc_ValueError, "page %lu is not in use", (unsigned long)id);
        }
        *word &= ~bit_of(id);
    }
    self->count -= count;
    return Py_NewRef(Py_None);
}

int release_ids(PyObject *in_use, PyObject *ids)
{
    PyObject *done = pages_release((PagesInUse *)in_use, ids);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int pages_contains(PagesInUse *self, PyObject *number)
{
    long long id = PyLong_AsLongLong(number);
    const uint64_t *word = id >= 0 && id < NO_ID ? known_word(self, (uint32_t)id) : NULL;
    return PyErr_Occurred() ? -1 : word != NULL && (*word & bit_of((uint32_t)id)) != 0;
}

static Py_ssize_t pages_length(PagesInUse *self) { return (Py_ssize_t)self->count; }

static void pages_dealloc(PagesInUse *self)
{
    for (size_t i = 0; i < self->room; i++)
        free(self->pieces[i]);
    free(self->pieces);
    object_free((PyObject *)self);
}

static PyMethodDef pages_methods[] = {{"claim", (PyCFunction)pages_claim, METH_O, NULL},
                                      {"release", (PyCFunction)pages_release, METH_O, NULL},
                                      {NULL, NULL, 0, NULL}};
static PyType_Slot pages_slots[] = {{Py_tp_dealloc, pages_dealloc},
                                    {Py_sq_length, pages_length},
                                    {Py_sq_contains, pages_contains},
                                    {Py_tp_methods, pages_methods},
                                    {0, NULL}};
PyType_Spec pages_in_use_spec = {"kvmover._core.PagesInUse", sizeof(PagesInUse), 0, Py_TPFLAGS_DEFAULT, pages_slots};
