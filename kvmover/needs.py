"""`need` says in one sentence which optional library a call needs and lacks, and how to install it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from kvmover.errors import KvmoverError


class MissingLibrary(KvmoverError, ImportError):
    """A library that is not installed: the message says what needs it, and how to install it."""


def need(module: str, what: str, extra: str) -> None:
    """Raise MissingLibrary where `module` cannot be imported: `the demo needs torch: pip install 'kvmover[torch]'`."""
    if module not in sys.modules and find_spec(module) is None:
        name = module.replace("_", "-")
        raise MissingLibrary(f"{what} needs {name}, which is not installed: pip install 'kvmover[{extra}]'")
