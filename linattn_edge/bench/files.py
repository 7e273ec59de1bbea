"""Reports as JSON and as CSV, and JSON as a report again."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from linattn_edge.bench.record import Report
from linattn_edge.state import replacing


def to_json(report: Report) -> str:
    """All of it."""
    return json.dumps(report.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)


def from_json(path: Path) -> Report:
    """The report in a file; ValueError where it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path}: not a JSON file") from None
    try:
        return Report.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def to_csv(report: Report) -> str:
    """A line for each row, and one for each figure of a group; times in the row's unit."""
    lines: list[dict[str, Any]] = []
    for group in report.groups:
        about = {"suite": group.suite, "group": group.title}
        for row in (*group.rows, *group.controls):
            case = {name: value for name, value in (group.case | row.case).items() if name not in about}
            line = about | {"name": row.name} | case | {"unit": row.unit, "clock": row.clock}
            lines.append(line | (row.time or {}) | row.values | ({"note": row.note} if row.note else {}))
        lines += [about | {"name": name, "value": value} for name, value in group.values.items()]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def save(path: Path, text: str) -> None:
    """Write it, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
