"""Write the README's performance table, between its two markers, from what kernels.py measured.

python benchmarks/table.py kernels.json README.md
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
NAMES = {"C": "C yardstick"}
ORDER = ("linattn_edge", "C", "ONNX Runtime", "ONNX Runtime, two state buffers", "torch", "NumPy")


def digits(value: float) -> str:
    """Two or three significant digits, as wide as a table needs."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column is words, the others are numbers."""
    return [
        f"| {' | '.join(header)} |",
        f"|---|{'---:|' * (len(header) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


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


def heading(report: dict[str, Any]) -> str:
    about = report["machine"]
    loads = [f"{about[name][0]:.1f}" for name in ("load", "load_after") if about.get(name)]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    load = f", load average {' to '.join(loads)}" if loads else ""
    return (
        f"Measured on {about['date']} on {about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, "
        f"{about['system']}{load}, with {versions}, by `{report['command']}`."
    )


def sentences(by_suite: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The figures that need no table."""
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


def text(report: dict[str, Any]) -> str:
    """What stands between the markers."""
    if report["quick"]:
        raise ValueError("a --quick run is too short for a table")
    by_suite: dict[str, list[dict[str, Any]]] = {}
    for group in report["groups"]:
        by_suite.setdefault(group["suite"], []).append(group)
    lines = [heading(report), ""]
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


def replace(page: str, table: str) -> str:
    """The page with the table between its markers."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"expected {BEGIN} and then {END}, once each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 2:
        print("usage: python benchmarks/table.py FIGURES.json PAGE.md", file=sys.stderr)
        return 2
    figures, page = map(Path, arguments)
    try:
        report = json.loads(figures.read_text(encoding="utf-8"))
        new = replace(page.read_text(encoding="utf-8"), text(report))
    except (OSError, ValueError) as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 1
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
