/* The inner loops of the codec int8: the optional extension module stretto.protocol._int8.

   blockwise.py describes the format and holds the same arithmetic in numpy: the bytes and the sums are the same. As in
   _fp4.c, short loops over a block that stays in the L1 cache, each of them one that compilers turn into vector
   instructions. Only sizes are checked here. The GIL is released inside the loops. */

#include "_arrays.h"

#define NOT_FINITE 0x7F800000 /* bits of inf; those of nan lie above */
#define SMALLEST 0x0400       /* bounds of a scale that is not 0, as bf16 words */
#define LARGEST 0x7F7F
#define WHOLE 12582912.0f /* 1.5 * 2**23: adding it rounds to a whole number, ties to even, held in the lowest bits */

INLINE float scale_of(uint16_t word)
{
    const union { uint32_t bits; float value; } scale = {(uint32_t)word << 16};
    return scale.value;
}

/* Encode one block into its scale and 256 codes. Returns 0 if a value is not finite. */
INLINE int encode_block(const bits32 *restrict x, pair16 *restrict word, uint8_t *restrict codes)
{
    const float32 *values = (const float32 *)x;
    uint16_t low[BLOCK] __attribute__((aligned(64)));
    int32_t top = 0;
    for (int i = 0; i < BLOCK; i++) {
        const int32_t magnitude = x[i] & 0x7FFFFFFF;
        top = magnitude > top ? magnitude : top;
    }
    if (top >= NOT_FINITE)
        return 0;
    if (top == 0) {
        *word = 0;
        memset(codes, 0, BLOCK);
        return 1;
    }
    int32_t nearest = (top + 0x7FFF + (top >> 16 & 1)) >> 16; /* bf16, ties to even */
    nearest = nearest < SMALLEST ? SMALLEST : nearest > LARGEST ? LARGEST : nearest;
    *word = (uint16_t)nearest;
    const float scale = scale_of((uint16_t)nearest);
    for (int i = 0; i < BLOCK; i++) {
        float ratio = values[i] / scale * 127.0f; /* 127 / scale could overflow */
        ratio = ratio > 127.0f ? 127.0f : ratio;
        ratio = ratio < -127.0f ? -127.0f : ratio;
        const union { float value; uint32_t bits; } whole = {ratio + WHOLE};
        low[i] = (uint16_t)whole.bits;
    }
    for (int i = 0; i < BLOCK; i++)
        codes[i] = (uint8_t)low[i];
    return 1;
}

/* Encode n values. Returns 0 if one of them is not finite. */
EVERY_CPU static int encode(const bits32 *x, Py_ssize_t n, uint8_t *scales, uint8_t *codes)
{
    pair16 *words = (pair16 *)scales;
    const Py_ssize_t blocks = n / BLOCK, rest = n % BLOCK;
    for (Py_ssize_t b = 0; b < blocks; b++)
        if (!encode_block(x + b * BLOCK, words + b, codes + b * BLOCK))
            return 0;
    if (rest) {
        int32_t padded[BLOCK] = {0};
        uint8_t last[BLOCK];
        memcpy(padded, x + blocks * BLOCK, (size_t)rest * 4);
        if (!encode_block(padded, words + blocks, last))
            return 0;
        memcpy(codes + blocks * BLOCK, last, (size_t)rest);
    }
    return 1;
}

/* out += weight * value over up to one block; each operation is rounded apart, in this order. */
INLINE void add_block(float scale, const int8_t *restrict codes, float weight, float32 *restrict out, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        out[i] += (float)codes[i] / 127.0f * scale * weight;
}

EVERY_CPU static void add(const pair16 *words, const int8_t *codes, float weight, float32 *out, Py_ssize_t n)
{
    const Py_ssize_t blocks = n / BLOCK, rest = n % BLOCK;
    for (Py_ssize_t b = 0; b < blocks; b++)
        add_block(scale_of(words[b]), codes + b * BLOCK, weight, out + b * BLOCK, BLOCK);
    if (rest)
        add_block(scale_of(words[blocks]), codes + blocks * BLOCK, weight, out + blocks * BLOCK, rest);
}

static PyObject *encode_payload(PyObject *Py_UNUSED(self), PyObject *args)
{
    return encode_argument(args, encode, 2, 8);
}

static PyObject *add_into(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer payload, out;
    float weight;
    if (!PyArg_ParseTuple(args, "y*fw*:add_into", &payload, &weight, &out))
        return NULL;
    const Py_ssize_t n = out.len / 4, head = 2 * count_blocks(n);
    const int fit = out.len % 4 == 0 && payload.len == head + n;
    if (fit) {
        const uint8_t *bytes = payload.buf;
        Py_BEGIN_ALLOW_THREADS
        add((const pair16 *)bytes, (const int8_t *)(bytes + head), weight, out.buf, n);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes does not go with %zd values", payload.len, n);
    PyBuffer_Release(&payload);
    PyBuffer_Release(&out);
    return fit ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"encode", encode_payload, METH_VARARGS, "encode(x) -> payload, or None if a value is not finite"},
    {"add_into", add_into, METH_VARARGS, "add_into(payload, weight, out): out += weight * value"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_int8", .m_doc = "int8 in C; see blockwise.py.",
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit__int8(void) { return PyModuleDef_Init(&module); }
