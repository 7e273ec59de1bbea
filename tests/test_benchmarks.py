"""The benchmark scripts: the yardstick, the tables in the pages, and short runs. (tests/test_bench.py has the rest.)"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NO_JIT = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@pytest.fixture
def bench(monkeypatch):
    """Import a module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("kernels", "onnx_files", "readme", "table", "yardstick"):
        sys.modules.pop(name, None)


def test_the_yardstick_is_right(bench):
    measure, kernels = bench("yardstick"), bench("kernels")
    try:
        yardstick = measure.Yardstick()
    except measure.Missing as reason:
        pytest.skip(str(reason))
    assert kernels.yardstick_disagreement(yardstick) is None
    times = yardstick.contestant("gated_delta", 2, 64, layers=3)(5)
    assert times.shape == (5,) and (times > 0).all()
    with pytest.raises(measure.Missing, match="at most 64 tokens"):
        yardstick.contestant("gated", 2, 48)(1)


@pytest.mark.parametrize("script", sorted({path.name for path in FOLDER.glob("*.py")} - {"yardstick.py"}))
def test_every_script_starts(script):
    done = subprocess.run([sys.executable, FOLDER / script, "--help"], capture_output=True, text=True, check=False)
    if "needs torch" in done.stderr and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_no_compiler_is_said(bench, monkeypatch, capsys):
    measure, kernels = bench("yardstick"), bench("kernels")
    monkeypatch.setattr(measure.shutil, "which", lambda name: None)
    with pytest.raises(measure.Missing, match="no C compiler"):
        measure.Yardstick()
    group = kernels.Group("step", "", {})
    assert not kernels.yardstick_note(kernels.Settings(why_no_yardstick="no C compiler (gcc or cc)"), group)
    group.show()
    assert "no C yardstick: no C compiler (gcc or cc)" in capsys.readouterr().out


def group(suite, case, times=(), ratios=(), values=()):
    def both(pairs):
        return {name: {"min": x, "p10": x} for name, x in dict(pairs).items()}

    return {"suite": suite, "case": case, "times": both(times), "ratios": both(ratios), "values": dict(values)}


REPORT = {
    "quick": False,
    "command": "python benchmarks/kernels.py --json kernels.json",
    "machine": {
        **{"cpu": "Some CPU", "llvm_cpu": "znver9", "cores": 3, "system": "Linux x86_64", "date": "2031-02-03"},
        **{"versions": {"linattn_edge": "0.1.0", "numpy": "2.0"}, "load": [0.5, 1, 1], "load_after": [1.25, 1, 1]},
    },
    "groups": [
        group("peers", {"rule": "linear", "d": 64}, {"linattn_edge": 12.345, "NumPy": 123.4}),
        group("peers", {"rule": "gated", "d": 64}, {"linattn_edge": 13, "NumPy": 150, "C": 11}),
        group("prefill", {"rule": "gated", "d": 64}, {"C, T = 64": 8.5, "T = 512": 9.5}),
        group("dispatch", {"rule": "linear", "H": 4, "d": 32}, values={"step - no-op, min": 1.52}),
        group("threads", {"B": 8, "H": 32, "d": 64}, ratios={"1 thread / 2 threads": 1.75}),
        group("half", {"layers": 24}, ratios={"float32 / float16": 1.6}),
        group("startup", {}, {"import numba": 0.3}),
    ],
}

TABLE = """\
Measured on 2031-02-03 on Some CPU (znver9), 3 cores, Linux x86_64, load average 0.5 to 1.2, with \
linattn_edge 0.1.0, numpy 2.0, by `python benchmarks/kernels.py --json kernels.json`.

One token, 32 heads, float32 state, identity map, one thread; µs, least of many. linattn_edge is called from \
Python with all checks on; the yardstick is bare AVX2 code for the same arithmetic, without exp of g.

| rule | d | linattn_edge | C yardstick | NumPy |
|---|---:|---:|---:|---:|
| `linear` | 64 | 12.3 | – | 123 |
| `gated` | 64 | 13.0 | 11.0 | 150 |

A prompt of T tokens, µs per token:

| rule | d | C, T = 64 | T = 512 |
|---|---:|---:|---:|
| `gated` | 64 | 8.5 | 9.5 |

- From Python, a step of `linear` with H = 4, d = 32 costs 1.5 µs more than a compiled function of the same arrays \
that does nothing.
- Two threads, B = 8, H = 32, d = 64: 1.75 times as fast as one.
- 24 layers with a float16 state: 1.60 times as fast as with float32.
- First step of a process, import numba: 0.30 s.
"""


