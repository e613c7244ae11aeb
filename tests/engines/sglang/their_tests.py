"""SGLang's own unit tests of its radix caches, run against kvmover's: what passes with both, with SGLang's alone, why.

    python tests/engines/sglang/their_tests.py CHECKOUT/test/registered/unit/mem_cache/test_radix_cache_unit.py ...

in the environment of the engine, with tests of the engine's own release. Each file runs twice, in processes of their
own: as it is, and with kvmover's cache under the names of SGLang's caches. What SGLang's cache does not pass here, on
a machine without a GPU say, is left out. What kvmover's does not pass is told by the reason: a test that asks for a
part of SGLang's own tree, as its nodes or its tiers, cannot apply; anything else is a difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

#: SGLang's names of its caches, in the modules of its tests.
CACHES = ("UnifiedRadixCache", "RadixCache", "SWARadixCache", "MambaRadixCache")
#: Words of a failure, and what the test asks for that kvmover's cache has not.
NOT_OURS = {
    "'NoneType' object is not subscriptable": "a prefix that is kept without indices of it",
    "is given back by its own receipt": "a lock that is given back without its receipt",
    "Expected 'free_segment' to have been called": "pages that are freed by their tokens' indices",
}
#: Tests that look at something else than the cache.
NAMED = {"test_kv_cache_events_with_eviction": "events of SGLang's own classes"}
#: As pytest calls it.
PASSED = "passed"


def run(files: list[Path], cache: str, timeout_s: int) -> dict[str, list[str]]:
    """Outcome and last line of each test, with SGLang's cache or kvmover's, in a process of its own."""
    command = [sys.executable, __file__, "--cache", cache, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


class Swap:
    """A plug-in of pytest: names in the modules of tests, a device that is here, and the outcome of each test."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.outcomes: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from scheduling import inits

        for module in {item.module for item in items}:
            if hasattr(module, "get_device"):
                module.get_device = lambda: "cpu"
            for name in CACHES if self.cache == "kvmover" else ():
                if hasattr(module, name):
                    setattr(module, name, ours(inits))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            told = report.longrepr.reprcrash.message if report.failed and report.longrepr else ""
            self.outcomes[report.nodeid.split("/")[-1]] = [report.outcome, told.splitlines()[0] if told else ""]


def ours(inits: Any) -> type:
    """kvmover's cache with what SGLang's tests make one by."""
    from kvmover.engines.sglang.radix_cache import KvmoverRadixCache

    class Cache(KvmoverRadixCache):
        @classmethod
        def create_simulated(
            cls, disable: bool = False, mock_allocator: Any = None, page_size: int = 1, **more: Any
        ) -> Any:
            if disable:
                raise NotImplementedError("a disabled cache is SGLang's own")
            if mock_allocator is None:
                mock_allocator = NoPool()
            mock_allocator.size_full = 1024
            return cls(inits.CacheInitParams(disable, None, mock_allocator, page_size, **more))

    return Cache


class NoPool:
    """An allocator that nothing is taken of."""

    device = "cpu"

    def free_page_ids(self, page_ids: Any) -> None:
        """Nothing was allocated."""


def inside(files: list[Path], cache: str) -> None:
    """Run the files here, and print what came of each test."""
    import tempfile

    import pytest
    from scheduling import publish

    publish(Path(tempfile.mkdtemp()))
    for file in files:
        sys.path.insert(0, str(file.parent))
    swap, stdout = Swap(cache), sys.stdout
    sys.stdout = sys.stderr
    # Named as SGLang names them, which the configuration of our own checks does not.
    pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", *map(str, files)], plugins=[swap])
    stdout.write(json.dumps(swap.outcomes))


def why(name: str, message: str) -> str:
    """Why a test cannot apply; empty where it is a difference."""
    if (test := name.rpartition("::")[2]) in NAMED:
        return NAMED[test]
    if "object has no attribute" in message or "has no attribute" in message:
        return f"asks for {message.rpartition('attribute ')[2]} of SGLang's own tree"
    if "unexpected keyword" in message or "not iterable" in message or "NotImplementedError" in message:
        return message.partition(": ")[2] or message
    return next((reason for word, reason in NOT_OURS.items() if word in message), "")


def compare(theirs: dict[str, list[str]], mine: dict[str, list[str]]) -> tuple[Counter[str], list[str]]:
    """How many tests came to what, and a line for each difference."""
    counts, differences = Counter[str](), list[str]()
    if not theirs:
        counts["file could not be loaded: it is of another release"] = 1
    for name, (outcome, _) in theirs.items():
        ours_outcome, message = mine.get(name, ["missing", ""])
        if outcome != PASSED:
            counts["not passed by SGLang's own cache here"] += 1
        elif ours_outcome == PASSED:
            counts["passed by both"] += 1
        elif reason := why(name, message):
            counts[f"cannot apply: {reason}"] += 1
        else:
            counts["different"] += 1
            differences.append(f"{name}: {message}")
    return counts, differences


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--cache", choices=["sglang", "kvmover"], help="one run here, its outcomes as JSON")
    parser.add_argument("--timeout-s", type=int, default=1200)
    asked = parser.parse_args()
    files = [file.resolve() for file in asked.files]
    if asked.cache:
        inside(files, asked.cache)
        return
    for file in files:
        counts, differences = compare(*(run([file], cache, asked.timeout_s) for cache in ("sglang", "kvmover")))
        lines = [f"{count} {what}" for what, count in counts.most_common()]
        lines += [f"different: {line}" for line in differences]
        sys.stdout.write("\n  ".join([f"{file.name}:", *lines]) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import_module("bench")
    main()
