"""The one thing that pyproject.toml cannot say yet without a warning: an extension module in C.

It holds the inner loops of the e3m0 codec. Where it cannot be compiled the installation goes on without it, and numpy
does the work.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "stretto.protocol._fp4",
            ["protocol/_fp4.c"],
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
