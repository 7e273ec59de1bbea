"""The report as one page: no script, nothing from elsewhere; light and dark, on screen and on paper."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from linattn_edge.bench import charts, comparison, files, tables
from linattn_edge.bench.charts import Dots, Line, Mark, Spot
from linattn_edge.bench.commands import closing, untimed
from linattn_edge.bench.record import OURS, Group, Report
from linattn_edge.bench.roofline import SWEEP
from linattn_edge.bench.suites import REPORTED, context, cuda
from linattn_edge.bench.suites.context import MEMORY_CROSSES, OLD_OVER_FRESH, SOFTMAX, TIME_CROSSES
from linattn_edge.bench.suites.model import DECODE
from linattn_edge.bench.views import Cell, Table, figure, layer_name, memory, short, times

STYLE = Path(__file__).with_name("page.css")

TITLES = {
    "step": "One token",
    "context": "A long stream",
    "prefill": "Prompts",
    "streams": "Many streams",
    "model": "A whole model",
    "startup": "Starting",
    cuda.STEP: "One token on the GPU",
    cuda.PREFILL: "Prompts on the GPU",
}


def page(report: Report) -> str:
    """The whole page."""
    about = report.machine
    body = [
        "<header>",
        "<h1>What a token costs</h1>",
        f'<p class="soft">linattn_edge {escape(about["versions"]["linattn_edge"])} on {escape(where(report))}, '
        f"{escape(report.date[:10])}</p>",
        f'<pre class="command">{escape(report.command)}</pre>',
        *(['<p class="warning">A quick run: too short to quote.</p>'] if report.quick else []),
        cards(report),
        "</header>",
    ]
    if report.comparison:
        body.append(f"<section>{table(comparison.table(report.comparison))}</section>")
    for name in dict.fromkeys(group.suite for group in report.groups):
        groups = report.of(name)
        drawn = "".join(CHARTS[name](groups)) if name in CHARTS else ""
        body.append(f'<section id="{name}">\n<h2>{escape(TITLES[name])}</h2>')
        body.append(f'<div class="charts">{drawn}</div>' if drawn else "")
        body += [table(found) for found in REPORTED[name].tables(groups)]
        body += [f'<p class="warning">{escape(line)}</p>' for line in untimed(groups)]
        body.append("</section>")
    body.append(method(report))
    title = f"What a token costs: {where(report)}"
    content = "\n".join(part for part in body if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def where(report: Report) -> str:
    """The GPU that was measured, or the CPU."""
    return str(report.machine.get("gpu") or report.machine["cpu"])


def number(cell: Cell) -> str:
    """A figure as text that knows what it stands for."""
    return escape(cell.text) if cell.value is None else f'<data value="{cell.value!r}">{escape(cell.text)}</data>'


def table(found: Table) -> str:
    """Words to the left, figures to the right."""

    def cell(kind: str, i: int, content: str, fails: bool = False) -> str:
        look = ' class="left"' if i < found.left else ' class="fails"' if fails else ""
        return f"<{kind}{look}>{content}</{kind}>"

    head = "".join(cell("th", i, escape(name)) for i, name in enumerate(found.header))
    rows = "\n".join(
        f"<tr>{''.join(cell('td', i, number(c), c.text.endswith('FAILS')) for i, c in enumerate(row))}</tr>"
        for row in found.rows
    )
    above = f'<h3>{escape(found.title)}</h3>\n<p class="soft">{escape(found.text)}</p>\n'
    if not found.rows:
        return above
    return (
        f'{above}<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )


def cards(report: Report) -> str:
    """The figures that people ask for first."""
    found: list[tuple[Cell, str]] = []
    steps = [group for group in (*report.of("step"), *report.of(cuda.STEP)) if group.row(OURS)]
    if steps:
        row = steps[0].row(OURS)
        assert row is not None and row.time is not None
        case = steps[0].case
        cell = figure(row.time["min"])
        found.append(
            (Cell(f"{cell.text} µs", cell.value), f"one token, {case['rule']}, {case['H']} heads of width {case['d']}")
        )
    parts = {group.case["part"]: group for group in report.of("context")}
    if "ends" in parts:
        ratio = parts["ends"].values[OLD_OVER_FRESH]
        old = parts["ends"].rows[0].case["position"]
        found.append((Cell(f"{ratio:.3f}×", ratio), f"time at position {old:,} over time at the start"))
    if "stream" in parts:
        row = parts["stream"].rows[0]
        found.append((memory(row.values["state bytes"]), "the state of a stream, at every position"))
    if "softmax" in parts and parts["softmax"].row(SOFTMAX):
        scans = [r for r in parts["softmax"].rows if r.name == SOFTMAX and r.case["position"] <= 10_000]
        text = f"as long takes softmax over {scans[-1].case['position']:,} tokens"
        found.append((times(scans[-1].values[f"times {OURS}"]), text))
    for group in report.of("model"):
        row = group.row(DECODE)
        if row is not None:
            rate = row.values["tokens/s"]
            found.append((Cell(f"{short(rate)}/s", rate), f"tokens written by {group.title}"))
    items = "".join(f'<div class="card"><b>{number(cell)}</b><span>{escape(text)}</span></div>' for cell, text in found)
    return f'<div class="cards">{items}</div>' if items else ""


def drawing(title: str, text: str, chart: str, wide: bool = False) -> str:
    look = ' class="wide"' if wide else ""
    return f"<figure{look}><h3>{escape(title)}</h3><figcaption>{escape(text)}</figcaption>{chart}</figure>"


def context_charts(groups: Sequence[Group]) -> list[str]:
    """Time and memory by position, and the distribution of the stream's steps."""
    flow, scan = (context.part(list(groups), name) for name in ("stream", "softmax"))
    if flow is None:
        return []
    exact = [(row, row.time) for row in scan.rows if row.name == SOFTMAX and row.time] if scan else []
    rows = [(row, row.time) for row in flow.rows if "position" in row.case and row.time]

    def points(name: str) -> list[tuple[float, float]]:
        return [(row.case["position"], time[name]) for row, time in rows if name in time]

    times_ = [
        Line("linear attention, least", "s1", points("min")),
        Line("its 99th percentile", "s1", points("p99"), thin=True),
    ]
    sizes = [Line("linear attention's state", "s1", [(r.case["position"], r.values["state bytes"]) for r, _ in rows])]
    if exact:
        times_.append(Line("softmax, least", "s2", [(row.case["position"], time["min"]) for row, time in exact]))
        sizes.append(Line("softmax's cache", "s2", [(r.case["position"], r.values["cache bytes"]) for r, _ in exact]))
    about = f"{flow.case['tokens']:,} tokens, {flow.case['H']} heads of width {flow.case['d']}"
    x = charts.log_axis("position, tokens", [a for line in times_ for a, _ in line.points], 1.5)
    y = charts.log_axis("µs per token", [b for line in times_ for _, b in line.points], 1.4)
    y_sizes = charts.byte_axis("memory of the past", [b for line in sizes for _, b in line.points])
    by_time = charts.lines("Time by position", x, y, times_, crossover(scan, TIME_CROSSES))
    by_size = charts.lines("Memory by position", x, y_sizes, sizes, crossover(scan, MEMORY_CROSSES))
    return [
        drawing("Time of a token, by how many came before it", about, by_time),
        drawing("Memory, by how many tokens came before", about, by_size),
        distribution(flow),
    ]


