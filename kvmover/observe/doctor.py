"""What this machine can do: the findings of all checks, as data and as a page to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from kvmover import __version__
from kvmover.observe import checks, host
from kvmover.observe.checks import Finding, Status

CHECKS = (*checks.CHECKS, *host.CHECKS)

_COLOURS = {Status.OK: "green", Status.MISSING: "yellow", Status.PROBLEM: "bold red"}


def examine() -> list[Finding]:
    """Every finding, in the order of need."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # a broken wheel or driver must not hide what the other checks find
            findings.append(Finding(check.__name__, Status.PROBLEM, f"{type(error).__name__}: {error}"))
    return findings


def findings_as_data(findings: Iterable[Finding]) -> dict[str, object]:
    """The JSON of `kvmover doctor`."""
    return {"kvmover": __version__, "findings": [asdict(each) for each in findings]}


def print_findings(findings: Iterable[Finding]) -> None:
    """Print the findings on stdout, each remedy below what it cures."""
    from rich.table import Table
    from rich.text import Text

    from kvmover.observe.console import console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for each in findings:
        table.add_row(each.name, Text(each.status, _COLOURS[each.status]), Text(each.detail))
        if each.remedy:
            table.add_row("", "", Text(f"-> {each.remedy}", "dim"))
    out = console()
    out.print(f"kvmover {__version__}")
    out.print(table)
