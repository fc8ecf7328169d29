/* The inner loops of the E3M0 codec: the optional extension module stretto.protocol._fp4.

   fp4.py describes the format, fp4_numpy.py holds the same functions in numpy; all write the same bytes. A block of
   256 values goes through a few short loops over a buffer that stays in the L1 cache. Each loop does one thing to
   consecutive elements, which is what compilers turn into vector instructions by themselves:

     encode   upper halves and their largest magnitude; half -> nibble; nibbles to bytes; two nibbles -> one byte
     add      one byte -> two nibbles; nibble -> FP32 bits, out += weight * value

   Both are as fast as memory only if memory never waits for them, so each block asks for the one two blocks ahead, and
   the encoder, which reads one array only, reads it in two places at a time. A prefetch may run past the end of an
   array: it never faults.

   Only sizes are checked here; dtypes, scale bytes and padding are fp4.py's business. The GIL is released inside the
   loops. */

#include "_arrays.h"

#define STRAND 128     /* blocks in a row; the encoder works on two strands in turn */
#define TOO_BIG 0x7F40 /* upper half of the bits of 1.5 * 2**127; inf and nan lie above */
#define HALF 0x40      /* the mantissa's highest bit, in an upper half: adding it rounds the exponent to nearest */

/* Encode one block into its scale byte and 128 code bytes. Returns 0 if a value cannot be held. */
INLINE int encode_block(const bits32 *restrict x, uint8_t *restrict scale, uint8_t *restrict codes)
{
    int16_t upper[BLOCK] __attribute__((aligned(64)));
    uint8_t nibbles[BLOCK] __attribute__((aligned(64)));
    const pair16 *pairs = (const pair16 *)nibbles;
    int16_t top = 0;
    for (int line = 0; line < 8; line++)
        __builtin_prefetch(x + 2 * BLOCK + 16 * line);
    for (int i = 0; i < BLOCK; i++) {
        upper[i] = (int16_t)(x[i] >> 16); /* rounding needs no lower bits, and half the width is twice the speed */
        int16_t magnitude = upper[i] & 0x7FFF;
        top = magnitude > top ? magnitude : top;
    }
    if (top >= TOO_BIG)
        return 0;
    for (int line = 8; line < 16; line++)
        __builtin_prefetch(x + 2 * BLOCK + 16 * line);
    const int exponent = (top + HALF) >> 7, lo = exponent > 7 ? exponent - 7 : 0;
    const int16_t zero = (int16_t)(lo * 128 - HALF); /* the largest magnitude that becomes code 0, less 127 */
    for (int i = 0; i < BLOCK; i++) {
        int16_t magnitude = upper[i] & 0x7FFF;
        magnitude = magnitude > zero ? magnitude : zero;
        upper[i] = (int16_t)((uint16_t)(magnitude - zero) >> 7 | ((uint16_t)upper[i] >> 12 & 8));
    }
    for (int i = 0; i < BLOCK; i++)
        nibbles[i] = (uint8_t)upper[i];
    for (int i = 0; i < BLOCK / 2; i++)
        codes[i] = (uint8_t)(pairs[i] | pairs[i] >> 4);
    *scale = (uint8_t)lo;
    return 1;
}

/* Encode n values. Returns 0 if one of them cannot be held. */
EVERY_CPU static int encode(const bits32 *x, Py_ssize_t n, uint8_t *scales, uint8_t *codes)
{
    const Py_ssize_t blocks = n / BLOCK, rest = n % BLOCK;
    for (Py_ssize_t start = 0; start < blocks; start += 2 * STRAND)
        for (Py_ssize_t i = 0; i < 2 * STRAND; i++) {
            const Py_ssize_t b = start + i / 2 + i % 2 * STRAND;
            if (b < blocks && !encode_block(x + b * BLOCK, scales + b, codes + b * (BLOCK / 2)))
                return 0;
        }
    if (rest) {
        int32_t padded[BLOCK] = {0};
        uint8_t last[BLOCK / 2];
        memcpy(padded, x + blocks * BLOCK, (size_t)rest * 4);
        if (!encode_block(padded, scales + blocks, last))
            return 0;
        memcpy(codes + blocks * (BLOCK / 2), last, (size_t)(rest + 1) / 2);
    }
    return 1;
}

