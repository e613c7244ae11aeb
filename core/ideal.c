/* The Ideal of a replay: see ideal.py. Places lie in one hash table, under the place before and the block. */
#include "core.h"

PyTypeObject *IdealType;

typedef struct {
    long long before, block, place; /* a `place` below 0: nothing is here */
} Slot;

typedef struct {
    PyObject_HEAD
    Slot *slots;
    size_t slot_count; /* a power of two, at least twice the places */
    long long *known;  /* by place: tokens that were computed */
    long long places, room;
} Ideal;

/* What a prompt's blocks come to. `begin` and `end` are tokens: where the block begins, and where the next page ends. */
typedef struct {
    long long block_tokens, page_tokens, begin, end, reused;
    int whole;
    long long *numbers;
} Reading;

static Slot *slot_of(Ideal *self, long long before, long long block)
{
    uint64_t hash = (uint64_t)before * 0x9e3779b97f4a7c15u ^ (uint64_t)block * 0xc2b2ae3d27d4eb4fu;
    size_t at = (size_t)(hash ^ hash >> 29) & (self->slot_count - 1);
    for (;; at = (at + 1) & (self->slot_count - 1)) {
        Slot *slot = self->slots + at;
        if (slot->place < 0 || (slot->before == before && slot->block == block))
            return slot;
    }
}

static int grow(Ideal *self)
{
    Ideal larger = *self;
    larger.room = self->room ? 2 * self->room : 1024;
    larger.slot_count = 2 * (size_t)larger.room;
    long long *known = realloc(self->known, (size_t)larger.room * sizeof *known);
    if (known == NULL)
        return -1;
    self->known = larger.known = known;
    larger.slots = malloc(larger.slot_count * sizeof *larger.slots);
    if (larger.slots == NULL)
        return -1;
    for (size_t i = 0; i < larger.slot_count; i++)
        larger.slots[i].place = -1;
    for (size_t i = 0; i < self->slot_count; i++)
        if (self->slots[i].place >= 0)
            *slot_of(&larger, self->slots[i].before, self->slots[i].block) = self->slots[i];
    free(self->slots);
    *self = larger;
    return 0;
}

/* The place of a block after another place; a new one knows nothing of its block yet. -1 without memory. */
static long long place_of(Ideal *self, long long before, long long block)
{
    if (self->places == self->room && grow(self) < 0)
        return -1;
    Slot *slot = slot_of(self, before, block);
    if (slot->place < 0) {
        *slot = (Slot){before, block, self->places};
        self->known[self->places++] = 0;
    }
    return slot->place;
}

/* One more block of a prompt; the place that the next one comes after, or -1 without memory. */
static long long read_block(Ideal *self, Reading *reading, long long before, long long block, long long wanted)
{
    long long fresh = self->places, place = place_of(self, before, block);
    if (place < 0)
        return -1;
    long long have = self->known[place];
    if (place == fresh)
        reading->whole = 0;
    if (reading->whole) {
        reading->reused += have < wanted ? have : wanted;
        reading->whole = have >= wanted;
    }
    if (have < wanted)
        self->known[place] = wanted;
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
    free(self->known);
    object_free((PyObject *)self);
}

static PyMethodDef ideal_methods[] = {{"serve", (PyCFunction)ideal_serve, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot ideal_slots[] = {{Py_tp_dealloc, ideal_dealloc}, {Py_tp_methods, ideal_methods}, {0, NULL}};
PyType_Spec ideal_spec = {"kvmover._core.Ideal", sizeof(Ideal), 0, Py_TPFLAGS_DEFAULT, ideal_slots};
