/* Which vectors the processor has. A loop is compiled for each kind, and the widest is taken that runs. */
#ifndef KVMOVER_VECTORS_H
#define KVMOVER_VECTORS_H

#include "core.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digests are of little-endian words: on this processor Python computes them"
#endif

#define INLINE inline __attribute__((always_inline))

typedef enum { PLAIN, AVX2, AVX512, KINDS } Vectors;

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX
#define FOR_AVX2 __attribute__((target("avx2")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")))
#endif

/* vectors.c */
Vectors widest_vectors(void);
int vectors_named(PyObject *name, Vectors *vectors);

#endif
