"""A process of its own compiles kernels: in the engine's, the compiler would hold the GIL for a second or more.

`python -m kvmover.kernels.ahead_of_time` reads programs as lines of JSON, keeps the code of each in the code store, and
answers with a line: empty, or why it could not. It takes no GPU: the target is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

from .code_store import Code, find, folder, keep
from .launch import Program, RowConfig

if TYPE_CHECKING:
    from collections.abc import Iterable


class CompileError(RuntimeError):
    """A kernel that the compiling process did not compile."""


@dataclass(slots=True, eq=False)
class Worker:
    """The compiling process, which starts with the first program and runs until `rest`. One thread uses it."""

    _process: subprocess.Popen[str] | None = None

    def compile(self, program: Program, architecture: int) -> Code:
        """Returns the code of a program for sm_`architecture`, kept in the code store. Raises CompileError, with the
        process's words.
        """
        if self._process is None:
            self._process = _started()
        told, heard = self._process.stdin, self._process.stdout
        assert told is not None
        assert heard is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            told.write(json.dumps(written(program, architecture)) + "\n")
            told.flush()
        answer = heard.readline()
        code = find(program.code_name(architecture)) if answer == "\n" else None
        if code is None:
            self.rest()
            raise CompileError(f"{program.kernel.__name__} was not compiled: {answer.strip() or 'its process ended'}")
        return code

    def rest(self) -> None:
        """End the process, if it runs: it holds some 300 MB."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def written(program: Program, architecture: int) -> dict[str, object]:
    """Returns all that the code of a program for sm_`architecture` is compiled from, as plain values."""
    kernel = program.kernel
    return {
        "architecture": architecture,
        "kernel": [kernel.__module__, kernel.__name__],
        "shapes": program.shapes,
        "config": asdict(program.config),
        "constants": program.constants,
        "outputs": program.outputs,
    }


def program_of(told: dict[str, Any]) -> Program:
    """Returns the program of what `written` told. Raises AttributeError or ImportError if its kernel is not there."""
    module, name = told["kernel"]
    shapes, constants = tuple(map(tuple, told["shapes"])), tuple(map(tuple, told["constants"]))
    kernel = getattr(import_module(module), name)
    return Program(kernel, shapes, RowConfig(**told["config"]), constants, told["outputs"])


class _Target:
    """A GPU that Triton compiles for and does not touch."""

    def __init__(self) -> None:
        self.architecture = 0

    def get_current_device(self) -> int:
        """Returns one device for each architecture: Triton keeps compiled kernels by device."""
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        """Returns no stream: nothing is launched."""
        return 0

    def get_current_target(self) -> Any:
        """Returns the architecture as Triton has it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


def serve(lines: Iterable[str], answers: IO[str]) -> None:
    """Compile a program a line, and answer each."""
    import triton

    target = _Target()
    triton.runtime.driver.set_active(target)
    for line in lines:
        told = json.loads(line)
        target.architecture = told["architecture"]
        program = program_of(told)
        try:
            keep(program.code_name(target.architecture), program.compiled(target.architecture), folder())
        except Exception as error:  # of Triton, ptxas or the folder: the asking process says so
            answers.write(f"{type(error).__name__}: {error}".replace("\n", " "))
        answers.write("\n")
        answers.flush()


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # a compiler that prints does not answer
    serve(sys.stdin, answers)
