/* What the extension modules in C share: how loops over arrays are compiled.

   They need gcc or clang and a little-endian machine; elsewhere the build stops, and the package goes on with numpy.
   Products and sums must be rounded apart, so everything is compiled with -ffp-contract=off. */

#ifndef STRETTO_ARRAYS_H
#define STRETTO_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs gcc or clang and a little-endian machine; numpy serves elsewhere"
#endif

/* One binary for every x86-64: the loader takes the AVX2 copy of a function where the processor has it. */
#if defined(__x86_64__) && defined(__GLIBC__) && (!defined(__clang__) || __clang_major__ >= 14)
#define EVERY_CPU __attribute__((target_clones("avx2", "default")))
#else
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

#define BLOCK 256 /* values under one scale */

/* Loads and stores that may be at an odd address and may look at another type's memory. */
typedef int32_t bits32 __attribute__((aligned(1), may_alias));
typedef float float32 __attribute__((aligned(1), may_alias));
typedef uint16_t pair16 __attribute__((aligned(1), may_alias));

static inline Py_ssize_t count_blocks(Py_ssize_t n) { return n / BLOCK + (n % BLOCK != 0); }

/* A bytes object to be filled. Fresh memory comes page by page, which takes as long as encoding; large pages help. */
static inline PyObject *new_payload(Py_ssize_t size)
{
    PyObject *payload = PyBytes_FromStringAndSize(NULL, size);
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21;
    if (payload != NULL && size >= 4 << 20) {
        const uintptr_t start = ((uintptr_t)PyBytes_AS_STRING(payload) + page - 1) / page * page;
        const uintptr_t end = ((uintptr_t)PyBytes_AS_STRING(payload) + (uintptr_t)size) / page * page;
        (void)madvise((void *)start, end - start, MADV_HUGEPAGE); /* advice: nothing is lost where it is refused */
    }
#endif
    return payload;
}

/* Writes the payload of n values into their scales and codes. Returns 0 if one of them cannot be held. */
typedef int (*encoder)(const bits32 *x, Py_ssize_t n, uint8_t *scales, uint8_t *codes);

/* encode(x) of a codec whose payload is all scales, so many bytes per block, then all codes, of so many bits: a bytes
   object, or None if a value cannot be held. */
static inline PyObject *encode_argument(PyObject *args, encoder encode, Py_ssize_t scale_bytes, Py_ssize_t bits)
{
    Py_buffer x;
    int good = 0;
    if (!PyArg_ParseTuple(args, "y*:encode", &x))
        return NULL;
    const Py_ssize_t n = x.len / 4, head = scale_bytes * count_blocks(n);
    PyObject *payload = new_payload(head + (n * bits + 7) / 8);
    if (payload != NULL) {
        uint8_t *scales = (uint8_t *)PyBytes_AS_STRING(payload);
        Py_BEGIN_ALLOW_THREADS
        good = encode(x.buf, n, scales, scales + head);
        Py_END_ALLOW_THREADS
        if (!good)
            Py_SETREF(payload, Py_NewRef(Py_None));
    }
    PyBuffer_Release(&x);
    return payload;
}

#endif
