"""A picture of a replay's hit rate by the device's capacity: of one policy by tier, or of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmover.errors import KvmoverError, need
from kvmover.tools.replay.replay_report import Report


def drawable(path: Path) -> None:
    """Raise KvmoverError if a picture cannot be drawn there: checked before a minute of replays."""
    need("matplotlib", "--plot", "plot")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.filetypes)
    if path.suffix.removeprefix(".") not in formats:
        raise KvmoverError(f"cannot draw {path}: its suffix is none of {', '.join(formats)}")
    if not path.parent.is_dir():
        raise KvmoverError(f"cannot draw {path}: there is no folder {path.parent}")


def draw(reports: Sequence[Report], chosen: Report, path: Path) -> None:
    """Write the picture, in the format of the suffix: with tiers, and `chosen` marked, where there is one policy.

    Raises KvmoverError if it cannot be written.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    policies = list(dict.fromkeys(each.config.policy.name for each in reports))
    axes.axhline(chosen.ideal_hit_rate, color="grey", linestyle="--", label="never forgets")
    if len(policies) == 1:
        _draw_tiers(axes, _by_capacity(reports, policies[0]), chosen)
    else:
        for policy in policies:
            mine = _by_capacity(reports, policy)
            axes.plot(
                [_millions(each) for each in mine],
                [each.totals.hit_rate for each in mine],
                marker="o",
                markersize=3,
                label=policy,
            )
    axes.set(
        xscale="log",
        xlabel="device capacity, million tokens",
        ylabel="hit rate",
        ylim=(0, None),
        title=f"{chosen.requests:,} requests, pages of {chosen.config.page_tokens}, policy {', '.join(policies)}",
    )
    axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise KvmoverError(f"cannot write {path}: {error.strerror}") from error


def _draw_tiers(axes: Any, reports: Sequence[Report], chosen: Report) -> None:
    millions = [_millions(each) for each in reports]
    bottom = [0.0] * len(reports)
    for name, color in (("device", "#4472a8"), ("host", "#7fa650"), ("storage", "#c08a3e")):
        top = [
            low + getattr(each.totals, f"{name}_tokens") / each.totals.prompt_tokens
            for low, each in zip(bottom, reports, strict=True)
        ]
        if top != bottom:
            axes.fill_between(millions, bottom, top, color=color, alpha=0.35, linewidth=0)
            axes.plot(millions, top, color=color, marker="o", markersize=3, label=f"hits up to the {name}")
        bottom = top
    if chosen.config.device_tokens is not None:
        axes.plot([_millions(chosen)], [chosen.totals.hit_rate], "k*", markersize=10, label="this replay")


def _by_capacity(reports: Sequence[Report], policy: str) -> list[Report]:
    return sorted((each for each in reports if each.config.policy.name == policy), key=_millions)


def _millions(report: Report) -> float:
    return (report.config.device_tokens or 0) / 1e6
