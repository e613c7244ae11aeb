"""A stand-in for the CUDA driver: it loads nothing, launches nothing, and keeps the calls it was given in order."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CountingDriver:
    """`calls`: names, in order. `loaded`: machine code. `launched`: (function, grid and block, stream, arguments)."""

    calls: list[str] = field(default_factory=list[str])
    loaded: list[bytes] = field(default_factory=list[bytes])
    launched: list[tuple[int, tuple[int, ...], int, tuple[int, ...]]] = field(
        default_factory=list["tuple[int, tuple[int, ...], int, tuple[int, ...]]"]
    )
    #: By function.
    spilled_bytes: dict[int, int] = field(default_factory=dict[int, int])
    #: Bytes of each parameter of the next launches.
    parameters: tuple[int, ...] = ()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        """The calling thread's mode."""
        self.calls.append(f"cuThreadExchangeStreamCaptureMode {mode._obj.value}")
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:  # noqa: N802
        """A module is known by its number, from 1 on."""
        self.calls.append("cuModuleLoadData")
        self.loaded.append(cubin)
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        """A function is known by its module's number, and by its name that the code must have."""
        self.calls.append("cuModuleGetFunction")
        assert name in self.loaded[module.value - 1]
        function._obj.value = 1000 + module.value
        return 0

    def cuFuncLoad(self, function: Any) -> int:  # noqa: N802
        """Code is there."""
        self.calls.append("cuFuncLoad")
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        """A block may share more memory."""
        self.calls.append(f"cuFuncSetAttribute {attribute} {value}")
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:  # noqa: N802
        """Bytes that spilled, of the functions in `spilled_bytes`."""
        assert attribute == 3
        value._obj.value = self.spilled_bytes.get(function.value, 0)
        return 0

    def cuLaunchKernel(self, function: int, *rest: Any) -> int:  # noqa: N802
        """Read the arguments where the driver would, while the call lasts."""
        self.calls.append("cuLaunchKernel")
        *shape, stream, pointers, extra = rest
        assert extra is None
        assert len(pointers) == len(self.parameters)
        read = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        values = (read[size].from_address(at).value for size, at in zip(self.parameters, pointers, strict=True))
        self.launched.append((function, tuple(shape), stream, tuple(values)))
        return 0