def crossover(scan: Group | None, name: str) -> list[Mark]:
    at = None if scan is None else scan.values.get(name)
    return [] if at is None else [Mark(at, f"crossover at {at:,.0f}")]


def distribution(flow: Group) -> str:
    """A histogram of every step of the stream."""
    time, bins = flow.rows[-1].time, flow.rows[-1].histogram
    assert time is not None
    levels = {text: time[name] for text, name in (("median", "p50"), ("p99", "p99"), ("p99.9", "p999")) if name in time}
    told = ", ".join(f"{text} {short(value)} µs" for text, value in levels.items())
    x = charts.log_axis("µs", [edge for low, high, _ in bins for edge in (low, high)], 1.02)
    y = charts.log_axis("steps", [0.7, *(many for _, _, many in bins)])
    text = f"Dashed, from the left: {told}; the slowest took {short(time['max'])} µs. Both axes are logarithmic."
    chart = charts.bars("Distribution", x, y, bins, list(levels.values()))
    return drawing("Every step of the stream", text, chart, wide=True)


def label(group: Group) -> str:
    case = group.case
    streams = f"{case['B']} × " if case["B"] != 1 else ""
    return f"{layer_name(case)}, {streams}{case['H']} × {case['d']}"


def step_charts(groups: Sequence[Group]) -> list[str]:
    """Peers' ratios, and the share of the memory's speed."""
    names = list(dict.fromkeys(r.name for g in groups for r in g.rows if r.time and r.name not in (OURS, SWEEP)))
    looks = {name: f"s{2 + i % 4}" for i, name in enumerate(names)}
    ratios, shares = [], []
    for group in groups:
        spots = [
            Spot(row.name, looks[row.name], row.values[f"times {OURS}"])
            for row in group.rows
            if row.name in looks and row.time and f"times {OURS}" in row.values
        ]
        if spots:
            ratios.append(Dots(label(group), spots))
        ours = group.row(OURS)
        if ours is not None and "share of machine" in ours.values:
            shares.append(Dots(label(group), [Spot(OURS, "s1", ours.values["share of machine"])]))
    out = []
    if ratios:
        x = charts.log_axis(f"times as long as {OURS}", [1, *(s.value for row in ratios for s in row.spots)])
        text = "Least times, same tensors, one thread each; further right is slower. Rule, streams × heads × width."
        out.append(drawing("The same token by other means", text, charts.dots("Peers", x, ratios, line_at=1)))
    if shares:
        x = charts.share_axis("of what reading and writing the state once reaches", [s.spots[0].value for s in shares])
        text = "At 100 % the arithmetic would be free, and only memory would take time."
        out.append(drawing("How close to the memory's speed", text, charts.dots("Roofline", x, shares, line_at=1)))
    return out


