"""`--plot`: the page's charts by matplotlib, in one picture."""

from pathlib import Path
from typing import Any

from linattn_edge import plots
from linattn_edge.bench.record import OURS, Report
from linattn_edge.bench.roofline import SWEEP
from linattn_edge.bench.suites import context
from linattn_edge.bench.suites.context import MEMORY_CROSSES, SOFTMAX, TIME_CROSSES


def plot(report: Report, path: Path) -> None:
    """Time and memory by position, the distribution of steps, peers' ratios: of what was measured."""
    parts = [draw for has, draw in ((report.of("context"), _stream), (report.of("step"), _peers)) if has]
    if not parts:
        raise ValueError("--plot: draws the suites step and context, and neither was measured")
    panels = {_stream: 3, _peers: 1}
    count = sum(panels[draw] for draw in parts)
    columns = 2 if count > 1 else 1
    figure = plots.new_figure((6.2 * columns, 4.4 * -(-count // columns)))
    axes = list(figure.subplots(-(-count // columns), columns, squeeze=False).flat)
    for draw in parts:
        draw(report, axes)
    for spare in axes:
        spare.set_axis_off()
    figure.suptitle(f"{report.machine['cpu']}, {report.date[:10]}{', a quick run' if report.quick else ''}")
    plots.save(figure, path)


def _stream(report: Report, axes: list[Any]) -> None:
    groups = report.of("context")
    flow, scan = (context.part(groups, name) for name in ("stream", "softmax"))
    left, middle, right = (axes.pop(0) for _ in range(3))
    if flow is None:
        return
    rows = [row for row in flow.rows if "position" in row.case and row.time]
    at = [row.case["position"] for row in rows]
    left.plot(at, [row.time["min"] for row in rows if row.time], marker="o", label="linear attention, least")
    tail = [(p, row.time["p99"]) for p, row in zip(at, rows, strict=True) if row.time and "p99" in row.time]
    left.plot(*zip(*tail, strict=True), "C0--", linewidth=1, label="its 99th percentile")
    middle.plot(at, [row.values["state bytes"] for row in rows], marker="o")
    exact = [row for row in scan.rows if row.name == SOFTMAX and row.time] if scan else []
    if scan and exact:
        x = [row.case["position"] for row in exact]
        left.plot(x, [row.time["min"] for row in exact if row.time], "C1", marker="s", label="softmax, least")
        middle.plot(x, [row.values["cache bytes"] for row in exact], "C1", marker="s")
        for axis, name in ((left, TIME_CROSSES), (middle, MEMORY_CROSSES)):
            if name in scan.values:
                axis.axvline(scan.values[name], color="black", linestyle=":", linewidth=1)
                axis.annotate(
                    f" {scan.values[name]:,.0f}", (scan.values[name], 0.95), xycoords=("data", "axes fraction")
                )
    left.set(xscale="log", yscale="log", xlabel="position, tokens", ylabel="µs per token")
    left.legend(frameon=False, fontsize=8)
    middle.set(xscale="log", yscale="log", xlabel="position, tokens", ylabel="bytes of the past")
    bins = flow.rows[-1].histogram
    lows, widths = [low for low, _, _ in bins], [high - low for low, high, _ in bins]
    right.bar(lows, [many for _, _, many in bins], widths, align="edge", log=True)
    right.set(xscale="log", xlabel="µs, every step of the stream", ylabel="steps")
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)


def _peers(report: Report, axes: list[Any]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis = axes.pop(0)
    groups = [g for g in report.of("step") if any(r.time and r.name not in (OURS, SWEEP) for r in g.rows)]
    names = dict.fromkeys(r.name for g in groups for r in g.rows if r.time and r.name not in (OURS, SWEEP))
    for name in names:
        found = [(i, row.values[f"times {OURS}"]) for i, g in enumerate(groups) if (row := g.row(name)) is not None]
        axis.plot([y for _, y in found], [i for i, _ in found], "o", label=name)
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xscale="log", xlabel=f"times as long as {OURS}")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(groups)), [g.title.removeprefix("one token, ") for g in groups], fontsize=6)
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    if names:
        axis.legend(frameon=False, fontsize=7)
