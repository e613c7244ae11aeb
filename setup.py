"""The C core is built where there is a compiler, and kernels where there is Triton; all else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

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


class BuildWithKernels(build_py):
    """Adds machine code for GPUs, but to an editable install, whose source changes.

    For those in KVMOVER_ARCHITECTURES, as "86 90", if it is set; none if it is empty.
    """

    def run(self) -> None:
        """Build as ever, then compile the kernels that movers start with."""
        super().run()
        architectures = os.environ.get("KVMOVER_ARCHITECTURES")
        folder = Path(self.build_lib, "kvmover", "kernels", "shipped")
        # The build folder may hold an earlier wheel's.
        shutil.rmtree(folder, ignore_errors=True)
        if self.editable_mode or architectures == "":
            return
        missing = [name for name in ("triton", "torch", "msgspec", "numpy") if find_spec(name) is None]
        if missing:
            self.warn(f"no machine code is shipped, without {missing[0]}: kernels are compiled where they run")
            return
        command = [sys.executable, "-m", "kvmover.transfer.memory.shipped", str(folder), *(architectures or "").split()]
        done = subprocess.run(command, check=False)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            self.warn("no machine code is shipped: kernels are compiled where they run")


setup(
    cmdclass={"build_py": BuildWithKernels},
    ext_modules=[core] if shutil.which(compiler) else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if shutil.which(compiler) else {},
)
