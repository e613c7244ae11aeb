"""The doctor reports the findings of all checks of this machine, as data and as a page to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from kvmover import __version__
from kvmover.tools.doctor import host_checks, process_checks
from kvmover.tools.doctor.process_checks import NIXL_WHEELS, Finding, Status

CHECKS = (*process_checks.CHECKS, *host_checks.CHECKS)

_PLUGINS = {f"{wheel} others" for wheel in NIXL_WHEELS}

_COLOURS = {Status.OK: "green", Status.MISSING: "yellow", Status.PROBLEM: "bold red"}


def examine() -> list[Finding]:
    """Returns every finding, in the order of need. A check that raises becomes a PROBLEM."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # a broken wheel or driver must not hide the findings of other checks
            findings.append(Finding(check.__name__, Status.PROBLEM, f"{type(error).__name__}: {error}"))
    return findings


def findings_as_data(findings: Iterable[Finding]) -> dict[str, object]:
    """Returns the JSON of `kvmover doctor`."""
    return {"kvmover": __version__, "findings": [asdict(each) for each in findings]}


def print_findings(findings: Iterable[Finding]) -> None:
    """Print the findings on stdout, each remedy below its finding."""
    from rich.table import Table
    from rich.text import Text

    from kvmover.tools.tables import console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    findings = list(findings)
    for each in _folded(findings):
        table.add_row(each.name, Text(each.status, _COLOURS[each.status]), Text(each.detail))
        if each.remedy:
            table.add_row("", "", Text(f"-> {each.remedy}", "dim"))
    out = console()
    out.print(f"kvmover {__version__}")
    out.print(table)
    out.print(verdict(findings), soft_wrap=True)


def verdict(findings: Iterable[Finding]) -> str:
    """Returns a sentence: the things present that do not work, and the things missing."""
    found = list(findings)
    broken = [each.name for each in found if each.status is Status.PROBLEM]
    closed = [each.name for each in _folded(found) if each.status is Status.MISSING and each.name not in _PLUGINS]
    rest = f"; not here: {', '.join(closed)}" if closed else ""
    if broken:
        return f"{len(broken)} problem{'s' if len(broken) > 1 else ''}: {', '.join(broken)}{rest}"
    return f"everything that is here works{rest}"


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """Fold NIXL plugins that do not load into one finding a wheel: kvmover moves KV by UCX, a finding of its own."""
    kept: list[Finding] = []
    names: dict[str, list[str]] = {}
    for each in findings:
        wheel, _, plugin = each.name.partition(" ")
        if wheel not in NIXL_WHEELS or not plugin or each.status is not Status.MISSING:
            kept.append(each)
            continue
        if wheel not in names:
            kept.append(Finding(f"{wheel} others", Status.MISSING, ""))
        names.setdefault(wheel, []).append(plugin)
    said = "do not load, and moving KV needs none of them; --json has the reasons"
    return [
        replace(each, detail=f"{', '.join(names[wheel])} {said}")
        if (wheel := each.name.removesuffix(" others")) in names and each.name != wheel
        else each
        for each in kept
    ]
