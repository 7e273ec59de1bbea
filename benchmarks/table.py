"""Write measured figures into a page, between its two markers: a table is made from a file, never by hand.

    python benchmarks/table.py kernels.json docs/kernels.md
    python benchmarks/table.py bench.json README.md

The first is what kernels.py wrote, the second what `linattn-edge bench --save` did.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from linattn_edge.bench.record import KIND, OURS, Group, Report
from linattn_edge.bench.suites import context, model, startup, streams
from linattn_edge.bench.views import Cell, count, figure, layer_name, memory, percent, short, times, word

NAMES = {"C": "C yardstick"}
ORDER = ("linattn_edge", "C", "ONNX Runtime", "ONNX Runtime, two state buffers", "torch", "NumPy")


def markers(report: dict[str, Any]) -> tuple[str, str]:
    """The lines that the figures stand between."""
    name = "bench" if report.get("kind") == KIND else "kernels"
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def digits(value: float) -> str:
    """Two or three significant digits, as wide as a table needs."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """A Markdown table; the first columns are words, the others are numbers."""
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * words}{'---:|' * (len(header) - words)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def cells(row: Iterable[Cell]) -> list[str]:
    return [cell.text for cell in row]


def times_table(groups: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """One row a group, the least time of each column's contestant; a column that nobody filled is dropped."""
    columns = [name for name in columns if any(name in group["times"] for group in groups)]
    rows = [
        [
            f"`{group['case']['rule']}`",
            str(group["case"]["d"]),
            *(digits(group["times"][name]["min"]) if name in group["times"] else "–" for name in columns),
        ]
        for group in groups
    ]
    return grid(["rule", "d", *(NAMES.get(name, name) for name in columns)], rows)


def heading(about: dict[str, Any], load_after: list[float]) -> str:
    loads = [f"{load[0]:.1f}" for load in (about.get("load"), load_after) if load]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    load = f", load average {' to '.join(loads)}" if loads else ""
    return (
        f"Measured on {about['date']} on {about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, "
        f"{about['system']}{load}, with {versions}, by"
    )


