"""Adds the compiled modules to the build; without a compiler the package installs all the same."""

from pathlib import Path

from setuptools import Extension, setup


def compiled(name: str, folder: str) -> Extension:
    """The module of all sources in a folder."""
    files = sorted(Path(folder).iterdir())
    return Extension(
        f"paceline.native.{name}",
        sources=[str(file) for file in files if file.suffix == ".cpp"],
        depends=[str(file) for file in files if file.suffix in (".h", ".inc")],
        # No contraction: the same numbers must give the same bits on every processor.
        extra_compile_args=["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        language="c++",
        py_limited_api=True,
        optional=True,
    )


setup(ext_modules=[compiled("_core", "paceline/native"), compiled("_codecs", "paceline/native/codecs")])
