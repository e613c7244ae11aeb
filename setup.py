"""The C core is built where there is a compiler; everything else is said in pyproject.toml."""

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
core = Extension(
    "kvmover._core",
    sources=sorted(map(str, Path("core").glob("*.c"))),
    depends=sorted(map(str, Path("core").rglob("*.h"))),
    extra_compile_args=["-std=c11", "-O3", "-g0", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[core] if shutil.which(compiler) else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if shutil.which(compiler) else {},
)