def sentences(by_suite: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The figures of kernels.py that need no table."""
    found = []
    for group in by_suite.get("dispatch", ()):
        over = group["values"].get("step - no-op, min")
        if over is not None:
            case = group["case"]
            found.append(
                f"From Python, a step of `{case['rule']}` with H = {case['H']}, d = {case['d']} costs {over:.1f} µs "
                "more than a compiled function of the same arrays that does nothing."
            )
    for group in by_suite.get("threads", ()):
        gain = group["ratios"].get("1 thread / 2 threads")
        if gain is not None:
            case = group["case"]
            size = f"B = {case['B']}, H = {case['H']}, d = {case['d']}"
            found.append(f"Two threads, {size}: {gain['min']:.2f} times as fast as one.")
    for group in by_suite.get("half", ()):
        for pair, gain in group["ratios"].items():
            dtype = pair.partition(" / ")[2]
            layers = group["case"]["layers"]
            found.append(f"{layers} layers with a {dtype} state: {gain['min']:.2f} times as fast as with float32.")
    for group in by_suite.get("startup", ()):
        for name, time in group["times"].items():
            found.append(f"First step of a process, {name.replace('beyond it', 'beyond that')}: {time['min']:.2f} s.")
    return found


def kernels_text(report: dict[str, Any]) -> str:
    """The figures of kernels.py."""
    by_suite: dict[str, list[dict[str, Any]]] = {}
    for group in report["groups"]:
        by_suite.setdefault(group["suite"], []).append(group)
    about = report["machine"]
    lines = [f"{heading(about, about.get('load_after', []))} `{report['command']}`.", ""]
    if "peers" in by_suite:
        lines += [
            "One token, 32 heads, float32 state, identity map, one thread; µs, least of many. linattn_edge is "
            "called from Python with all checks on; the yardstick is bare AVX2 code for the same arithmetic, "
            "without exp of g.",
            "",
            *times_table(by_suite["peers"], ORDER),
            "",
        ]
    if "prefill" in by_suite:
        columns = list(dict.fromkeys(name for group in by_suite["prefill"] for name in group["times"]))
        lines += ["A prompt of T tokens, µs per token:", "", *times_table(by_suite["prefill"], columns), ""]
    more = sentences(by_suite)
    if more:
        lines += [*(f"- {sentence}" for sentence in more), ""]
    return "\n".join(lines)


def bench_text(report: Report) -> str:
    """The figures of `linattn-edge bench`."""
    lines = [heading(report.machine, report.load_after), "", "```sh", report.command, "```", ""]
    parts = [
        steps([group for group in report.of("step") if group.case["B"] == 1]),
        positions(report.of("context")),
        bench_sentences(report),
    ]
    for part in parts:
        lines += [*part, ""] if part else []
    return "\n".join(lines)


def steps(groups: Sequence[Group]) -> list[str]:
    """One token of one stream, and the same by other means."""
    if not groups:
        return []
    names = [name for name in ORDER if name != OURS and any(group.row(name) for group in groups)]
    rows = []
    for group in groups:
        ours = group.row(OURS)
        if ours is None or ours.time is None:
            continue
        others = [group.row(name) for name in names]
        row = [
            word(f"`{group.case['rule']}`{layer_name(group.case).removeprefix(group.case['rule'])}"),
            word(f"{group.case['H']} × {group.case['d']}"),
            *(figure(ours.time.get(name)) for name in ("min", "p50", "p99")),
            percent(ours.values.get("share of machine")),
            *(times(None if row is None else row.values.get(f"times {OURS}")) for row in others),
        ]
        rows.append(cells(row))
    return [
        "One token of one stream by a call of `step`, the Python call and all checks included, one thread, float32 "
        "state; µs. memory: the share that the least time reaches of what this machine does when it only reads and "
        "writes that much. Right of that: how many times as long the same token takes elsewhere, least times, same "
        "numbers in and out; below 1 the other is faster.",
        "",
        *grid(["rule", "heads × width", "least", "median", "p99", "memory", *names], rows, 2),
    ]


def positions(groups: Sequence[Group]) -> list[str]:
    """A token at every position, and the end beside the beginning."""
    flow, ends, scan = (context.part(list(groups), name) for name in ("stream", "ends", "softmax"))
    if flow is None or ends is None:
        return []
    exact = {row.case["position"]: row for row in scan.rows if row.name == context.SOFTMAX and row.time} if scan else {}
    rows = []
    for row in flow.rows:
        at = row.case.get("position")
        if at is None or str(at).strip("0") != "1":  # 10, 100 …
            continue
        other = exact.get(at)
        assert row.time is not None
        row_ = [
            count(at),
            *(figure(row.time.get(name)) for name in ("min", "p50", "p99")),
            memory(row.values["state bytes"]),
            figure(other.time["min"] if other is not None and other.time else None),
            memory(other.values["cache bytes"] if other is not None else None),
        ]
        rows.append(cells(row_))
    case = flow.case
    header = ["up to position", "least", "median", "p99", "state", "softmax, least", "its cache"]
    old = ends.row("old")
    assert old is not None
    grown = flow.values.get(context.GROWN)
    memory_ = "" if grown is None else f"; from position 1,000 on the process grew by {grown:,} bytes"
    return [
        f"Every step of one stream of {case['tokens']:,} tokens, `linear` with φ = elu, {case['H']} heads of width "
        f"{case['d']}, µs a token; and exact softmax over a cache (its compiled scan alone):",
        "",
        *grid(header, rows),
        "",
        f"- The state at position {old.case['position']:,} and a fresh one, in turn in the same memory: "
        f"{ends.values[context.OLD_OVER_FRESH]:.3f} times the least time{memory_}.",
    ]


def bench_sentences(report: Report) -> list[str]:
    """The figures that need no table."""
    found = []
    for group in report.of("prefill"):
        row = group.rows[-1]
        assert row.time is not None
        case = group.case
        found.append(
            f"A prompt of {row.case['T']:,} tokens, `{case['rule']}`, {case['H']} × {case['d']}: "
            f"{short(row.time['min'])} µs a token."
        )
    for group in report.of("streams"):
        row = group.row(streams.TOGETHER)
        if row is not None and group.case["B"] > 1:
            case = group.case
            rate = row.values["tokens/s"]
            found.append(
                f"{case['B']} streams of {case['H']} × {case['d']} in one call: {short(rate)} tokens a second together."
            )
    for group in report.of("model"):
        row = group.row(model.DECODE)
        assert row is not None and row.time is not None
        prompts = [(r.time["p50"], r.case["T"]) for r in group.rows if "T" in r.case and r.time]
        first = ", ".join(f"{short(ms)} ms after {T:,}" for ms, T in prompts)
        found.append(
            f"{group.title[0].upper()}{group.title[1:]}: {short(row.time['p50'])} µs a token, "
            f"{short(row.values['tokens/s'])} tokens a second; the first token {first} of the prompt (medians); "
            f"{memory(group.values['state bytes']).text} of state."
        )
    for group in report.of("startup"):
        for name in (startup.IMPORT, startup.NUMBA, startup.COLD, startup.WARM):
            row = group.row(name)
            if row is not None and row.time is not None:
                found.append(f"A new process, {name}: {row.time['min']:.2f} s.")
    return [f"- {sentence}" for sentence in found]


def text(report: dict[str, Any], quick: bool = False) -> str:
    """What stands between the markers. quick: take a short run too, to see that all works."""
    if report["quick"] and not quick:
        raise ValueError("a --quick run is too short for a table")
    return bench_text(Report.from_dict(report)) if report.get("kind") == KIND else kernels_text(report)


def replace(page: str, table: str, begin: str, end: str) -> str:
    """The page with the table between its markers."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"expected {begin} and then {end}, once each")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "figures", type=Path, metavar="FIGURES.json", help="of benchmarks/kernels.py or linattn-edge bench"
    )
    parser.add_argument("page", type=Path, metavar="PAGE.md", help="the page with the markers")
    args = parser.parse_args(arguments)
    page: Path = args.page
    try:
        report = json.loads(args.figures.read_text(encoding="utf-8"))
        new = replace(page.read_text(encoding="utf-8"), text(report), *markers(report))
    except (OSError, ValueError) as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 1
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