/* out += weight * value over one block. Levels are built as bits: no table, and a zero is +0 with either sign bit. */
INLINE void add_block(int lo, const uint8_t *restrict codes, float weight, float32 *restrict out)
{
    uint16_t pairs[BLOCK / 2] __attribute__((aligned(64)));
    const uint8_t *nibbles = (const uint8_t *)pairs;
    for (int line = 0; line < 16; line++)
        __builtin_prefetch(out + 2 * BLOCK + 16 * line, 1);
    for (int i = 0; i < BLOCK / 2; i++)
        pairs[i] = (uint16_t)((codes[i] | codes[i] << 4) & 0x0F0F);
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t c = nibbles[i] & 7u, bits = (c + (uint32_t)lo) << 23 | (nibbles[i] & 8u) << 28;
        const union { uint32_t bits; float value; } level = {c ? bits : 0};
        out[i] += weight * level.value;
    }
}

EVERY_CPU static void add(const uint8_t *scales, const uint8_t *codes, float weight, float32 *out, Py_ssize_t n)
{
    const Py_ssize_t blocks = n / BLOCK, rest = n % BLOCK;
    for (Py_ssize_t b = 0; b < blocks; b++)
        add_block(scales[b], codes + b * (BLOCK / 2), weight, out + b * BLOCK);
    if (rest) {
        float padded[BLOCK] = {0};
        uint8_t last[BLOCK / 2] = {0};
        memcpy(padded, out + blocks * BLOCK, (size_t)rest * 4);
        memcpy(last, codes + blocks * (BLOCK / 2), (size_t)(rest + 1) / 2);
        add_block(scales[blocks], last, weight, padded);
        memcpy(out + blocks * BLOCK, padded, (size_t)rest * 4);
    }
}

static Py_ssize_t code_bytes(Py_ssize_t n) { return n / 2 + n % 2; }

/* Whether three buffers belong to the same number of values; a ValueError if not. */
static int fits(const Py_buffer *values, const Py_buffer *scales, const Py_buffer *codes)
{
    const Py_ssize_t n = values->len / 4;
    if (values->len % 4 == 0 && scales->len == count_blocks(n) && codes->len == code_bytes(n))
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes of values do not go with %zd scale bytes and %zd code bytes",
                 values->len, scales->len, codes->len);
    return 0;
}

static PyObject *encode_into(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, scales, codes;
    int good = 0;
    if (!PyArg_ParseTuple(args, "y*w*w*:encode_into", &x, &scales, &codes))
        return NULL;
    const int fit = fits(&x, &scales, &codes);
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        good = encode(x.buf, x.len / 4, scales.buf, codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&codes);
    return fit ? PyBool_FromLong(good) : NULL;
}

static PyObject *encode_payload(PyObject *Py_UNUSED(self), PyObject *args)
{
    return encode_argument(args, encode, 1, 4);
}

static PyObject *add_into(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer scales, codes, out;
    float weight;
    if (!PyArg_ParseTuple(args, "y*y*fw*:add_into", &scales, &codes, &weight, &out))
        return NULL;
    const int fit = fits(&out, &scales, &codes);
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        add(scales.buf, codes.buf, weight, out.buf, out.len / 4);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&scales);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&out);
    return fit ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"encode", encode_payload, METH_VARARGS, "encode(x) -> payload, or None if a value cannot be held"},
    {"encode_into", encode_into, METH_VARARGS, "encode_into(x, scales, codes) -> whether every value can be held"},
    {"add_into", add_into, METH_VARARGS, "add_into(scales, codes, weight, out): out += weight * value"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_fp4", .m_doc = "E3M0 in C; see fp4.py.",
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit__fp4(void) { return PyModuleDef_Init(&module); }
