"""Adds the compiled modules to the build; without a compiler the package installs all the same."""

from setuptools import Extension, setup

SOURCES = ["kernels", "segment", "collectives", "mailbox", "group", "module"]
HEADERS = ["kernels.h", "kernels.inc", "segment.h", "collectives.h", "mailbox.h", "group.h"]


def extension(name: str, sources: list[str], headers: list[str]) -> Extension:
    return Extension(
        f"paceline.native.{name}",
        sources=[f"paceline/native/{source}.cpp" for source in sources],
        depends=[f"paceline/native/{header}" for header in headers],
        # No contraction: the same numbers must give the same bits on every processor.
        extra_compile_args=["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        language="c++",
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[
        extension("_core", SOURCES, HEADERS),
        extension("_readers", ["readers/module"], ["readers/lines.h", "readers/formats.h"]),
    ]
)