def test_table(bench, tmp_path):
    table = bench("table")
    figures, page = tmp_path / "kernels.json", tmp_path / "page.md"
    figures.write_text(json.dumps(REPORT), encoding="utf-8")
    begin, end = table.markers(REPORT)
    page.write_text(f"# Title\n\n{begin}\nold\n{end}\n\nMore.\n", encoding="utf-8")
    for _ in range(2):  # writing it again changes nothing
        assert table.main([str(figures), str(page)]) == 0
        assert page.read_text(encoding="utf-8") == f"# Title\n\n{begin}\n{TABLE}\n{end}\n\nMore.\n"


@pytest.mark.parametrize(
    ("report", "page", "message"),
    [
        (REPORT | {"quick": True}, "<!-- kernels:begin --><!-- kernels:end -->", "too short for a table"),
        (REPORT, "no markers", "once each"),
        (REPORT, "<!-- kernels:end --><!-- kernels:begin -->", "once each"),
    ],
)
def test_a_table_that_cannot_be_written(bench, tmp_path, capsys, report, page, message):
    table = bench("table")
    figures, target = tmp_path / "kernels.json", tmp_path / "README.md"
    figures.write_text(json.dumps(report), encoding="utf-8")
    target.write_text(page, encoding="utf-8")
    assert table.main([str(figures), str(target)]) == 1
    assert message in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == page


@pytest.mark.skipif(NO_JIT, reason="interpreted kernels are not what is measured")
def test_a_short_run(tmp_path):
    figures = tmp_path / "figures.json"
    script = [sys.executable, str(FOLDER / "kernels.py"), "--quick", "--only", "dispatch", "--json", str(figures)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text(encoding="utf-8"))
    assert report["quick"] and report["format"] == 1
    assert report["command"] == "python benchmarks/kernels.py --quick --only dispatch --json figures.json"
    assert {"cpu", "cores", "date", "versions", "load", "load_after"} <= set(report["machine"])
    first = report["groups"][0]
    assert set(first["times"]) == {"step", "no-op"} and first["times"]["step"]["min"] > 0
    difference = first["times"]["step"]["min"] - first["times"]["no-op"]["min"]
    assert first["values"]["step - no-op, min"] == pytest.approx(difference)
    assert "step - no-op" in done.stdout and "share of the finiteness checks" in done.stdout


def test_exported_files_are_timed(bench, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    files = bench("onnx_files")
    assert files.main(["--quick", "--only", "step", "--only", "memory", "--json", str(tmp_path / "figures.json")]) == 0
    groups = json.loads((tmp_path / "figures.json").read_text())["groups"]
    assert [g["title"].split(",")[0] for g in groups[:4]] == ["linear", "gated", "delta", "gated_delta"]
    for group in groups[:4]:
        assert not group["notes"]
        assert {"fused / bare operator", "portable step / bare operator"} <= set(group["ratios"])
    assert "portable step" in capsys.readouterr().out


def test_a_wrong_file_is_named_and_not_timed(bench, monkeypatch):
    pytest.importorskip("onnxruntime")
    files = bench("onnx_files")
    monkeypatch.setattr(files, "TOLERANCE", 0.0)
    (group,) = [g for g in files.step(files.Settings(quick=True)) if g.case["rule"] == "gated"]
    assert not group.times
    assert any("fused: NOT TIMED, its output is off by" in note for note in group.notes)


@pytest.mark.skipif(NO_JIT, reason="interpreted kernels are not what is measured")
def test_the_readme_can_be_made_anew(bench, monkeypatch, capsys):
    """A quick run prints the section and leaves the page alone; the command stands in it."""
    readme, table = bench("readme"), bench("table")
    before = readme.README.read_text(encoding="utf-8")
    begin, end = table.markers({"kind": "linattn-edge bench"})
    assert begin in before and end in before
    real = readme.cli.main
    monkeypatch.setattr(readme.cli, "main", lambda words: real(["bench", "step", "context", "model", *words[1:]]))
    assert readme.main(["--quick"]) == 0
    assert readme.README.read_text(encoding="utf-8") == before
    out = capsys.readouterr().out
    section = out[out.index("Measured on") :]
    assert "linattn-edge bench step context model --quick --save bench.json" in section
    assert "| `gated_delta` | 8 × 64 |" in section and "The bundled model:" in section
    assert "The state at position 20,000 and a fresh one" in section


def test_a_quick_run_is_not_written_into_the_readme(bench, tmp_path, capsys):
    table = bench("table")
    figures, page = tmp_path / "bench.json", tmp_path / "README.md"
    report = {"kind": "linattn-edge bench", "quick": True}
    figures.write_text(json.dumps(report), encoding="utf-8")
    page.write_text("\n".join(table.markers(report)), encoding="utf-8")
    assert table.main([str(figures), str(page)]) == 1
    assert "too short" in capsys.readouterr().err
