"""Adds the compiled module to the build; without a compiler the package installs all the same."""

from setuptools import Extension, setup

SOURCES = ["kernels", "segment", "collectives", "mailbox", "group", "module"]
HEADERS = ["kernels.h", "kernels.inc", "segment.h", "collectives.h", "mailbox.h", "group.h"]

setup(
    ext_modules=[
        Extension(
            "paceline.native._core",
            sources=[f"paceline/native/{name}.cpp" for name in SOURCES],
            depends=[f"paceline/native/{name}" for name in HEADERS],
            # No contraction: the same numbers must give the same bits on every processor.
            extra_compile_args=["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ]
)
