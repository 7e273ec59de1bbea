"""`linattn-edge bench`: how times are taken, who is not timed, what comes out, and how it is compared and shown."""

import copy
import csv
import gc
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from chromium import Chromium
from linattn_edge import cli, terminal
from linattn_edge.bench import clock, commands, comparison, files, machine, peers, statistics, tables, turns
from linattn_edge.bench.page import page
from linattn_edge.bench.record import OURS, Group, Report, Row
from linattn_edge.bench.roofline import SWEEP, roofline, step_bytes
from linattn_edge.bench.suites import SUITES, Settings, context, startup, step
from linattn_edge.bench.suites.base import measure
from linattn_edge.bench.views import Table, short, word

# ---- statistics, by a clock that does what it is told


class Clock:
    """Nanoseconds that pass only when somebody lets them; each look at it costs `look`."""

    def __init__(self, look=0):
        self.now, self.look = 0, look

    def __call__(self):
        self.now += self.look
        return self.now


@pytest.fixture
def fake(monkeypatch):
    found = Clock()
    monkeypatch.setitem(clock.CLOCKS, clock.WALL, found)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: found.now * 1e-9)
    return found


def test_a_sample_is_a_call_over_its_units(fake):
    calls = []

    def call():
        calls.append(fake.now)
        fake.now += 6000

    assert turns.timed(call, units=3, batch=2)(5).tolist() == [2.0] * 5
    assert len(calls) == 10


def test_what_comes_before_a_call_is_not_timed(fake):
    def prepare():
        fake.now += 10**6

    def call():
        fake.now += 1500

    assert turns.timed(call, before=prepare)(3).tolist() == [1.5] * 3


def test_percentiles_of_known_times(fake):
    """Calls of 1, 2 … 1000 µs: every statistic is known, and the slow ones stay in."""
    waits = iter(range(1, 1001))

    def call():
        fake.now += 1000 * next(waits)

    found = statistics.summary(turns.timed(call)(1000))
    assert found["min"] == 1 and found["max"] == 1000 and found["mean"] == 500.5 and found["samples"] == 1000
    assert found["p50"] == 500.5
    expected = {"p10": 100.9, "p90": 900.1, "p99": 990.01, "p999": 999.001}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("samples", "missing"),
    [(9, {"p90", "p99", "p999"}), (10, {"p99", "p999"}), (100, {"p999"}), (999, {"p999"}), (1000, set())],
)
def test_a_percentile_needs_a_sample_beyond_it(samples, missing):
    found = statistics.summary(range(1, samples + 1))
    assert set(statistics.PERCENTILES) - set(found) == missing


def test_noise_is_how_far_the_minima_of_pieces_lie_apart():
    assert statistics.summary([1.0, 5.0] * 50)["noise"] == 0
    drift = np.repeat([1.0, 1.1, 1.2, 1.3, 1.5], 20)
    assert statistics.summary(drift)["noise"] == pytest.approx(0.5)
    assert statistics.summary([3.0])["noise"] == 0


def test_ratio_is_of_minima_and_of_tenth_percentiles():
    a, b = statistics.summary(range(100, 201)), statistics.summary([50.0, 55.0, 1e9])
    assert a["min"] == 100 and a["p10"] == 110 and b["min"] == 50
    assert statistics.ratio(a, b) == {"min": 2.0, "p10": pytest.approx(110 / 51)}


def test_a_histogram_loses_nothing():
    values = np.random.default_rng(0).lognormal(0, 2, 5000)
    bins = statistics.histogram(values)
    assert sum(n for _, _, n in bins) == 5000
    assert bins[0][0] == values.min() and bins[-1][1] == pytest.approx(values.max())
    assert all(n > 0 and low < high for low, high, n in bins)
    assert statistics.histogram([2.0, 2.0])[0][2] == 2


def test_contestants_take_turns(fake):
    order = []

    def contestant(name, us):
        def run(n):
            order.append(name)
            fake.now += int(us * 1000) * n
            return np.full(n, us)

        return run

    found = turns.alternate({"a": contestant("a", 3.0), "b": contestant("b", 1.5)}, rounds=4)
    assert order[-8:] == ["a", "b"] * 4
    assert statistics.ratio(found["a"], found["b"]) == {"min": 2.0, "p10": 2.0}


