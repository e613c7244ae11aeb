"""The options of a program of this folder: `--help` says what it measures, and runs nothing."""

from __future__ import annotations

import argparse


def options(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, in its own lines."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
