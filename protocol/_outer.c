/* The outer step in one pass over memory: the optional extension module stretto.protocol._outer.

   outer.py says what it computes and holds the same in numpy; each product and each sum is rounded on its own, in the
   same order, so the bits are the same. The GIL is released inside the loop. */

#include "_arrays.h"

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Element i of the outputs depends on element i of the inputs only, so an output may be one of the inputs. */
EVERY_CPU static void step(const float32 *anchor, const float32 *momentum, const float32 *gradient, float rate,
                           float mu, float32 *new_anchor, float32 *new_momentum, Py_ssize_t n)
{
    INDEPENDENT
    for (Py_ssize_t i = 0; i < n; i++) {
        const float g = gradient[i], b = momentum[i] * mu + g;
        new_momentum[i] = b;
        new_anchor[i] = anchor[i] - (b * mu + g) * rate;
    }
}

static PyObject *nesterov(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer anchor, momentum, gradient, new_anchor, new_momentum;
    float rate, mu;
    if (!PyArg_ParseTuple(args, "y*y*y*ffw*w*:nesterov", &anchor, &momentum, &gradient, &rate, &mu, &new_anchor,
                          &new_momentum))
        return NULL;
    const Py_ssize_t size = anchor.len;
    const int fit = size % 4 == 0 && momentum.len == size && gradient.len == size && new_anchor.len == size &&
                    new_momentum.len == size;
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        step(anchor.buf, momentum.buf, gradient.buf, rate, mu, new_anchor.buf, new_momentum.buf, size / 4);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "anchor, momentum, gradient and the results must have the same size");
    PyBuffer_Release(&anchor);
    PyBuffer_Release(&momentum);
    PyBuffer_Release(&gradient);
    PyBuffer_Release(&new_anchor);
    PyBuffer_Release(&new_momentum);
    return fit ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"nesterov", nesterov, METH_VARARGS,
     "nesterov(anchor, momentum, gradient, rate, mu, new_anchor, new_momentum): one outer step"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_outer", .m_doc = "The outer step; see outer.py.",
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit__outer(void) { return PyModuleDef_Init(&module); }
