/* Rows in memory as a nest of loops, walked by several threads. Knows nothing of Python's objects but how to read a nest.
 *
 * A row has two numbers, each the sum of what its place in every loop adds: the addresses of both ends of a copy, or an
 * address and the key of a digest. They are 64 bits wide and wrap.
 */
#ifndef KVMOVER_WALK_H
#define KVMOVER_WALK_H

#include "core.h"

#include <math.h>

enum { MOST_LOOPS = 6, FIRST = 0, SECOND = 1 };

/* `count` places. What place i adds to a number is table[i], or i * step where there is no table. */
typedef struct {
    int64_t count;
    const int64_t *table[2];
    int64_t step[2];
} Loop;

/* The innermost loop is the first. */
typedef struct {
    Loop loops[MOST_LOOPS];
    int depth;
    Py_buffer buffers[2 * MOST_LOOPS];
    int held;
} Nest;

/* What a function of the module was asked for. */
typedef struct {
    Nest nest;
    int64_t row_bytes, nbytes;
    int threads;
} Rows;

/* What a thread does of rows [first, stop) of a nest. */
typedef void (*Work)(void *of, int64_t first, int64_t stop);

/* walk.c */
int rows_of(PyObject *const *args, Py_ssize_t count, Rows *rows);
void rows_release(Rows *rows);
void nest_order(Nest *nest, int numbers);
void share(const Rows *rows, int64_t grain_bytes, Work work, void *of);

static inline uint64_t added(const Loop *loop, int64_t place, int number)
{
    return loop->table[number] ? (uint64_t)loop->table[number][place] : (uint64_t)place * (uint64_t)loop->step[number];
}

/* Where a walk is: the place in every loop, and what all loops but the innermost add. */
typedef struct {
    int64_t place[MOST_LOOPS];
    uint64_t outer[2];
} Walker;

static inline void walker_add(Walker *walker, const Nest *nest)
{
    walker->outer[FIRST] = walker->outer[SECOND] = 0;
    for (int i = 1; i < nest->depth; i++)
        for (int number = FIRST; number <= SECOND; number++)
            walker->outer[number] += added(&nest->loops[i], walker->place[i], number);
}

static inline Walker walker_at(const Nest *nest, int64_t row)
{
    Walker walker;
    for (int i = 0; i < nest->depth; i++) {
        walker.place[i] = row % nest->loops[i].count;
        row /= nest->loops[i].count;
    }
    walker_add(&walker, nest);
    return walker;
}

/* To the first place of the innermost loop, in the next place of the others. */
static inline void walker_carry(Walker *walker, const Nest *nest)
{
    walker->place[0] = 0;
    for (int i = 1; i < nest->depth && ++walker->place[i] == nest->loops[i].count; i++)
        walker->place[i] = 0;
    walker_add(walker, nest);
}

#endif
