"""Writes all golden files anew: `python -m tests.golden.write`, for a change of a format that is meant."""

from __future__ import annotations

import shutil

from tests.golden.files import FOLDER, write
from tests.golden.values import goldens

if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for kind, values in goldens().items():
        for name, golden in values.items():
            write(f"{kind}/{name}", golden.written)
