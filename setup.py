"""Adds the compiled modules to the build; without a compiler the package installs all the same."""

from pathlib import Path

from setuptools import Extension, setup


def extension(name: str, folder: str) -> Extension:
    """The module of all sources of a folder."""
    return Extension(
        f"paceline.native.{name}",
        sources=sorted(map(str, Path(folder).glob("*.cpp"))),
        depends=sorted(str(path) for kind in ("*.h", "*.inc") for path in Path("paceline/native").rglob(kind)),
        # No contraction: the same numbers must give the same bits on every processor.
        extra_compile_args=["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        language="c++",
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[
        extension("_core", "paceline/native"),
        extension("_sparse", "paceline/native/sparse"),
        extension("_readers", "paceline/native/readers"),
        extension("_codecs", "paceline/native/codecs"),
    ]
)
