/* The Ideal of a replay: see ideal.py. Places lie in one row, in the order in which they were first seen.
 *
 * A prompt that goes on where nobody went before makes places one after the other, so the block after a place is looked
 * for at the next one first. Only what is found nowhere else is in the hash table: most of a prompt is read in a row.
 */
#include "core.h"

PyTypeObject *IdealType;

/* A block after the place `before`, and how many of its tokens were ever computed. */
typedef struct {
    long long before, block, known;
} Place;

typedef struct {
    PyObject_HEAD
    Place *places;
    long long count, room;
    long long *slots; /* places, by what they are; -1: none */
    size_t slot_count; /* a power of two, at least twice the places */
} Ideal;

/* What a prompt's blocks come to. `begin` and `end` are tokens: where the block begins, and where the next page ends. */
typedef struct {
    long long block_tokens, page_tokens, begin, end, reused;
    int whole;
    long long *numbers;
} Reading;

static int is_at(const Ideal *self, long long place, long long before, long long block)
{
    return self->places[place].before == before && self->places[place].block == block;
}

static long long *slot_of(Ideal *self, long long before, long long block)
{
    uint64_t hash = (uint64_t)before * 0x9e3779b97f4a7c15u ^ (uint64_t)block * 0xc2b2ae3d27d4eb4fu;
    size_t at = (size_t)(hash ^ hash >> 29) & (self->slot_count - 1);
    while (self->slots[at] >= 0 && !is_at(self, self->slots[at], before, block))
        at = (at + 1) & (self->slot_count - 1);
    return self->slots + at;
}

static int grow(Ideal *self)
{
    long long room = self->room ? 2 * self->room : 1024;
    Place *places = realloc(self->places, (size_t)room * sizeof *places);
    if (places == NULL)
        return -1;
    self->places = places;
    size_t before = self->slot_count, after = 2 * (size_t)room;
    long long *slots = malloc(after * sizeof *slots), *old = self->slots;
    if (slots == NULL)
        return -1;
    memset(slots, 0xff, after * sizeof *slots);
    self->room = room, self->slots = slots, self->slot_count = after;
    for (size_t i = 0; i < before; i++)
        if (old[i] >= 0)
            *slot_of(self, places[old[i]].before, places[old[i]].block) = old[i];
    free(old);
    return 0;
}

/* The place of a block after another place; a new one knows nothing of its block yet. -1 without memory. */
static long long place_of(Ideal *self, long long before, long long block)
{
    if (self->count == self->room && grow(self) < 0)
        return -1;
    long long next = before + 1;
    if (next < self->count) {
        if (is_at(self, next, before, block))
            return next;
        long long *slot = slot_of(self, before, block);
        if (*slot >= 0)
            return *slot;
        *slot = self->count;
    }
    self->places[self->count] = (Place){before, block, 0};
    return self->count++;
}

/* One more block of a prompt; the place that the next one comes after, or -1 without memory. */
static long long read_block(Ideal *self, Reading *reading, long long before, long long block, long long wanted)
{
    long long fresh = self->count, place = place_of(self, before, block);
    if (place < 0)
        return -1;
    long long have = self->places[place].known;
    if (place == fresh)
        reading->whole = 0;
    if (reading->whole) {
        reading->reused += have < wanted ? have : wanted;
        reading->whole = have >= wanted;
    }
    if (have < wanted)
        self->places[place].known = wanted;
    long long pages = (reading->block_tokens + reading->page_tokens - 1) / reading->page_tokens;
    for (; reading->end <= reading->begin + wanted; reading->end += reading->page_tokens)
        *reading->numbers++ = place * pages + (reading->end - reading->begin - 1) / reading->page_tokens;
    reading->begin += wanted;
    return wanted < reading->block_tokens ? place_of(self, place, -wanted) : place;
}

/* Tokens of all blocks; -1 with an error for what are no lengths of `count` blocks. */
static long long total(PyObject *lengths, Py_ssize_t count)
{
    long long tokens = 0;
    if (PySequence_Size(lengths) != count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "every block has a length");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(lengths, i);
        long long each = item == NULL ? -1 : PyLong_AsLongLong(item);
        Py_XDECREF(item);
        if (each < 0 || each > INT_MAX) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "a block of %lld tokens", each);
            return -1;
        }
        tokens += each;
    }
    return tokens;
}

static PyObject *ideal_serve(Ideal *self, PyObject *args)
{
    PyObject *hash_ids, *lengths;
    Reading reading = {.whole = 1};
    if (!PyArg_ParseTuple(args, "OOLL", &hash_ids, &lengths, &reading.block_tokens, &reading.page_tokens))
        return NULL;
    if (reading.block_tokens < 1 || reading.page_tokens < 1) {
        PyErr_SetString(PyExc_ValueError, "a block and a page hold at least one token");
        return NULL;
    }
    Py_ssize_t count = PySequence_Size(hash_ids);
    long long tokens = count < 0 ? -1 : total(lengths, count), before = -1;
    if (tokens < 0)
        return NULL;
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(tokens / reading.page_tokens) * 8);
    if (numbers == NULL)
        return NULL;
    reading.numbers = (long long *)PyBytes_AsString(numbers);
    reading.end = reading.page_tokens;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *block = PySequence_GetItem(hash_ids, i), *length = PySequence_GetItem(lengths, i);
        long long id = block == NULL ? -1 : PyLong_AsLongLong(block);
        long long wanted = length == NULL ? -1 : PyLong_AsLongLong(length);
        Py_XDECREF(block);
        Py_XDECREF(length);
        if (!PyErr_Occurred() && (before = read_block(self, &reading, before, id, wanted)) < 0)
            PyErr_NoMemory();
        if (PyErr_Occurred()) {
            Py_DECREF(numbers);
            return NULL;
        }
    }
    return Py_BuildValue("LN", reading.reused, numbers);
}

static void ideal_dealloc(Ideal *self)
{
    free(self->slots);
    free(self->places);
    object_free((PyObject *)self);
}

static PyMethodDef ideal_methods[] = {{"serve", (PyCFunction)ideal_serve, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot ideal_slots[] = {{Py_tp_dealloc, ideal_dealloc}, {Py_tp_methods, ideal_methods}, {0, NULL}};
PyType_Spec ideal_spec = {"kvmover._core.Ideal", sizeof(Ideal), 0, Py_TPFLAGS_DEFAULT, ideal_slots};