def gpu_charts(groups: Sequence[Group]) -> list[str]:
    """A step on the GPU, replayed and called."""
    looks = {OURS: ("s1", "on the GPU"), cuda.REPLAY: ("s2", cuda.REPLAY), cuda.CALL: ("s3", cuda.CALL)}
    rows = []
    for group in groups:
        found = {row.name: row.time["min"] for row in group.rows if row.time}
        spots = [Spot(name, look, found[key]) for key, (look, name) in looks.items() if key in found]
        if spots:
            rows.append(Dots(label(group), spots))
    if not rows:
        return []
    x = charts.log_axis("µs", [spot.value for row in rows for spot in row.spots])
    text = "Least times. Rule, streams × heads × width."
    return [drawing("A token on the GPU, and from Python", text, charts.dots("A step on the GPU", x, rows))]


CHARTS: dict[str, Callable[[Sequence[Group]], list[str]]] = {
    "context": context_charts,
    "step": step_charts,
    cuda.STEP: gpu_charts,
}


def method(report: Report) -> str:
    """How this was measured, and all of it as JSON."""
    clocks = report.method["clocks"]
    turns = f"{report.method['rounds']} of {report.method['seconds_of_a_turn'] * 1000:g} ms each, in one process"
    entries = [
        *zip(("machine", "software", "run"), tables.heading(report), strict=True),
        *(
            (name, f"{c['function']}, resolution {c['resolution_ns']} ns; a reading adds {c['overhead_ns']:.0f} ns")
            for name, c in clocks.items()
        ),
        ("garbage collector", report.method["garbage_collector"]),
        ("turns", f"{turns}; all samples count"),
        ("took", closing(report)),
    ]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    figures = escape(files.to_json(report), quote=False)
    return (
        f"<section><h2>How this was measured</h2>\n<dl>{items}</dl>\n<details><summary>All figures, as JSON</summary>"
        f'<pre id="report">{figures}</pre></details></section>'
    )