def test_a_turn_has_a_length_and_a_slow_contestant_fewer_rounds(fake):
    def contestant(seconds):
        def run(n):
            fake.now += int(seconds * 1e9) * n
            return np.full(n, seconds)

        return run

    quick = turns.alternate({"quick": contestant(1e-4)}, rounds=10, turn=5e-3)["quick"]
    assert quick["samples"] == 10 * 50
    assert turns.alternate({"slow": contestant(2.0)}, rounds=100, budget=10)["slow"]["samples"] == 5
    assert turns.alternate({"slow": contestant(2.0)}, rounds=100, budget=1)["slow"]["samples"] == 3


def test_the_collector_is_off_meanwhile_and_on_again():
    seen = []

    def run(n):
        seen.append(gc.isenabled())
        return np.ones(n)

    turns.alternate({"a": run}, 3)
    assert seen[-3:] == [False] * 3 and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        turns.alternate({"a": lambda n: 1 / 0}, 3)
    assert gc.isenabled()


def test_what_is_known_of_a_clock(monkeypatch):
    monkeypatch.setitem(clock.CLOCKS, clock.WALL, type("Named", (Clock,), {"__name__": "perf_counter_ns"})(look=40))
    found = clock.describe(clock.WALL, looks=50)
    assert found["overhead_ns"] == 40 and found["resolution_ns"] == 40
    real = clock.describe(clock.CPU, looks=500)
    assert real["monotonic"] and real["overhead_ns"] > 0 and real["function"] == "time.thread_time_ns"


# ---- peers


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("B", [1, 3])
def test_peers_agree(rule, B):
    problem = peers.Problem(rule, 2, 32, B)
    contestants, absent = peers.agreeing(problem, peers.builders(peers.PEERS))
    assert {OURS, "NumPy"} <= set(contestants)
    assert all(reason.startswith("left out, ") for reason in absent.values())


@pytest.mark.parametrize("fault", ["output", "state", "nan"])
def test_a_peer_that_disagrees_is_reported_and_not_timed(fault):
    steps = []

    def wrong(problem):
        good = peers.numpy_peer(problem)

        def one():
            steps.append(1)
            good.step()

        def read():
            y, S = good.read()
            if fault == "state":
                return y, S + np.float32(0.01)
            return (y * np.float32(np.nan) if fault == "nan" else y * np.float32(1.01)), S

        return peers.Peer(one, read)

    def missing(problem):
        raise turns.Missing("there is no such package")

    case = {"rule": "gated", "map": "identity", "B": 1, "H": 2, "d": 32}
    builders = {OURS: peers.ours, "wrong": wrong, "NumPy": peers.numpy_peer, "absent": missing}
    group = step.beside_peers(Settings.short(), case, builders)
    rows = {row.name: row for row in group.rows}
    assert rows["wrong"].time is None
    assert rows["wrong"].note.startswith(f"NOT TIMED, its {'state' if fault == 'state' else 'output'} is off by")
    assert rows["absent"].note == "left out, there is no such package"
    assert len(steps) == peers.CHECKED_TOKENS * Settings.short().builds
    assert rows["NumPy"].time["min"] > 0 and rows["NumPy"].values[f"times {OURS}"] > 0
    (line, _) = commands.untimed([group])
    assert line.startswith("wrong: NOT TIMED") and "H = 2" in line
    *_, ratios = step.tables([group])
    assert "wrong" not in ratios.header and "NumPy" in ratios.header


def test_a_wrong_softmax_is_not_timed(monkeypatch):
    monkeypatch.setattr(context, "softmax_attention", lambda q, k, v: 1.01 * np.ones(v.shape))
    group = context.softmax(Settings.short(), None, 100)
    (row,) = group.rows
    assert row.time is None and row.note.startswith("NOT TIMED, its output is off by")
    assert context.tables([group]) == []


