"""Measure the README's figures anew and write them into it.

python benchmarks/readme.py           # linattn-edge bench --save bench.json, then table.py
python benchmarks/readme.py --quick   # a short run, printed: to see that the README's command and this script work
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import table

from linattn_edge import cli

README = Path(__file__).parents[1] / "README.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run; the README stays as it is")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "bench.json")
        status = cli.main(["bench", *(["--quick"] if options.quick else []), "--save", str(figures)])
        if status:
            return status
        report = json.loads(figures.read_text(encoding="utf-8"))
    section = table.text(report, quick=options.quick)
    new = table.replace(README.read_text(encoding="utf-8"), section, *table.markers(report))
    if options.quick:
        print(section)
    else:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
