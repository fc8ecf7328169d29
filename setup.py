"""The one thing that pyproject.toml cannot say yet without a warning: extension modules in C.

They hold the inner loops of the codecs and of the outer step. Where they cannot be compiled the installation goes on
without them, and numpy does the work.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"stretto.protocol.{name}",
            [f"protocol/{name}.c"],
            depends=["protocol/_arrays.h"],
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
        for name in ("_fp4", "_int8", "_outer")
    ]
)