def test_an_absent_package(monkeypatch):
    for package in ("onnxruntime", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in ("ONNX Runtime", "torch"):
        build = next(found[name] for found in peers.PEERS.values() if name in found)
        with pytest.raises(turns.Missing, match="not installed"):
            build(peers.Problem("linear", 2, 32))


# ---- what is counted


def test_bytes_of_a_step_and_the_roofline(monkeypatch):
    problem = peers.Problem("gated", 2, 8, 3)
    x = {name: a for name, a in problem.arrays.items() if name != "S"}
    numbers = 2 * 3 * 2 * 8 * 8 + (4 + 1) * 3 * 2 * 8  # S twice; q, k, v, g and y
    assert step_bytes(problem.layer(), x) == 4 * numbers
    monkeypatch.setattr("linattn_edge.bench.roofline._CALL", [1.0])
    found = roofline(10.0, 2_000_000, sweep_us=6.0, swept=500_000)
    assert found == {
        "bytes moved": 2_000_000,
        "GB/s": pytest.approx(200),
        "machine GB/s": pytest.approx(200),
        "share of machine": pytest.approx(1.0),
    }


def test_positions():
    assert context.positions(1) == [1]
    assert context.positions(20_000) == [1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 20_000]
    assert context.cache_positions(1_000_000, 1 << 22)[-1] == 1024


def test_where_a_series_passes_a_level_for_good():
    at = [1, 10, 100, 1000]
    assert context.crossing(at, [1, 10, 100, 1000], 50) == pytest.approx(50)
    assert context.crossing(at, [5, 1, 10, 100], 4) == pytest.approx(10 * 4 ** (1 / 1))
    assert context.crossing(at, [2, 3, 4, 5], 1) == 1
    assert context.crossing(at, [1, 2, 3, 4], 9) is None


def test_pinning(monkeypatch):
    with machine.Pin("none") as pin:
        pin.renew()
    assert pin.cores == []
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system can't pin")
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(machine, "load", lambda: [len(allowed) + 1.0])  # busy: the system is to choose
    with machine.Pin() as pin:
        pin.renew()
        assert os.sched_getaffinity(0) == allowed and pin.cores == []
    monkeypatch.setattr(machine, "load", lambda: [0.0])
    with machine.Pin() as pin:
        pin.renew()
        assert os.sched_getaffinity(0) == set(pin.cores)
        pin.renew()
    assert os.sched_getaffinity(0) == allowed and set(pin.cores) <= allowed
    with machine.Pin(str(min(allowed))) as pin:
        pin.renew()
    assert pin.cores == [min(allowed)]
    for wrong in ("99999", "-1", "some"):
        with pytest.raises(ValueError, match="--pin: expected"):
            machine.Pin(wrong)
    monkeypatch.delattr(os, "sched_setaffinity")
    with machine.Pin() as pin:
        pin.renew()
    assert pin.cores == []


def test_a_machine_that_tells_little(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError

    assert machine.revision(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert machine.revision(tmp_path) is None  # no repository
    monkeypatch.setattr(machine.Path, "read_text", refuse)
    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.delattr(os, "getloadavg")
    assert machine.load() == [] and machine.resident_memory() is None and machine.total_memory() is None
    assert machine.free_memory() == 1 << 29
    monkeypatch.setattr(machine.Path, "glob", lambda self, pattern: [])
    assert not machine.one_blas_thread()


def test_a_new_process_that_fails(monkeypatch):
    monkeypatch.setattr(startup, "FIRST_CALL", "raise SystemExit('no')")
    group = startup.new_processes(Settings.short())
    assert group.notes[0] == "a new process fails: no" and not group.rows


# ---- a whole run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A quick run of all suites: its folder, what it printed, and the report."""
    folder = tmp_path_factory.mktemp("bench")
    words = ["bench", "--quick", "--save", str(folder / "bench.json"), "--html", str(folder / "report.html")]
    out, real = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        assert cli.main(words) == 0
    finally:
        sys.stdout = real
    return folder, out.getvalue(), files.from_json(folder / "bench.json")


def test_all_suites_and_their_tables(run):
    _, out, report = run
    assert [*dict.fromkeys(group.suite for group in report.groups)] == list(SUITES)
    for suite, entry in SUITES.items():
        found = entry.tables(report.of(suite))
        assert found
        for table in found:
            assert f"{table.title}\n====" in out
            assert all(len(row) == len(table.header) for row in table.rows)
    assert "A quick run: too short to quote." in out
    assert report.command == "linattn-edge bench --quick --save bench.json"


def test_the_report_says_how_and_where(run):
    report = run[2]
    assert {"cpu", "cores", "versions", "revision", "date", "load", "system", "memory_bytes"} <= set(report.machine)
    clocks = report.method["clocks"]
    assert set(clocks) == {clock.WALL, clock.CPU} and clocks[clock.WALL]["monotonic"]
    assert clocks[clock.WALL]["overhead_ns"] > 0
    assert report.method["garbage_collector"] == "off while timing"
    assert report.seconds > 0


def test_a_step_has_its_roofline(run):
    groups = run[2].of("step")
    assert {group.case["rule"] for group in groups} == set(step.RULES)
    for group in groups:
        values = group.row(OURS).values
        assert values["bytes moved"] >= 2 * 4 * 8 * 64 * 64
        assert 0 < values["share of machine"] < 1.5
        assert values["GB/s"] == pytest.approx(values["share of machine"] * values["machine GB/s"])


def test_a_token_costs_the_same_at_the_end(run):
    """A loose bound: a quick run on a busy machine. The figure for a million tokens is in the README."""
    groups = run[2].of("context")
    flow, ends, scan = (context.part(groups, name) for name in ("stream", "ends", "softmax"))
    assert len({row.values["state bytes"] for row in flow.rows[:-1]}) == 1
    assert sum(n for _, _, n in flow.rows[-1].histogram) == flow.case["tokens"] == flow.rows[-1].time["samples"]
    assert ends.row("old").case["position"] == flow.case["tokens"] and ends.row("fresh").case["position"] == 0
    assert 0.5 < ends.values[context.OLD_OVER_FRESH] < 2
    exact = [row for row in scan.rows if row.name == "softmax"]
    assert exact[-1].time["min"] > 3 * exact[0].time["min"]
    assert scan.values[context.MEMORY_CROSSES] == pytest.approx(flow.rows[0].values["state bytes"] / 4096, rel=0.01)


def numbers(data):
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        return {x for entry in data for x in numbers(entry)}
    return {float(data)} if isinstance(data, int | float) and not isinstance(data, bool) else set()


def test_json_csv_and_page_have_the_same_figures(run, capsys):
    folder, _, report = run
    source = str(folder / "bench.json")
    assert cli.main(["bench", "--from", source, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert cli.main(["bench", "--from", source, "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rows = [row for group in report.groups for row in (*group.rows, *group.controls)]
    measured = [line for line in lines if line["unit"]]
    assert len(measured) == len(rows)
    for row, line in zip(rows, measured, strict=True):
        assert line["name"] == row.name
        for name, value in ((row.time or {}) | row.values).items():
            assert float(line[name]) == value
    known = numbers(data)
    text = (folder / "report.html").read_text(encoding="utf-8")
    shown = [float(x) for x in re.findall(r'(?:<data value|data-x|data-y)="([^"]+)"', text)]
    assert len(shown) > 200
    assert [x for x in shown if x not in known] == []
    embedded = re.search(r'<pre id="report">(.*?)</pre>', text, re.DOTALL)[1]
    for sign, letter in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        embedded = embedded.replace(sign, letter)
    assert json.loads(embedded) == data


def test_the_page_needs_nothing_from_elsewhere(run):
    text = (run[0] / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "url(" not in text and "@import" not in text


def test_the_page_in_a_browser(run):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium: not installed")
    seen = {}
    with Chromium(program) as browser:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.open((run[0] / "report.html").as_uri())
            seen[scheme] = browser.value("getComputedStyle(document.body).backgroundColor")
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert browser.value("document.querySelectorAll('svg').length") == 5
        assert browser.value("JSON.parse(document.querySelector('#report').textContent).kind") == "linattn-edge bench"
        outside = """[...document.querySelectorAll('svg [data-x]')].filter(e => {
            const a = e.getBoundingClientRect(), b = e.closest('svg').getBoundingClientRect();
            return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
        }).length"""
        assert browser.value(outside) == 0
        assert browser.problems == []
        browser.call("Emulation.setEmulatedMedia", media="print")
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.value("getComputedStyle(document.querySelector('details')).display") == "none"
    assert seen["light"] != seen["dark"]


@pytest.mark.parametrize("suites", [["context"], ["step"], ["step", "context"]])
def test_plot(run, tmp_path, suites):
    pytest.importorskip("matplotlib")
    report = replace(run[2], groups=[group for group in run[2].groups if group.suite in suites])
    files.save(tmp_path / "bench.json", files.to_json(report))
    target = tmp_path / "bench.svg"
    assert cli.main(["bench", "--from", str(tmp_path / "bench.json"), "--plot", str(target)]) == 0
    assert target.stat().st_size > 10_000


def test_nothing_to_plot(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = replace(run[2], groups=run[2].of("startup"))
    files.save(tmp_path / "bench.json", files.to_json(report))
    words = ["bench", "--from", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    assert cli.main(words) == 1
    assert "neither was measured" in capsys.readouterr().err


def test_in_a_pipe_there_are_tables_and_nothing_else():
    command = [sys.executable, "-m", "linattn_edge", "bench", "streams", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "\x1b" not in done.stdout
    assert "A token of each stream\n======" in done.stdout


@pytest.mark.skipif(not hasattr(os, "pipe2"), reason="needs POSIX pipes")
def test_a_closed_pipe_is_silent(run):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "linattn_edge", "bench", "--from", str(run[0] / "bench.json")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_on_a_terminal(run, monkeypatch, capsys):
    """Tables by rich, or without it in plain text; the bar names what is measured."""
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["bench", "--from", str(run[0] / "bench.json")]) == 0
    out = capsys.readouterr().out
    assert "A call of step()" in out and "─" in out and "====" not in out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["bench", "--from", str(run[0] / "bench.json")]) == 0
    assert "A call of step()\n====" in capsys.readouterr().out


@pytest.mark.parametrize("rich", [True, False])
def test_progress_names_what_is_done(rich, monkeypatch, capsys):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(terminal.progress([1, 2], "suite", describe=lambda item: f"item {item}")) == [1, 2]
    assert "item 2" in capsys.readouterr().err


def test_a_table_without_rows(capsys, monkeypatch):
    table = Table("Title", "Text.", ["a", "b"], [])
    tables.show(table)
    assert capsys.readouterr().out == "Title\n=====\nText.\n\n"
    assert "b" not in tables.plain(table)
    assert tables.plain(Table("T", "", ["a"], [[word("x")]])).splitlines()[-1] == "x"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (0.5, "0.500"), (3.14159, "3.14"), (31.4, "31.4"), (314.15, "314"), (31415.9, "31,416")],
)
def test_short_numbers(value, text):
    assert short(value) == text


# ---- two runs


def measured(us, noise=0.01, samples=1000):
    return {"min": us, "p10": us, "p50": us, "samples": samples, "noise": noise}


def report(step_us=10.0, sweep_us=5.0, noise=0.01, samples=1000, cpu="Some CPU", title="one token", peer_us=20.0):
    rows = [
        Row(OURS, {}, measured(step_us, noise, samples)),
        Row("NumPy", {}, measured(peer_us)),
        Row(SWEEP, {}, measured(sweep_us)),
    ]
    case = {"rule": "gated", "map": "identity", "B": 1, "H": 8, "d": 64}
    about = {"cpu": cpu, "llvm_cpu": "x", "cores": 2, "system": "Linux", "versions": {"linattn_edge": "0.1.0"}}
    about |= {"load": [0.1], "revision": "abc", "date": "2031-02-03"}
    known = {"function": "f", "monotonic": True, "resolution_ns": 1, "overhead_ns": 50.0}
    clocks = dict.fromkeys(clock.CLOCKS, known)
    method = {"clocks": clocks, "pinned_to_cores": [], "garbage_collector": "off", "rounds": 1, "seconds_of_a_turn": 1}
    return Report("linattn-edge bench", False, about, method, [Group("step", title, case, rows, load=[])])


def compared(old, new, fail_above=None):
    return comparison.compare(old, new, fail_above)


@pytest.mark.parametrize(
    ("new", "verdict", "fails"),
    [
        ({"step_us": 10.0}, "within noise", False),
        ({"step_us": 10.4}, "within noise", False),  # the least band is 5 %
        ({"step_us": 10.8}, "slower", False),  # beyond the band, within what is allowed
        ({"step_us": 12.0}, "slower", True),
        ({"step_us": 8.0}, "faster", False),
        ({"step_us": 12.0, "noise": 0.3}, "within noise", False),  # it does not repeat
        ({"step_us": 12.0, "sweep_us": 7.0}, "within noise", False),  # the machine itself became slower
        ({"step_us": 20.0, "sweep_us": 7.0}, "slower", True),
    ],
)
def test_what_is_slower(new, verdict, fails):
    result = compared(report(), report(**new), 10)
    (row,) = result["rows"]  # neither the peer nor the sweep
    assert (row["verdict"], row["fails"]) == (verdict, fails)
    assert row["ratio"] == pytest.approx(new["step_us"] / 10)
    assert comparison.failures(result) == fails


def test_a_band_is_made_of_both_noises_and_the_drift():
    result = compared(report(noise=0.06), report(noise=0.08, sweep_us=5.5))
    assert result["rows"][0]["band"] == pytest.approx(math.hypot(0.06, 0.08, 0.1))
    assert result["machine_drift"] == pytest.approx(0.1)


def test_without_a_limit_nothing_fails():
    assert comparison.failures(compared(report(), report(step_us=100))) == 0


def test_a_group_without_a_sweep_takes_the_usual_drift():
    old, new = report(), report(sweep_us=6.0)
    for found in (old, new):
        found.groups.append(Group("prefill", "p", {}, [Row("T = 1", {"T": 1}, measured(3.0))], load=[]))
    assert compared(old, new)["rows"][1]["band"] == pytest.approx(0.2, abs=0.01)


def test_what_cannot_be_compared():
    for old, new in ((report(samples=2), report()), (report(title="one"), report(title="another"))):
        with pytest.raises(ValueError, match="no row in common"):
            compared(old, new)
    notes = compared(report(cpu="Old CPU"), replace(report(), quick=True))["notes"]
    assert "Old CPU" in notes[0] and "quick" in notes[1]
    new = report()
    new.groups[0].rows.append(Row("more", {}, measured(1.0)))
    assert compared(report(), new)["notes"] == ["1 rows are not in the old run."]


@pytest.fixture
def saved(tmp_path):
    """Write reports, and give their paths."""

    def save(**reports):
        for name, found in reports.items():
            files.save(tmp_path / f"{name}.json", files.to_json(found))
        return [str(tmp_path / f"{name}.json") for name in reports]

    return save


@pytest.mark.parametrize(
    ("us", "limit", "status"), [(10.0, "5", 0), (13.0, None, 0), (13.0, "50", 0), (13.0, "20", 1), (13.0, "0", 1)]
)
def test_exit_status_of_a_comparison(saved, capsys, us, limit, status):
    old, new = saved(old=report(), new=report(step_us=us))
    words = ["bench", "--from", new, "--compare", old, *(["--fail-above", limit] if limit else [])]
    assert cli.main(words) == status
    out, err = capsys.readouterr()
    assert "Beside the older run" in out
    assert ("FAILS" in out) == (status == 1) == ("slower than before" in err)
    if us > 10:
        assert "1.30×" in out


def test_a_comparison_is_in_the_json_and_on_the_page(saved, tmp_path, capsys):
    old, new = saved(old=report(), new=report(step_us=13.0))
    html = tmp_path / "both.html"
    words = ["bench", "--from", new, "--compare", old, "--fail-above", "10", "--json", "--html", str(html)]
    assert cli.main(words) == 1  # and yet all is written
    data = json.loads(capsys.readouterr().out)
    assert data["comparison"]["rows"][0]["ratio"] == pytest.approx(1.3)
    text = html.read_text(encoding="utf-8")
    assert "Beside the older run" in text and 'class="fails"' in text
    shown = [float(x) for x in re.findall(r'<data value="([^"]+)"', text)]
    assert shown and set(shown) <= numbers(data)


def test_names_of_machines_are_no_markup():
    assert "<i>" not in page(report(cpu="<i>CPU</i> & more"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "not a JSON file"),
        ("[]", "not a report"),
        ('{"kind": "other"}', "not a report"),
        ('{"kind": "linattn-edge bench", "format": 99}', "format 99"),
        ('{"kind": "linattn-edge bench", "format": 1}', "damaged report"),
        ('{"kind": "linattn-edge bench", "format": 1, "groups": [{"rows": [{}], "controls": []}]}', "damaged report"),
    ],
)
def test_a_file_that_is_no_report(tmp_path, capsys, content, message):
    path = tmp_path / "file.json"
    path.write_text(content, encoding="utf-8")
    for option in ("--from", "--compare"):
        assert cli.main(["bench", option, str(path)]) == 1
        err = capsys.readouterr().err
        assert message in err and "file.json" in err and err.count("\n") == 1


@pytest.mark.parametrize("lacking", ["load", "clocks", "min"])
def test_a_report_that_lacks_something(tmp_path, capsys, lacking):
    """A file whose parts have the right kinds, but not all that is in them."""

    def without(value):
        if isinstance(value, dict):
            return {name: without(part) for name, part in value.items() if name != lacking}
        return [without(part) for part in value] if isinstance(value, list) else value

    path = tmp_path / "file.json"
    data = without(report().to_dict())
    data["groups"] = [group | {"load": []} for group in data["groups"]]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert cli.main(["bench", "--from", str(path)]) == 1
    err = capsys.readouterr().err
    assert "damaged report" in err and lacking in err and "file.json" in err and err.count("\n") == 1


# ---- options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "SUITE: expected of step, context"),
        (["--device", "cuda"], "--device cuda: "),
        (["--peers", "numpy,other"], "--peers: expected of numpy"),
        (["--json", "--csv"], "not both"),
        (["--fail-above", "3"], "needs --compare"),
        (["--fail-above", "-3", "--compare", "x"], "at least 0"),
        (["--fail-above", "nan", "--compare", "x"], "at least 0"),
        (["--html", "/no/such/folder/x.html"], "--html: "),
        (["--save", "/no/such/folder/x.json"], "--save: "),
        (["--plot", "x.gif"], "--plot: "),
        (["--from", "nothing.json"], "nothing.json"),
    ],
)
def test_what_is_refused_before_any_work(words, message, capsys, monkeypatch):
    monkeypatch.setattr(commands, "measure", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["bench", *words]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_peers_by_default_are_those_that_are_here(monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "torch" else object())
    assert commands.chosen_peers(None) == ("numpy", "onnxruntime", "softmax")
    assert commands.chosen_peers("none") == ()
    assert commands.chosen_peers(" softmax, numpy,softmax") == ("softmax", "numpy")
    with pytest.raises(ValueError, match="torch is not installed"):
        commands.chosen_peers("torch")


def test_the_light_tables_of_names_are_right():
    """`--help` must not import what measures."""
    assert tuple(SUITES) == commands.SUITES
    assert {*peers.PEERS, context.SOFTMAX} == set(commands.PEERS)
    code = "import sys; from linattn_edge import cli; print(*[m for m in sys.modules if 'bench' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == {"linattn_edge.bench", "linattn_edge.bench.commands"}


def test_the_command_in_the_report_makes_it_again(tmp_path, capsys):
    words = ["bench", "streams", "--quick", "--peers", "none", "--pin", "none", "--json"]
    assert cli.main(words) == 0
    found = Report.from_dict(json.loads(capsys.readouterr().out))
    assert found.command == "linattn-edge bench streams --quick --peers none --pin none"
    assert found.method["pinned_to_cores"] == [] and found.method["peers"] == []
    assert copy.deepcopy(found).to_dict() == found.to_dict()


def test_a_group_is_built_several_times_in_memory_of_its_own():
    places = []

    def build():
        array = np.zeros(100_000)
        places.append(array.ctypes.data)

        def one(n):
            return np.full(n, float(len(places)) + array[0])

        return {"a": one, "b": one}, ({} if len(places) < 2 else {"b": "NOT TIMED, it changed its mind"})

    group = measure(Group("s", "g"), replace(Settings.short(), builds=3), build)
    assert len(set(places)) == 3
    (a, b) = group.rows
    assert a.time["min"] == 1 and a.time["max"] == 3 and a.time["noise"] == 2
    assert b.time is None and b.note.startswith("NOT TIMED")
    (control,) = group.controls
    assert control.time["min"] > 0
