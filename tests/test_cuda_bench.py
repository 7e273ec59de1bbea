"""`linattn-edge bench --device cuda`, without a GPU: what is timed, by a timer that needs none, and what is shown."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from linattn_edge import cli, gpu
from linattn_edge.bench import clock, commands, comparison, device, files, tables
from linattn_edge.bench.page import page
from linattn_edge.bench.record import OURS, Group, Report, Row
from linattn_edge.bench.roofline import COPY, LARGE_COPY
from linattn_edge.bench.suites import BY_DEVICE, REPORTED, SUITES, Settings, cuda
from linattn_edge.errors import DeviceError

simulated = pytest.mark.cudasim


class Timer:
    """A GPU on which all work takes 3 µs. What is replayed is not run."""

    def __init__(self):
        self.stream = 0
        self.captured, self.waits = [], 0

    def wait(self):
        self.waits += 1

    def elapsed(self, call):
        call()
        return 3.0

    def capture(self, work, launches=1):
        work(self.stream)
        self.captured.append(launches)
        return lambda: None


def timed(us, clock_=device.EVENTS):
    return {"min": us, "p50": us, "max": us, "mean": us, "samples": 100, "noise": 0.0}


def made_up(scale=1.0):
    """Groups as the suites make them, of figures that are made up."""
    case = {"rule": "gated", "map": "identity", "B": 16, "H": 8, "d": 64}
    step = Group(cuda.STEP, "one token, gated, B = 16, H = 8, d = 64", case)
    us = {OURS: 2.0 * scale, cuda.REPLAY: 9.0, cuda.REPLAYS: 3.0, cuda.CALL: 40.0, cuda.CALLS: 20.0, COPY: 2.5}
    us |= {LARGE_COPY: 130.0, cuda.TORCH: 8.0}
    step.rows = [Row(name, time=timed(value)) for name, value in us.items()]
    step.rows[0].values = {"bytes moved": 4e6, "GB/s": 2000.0, "machine GB/s": 4000.0, "share of machine": 0.5}
    step.add_ratios()
    absent = Group(cuda.STEP, "another", case, [Row(OURS, note="left out, out of GPU memory")])
    prompt = Group(cuda.PREFILL, "linear, H = 8, d = 64", {"rule": "linear", "map": "elu", "H": 8, "d": 64})
    for T in (512, 4096):
        prompt.rows += [Row(f"T = {T}", {"T": T}, timed(0.5)), Row(f"T = {T}, {cuda.CALL}", {"T": T}, timed(0.75))]
    return [step, absent, prompt]


def report(card="A card, compute capability 9.0, 80.0 GiB", scale=1.0):
    machine = {
        "cpu": "Some CPU", "llvm_cpu": "x", "cores": 2, "system": "Linux x86_64", "versions": {"linattn_edge": "1"},
        "load": [0.1], "gpu": card,
    }  # fmt: skip
    looks = {"function": "f", "resolution_ns": 1, "overhead_ns": 40.0}
    method = {
        "clocks": {clock.WALL: looks, clock.CPU: looks}, "garbage_collector": "off", "pinned_to_cores": [],
        "rounds": 9, "seconds_of_a_turn": 0.005, "device": "cuda",
    }  # fmt: skip
    return Report("linattn-edge bench --device cuda", False, machine, method, made_up(scale))


# what is timed


def test_by_events_and_from_python(monkeypatch):
    now, calls = [0], []
    monkeypatch.setitem(clock.CLOCKS, clock.WALL, lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 7000

    timer = Timer()
    assert device.by_events(timer, call, 2)(3).tolist() == [1.5] * 3
    assert (len(calls), timer.waits) == (3, 0)
    assert device.from_python(timer, call)(3).tolist() == [7.0] * 3
    assert (len(calls), timer.waits) == (6, 3)
    assert device.from_python(timer, call, calls=4, units=2)(1).tolist() == [3.5]
    assert (len(calls), timer.waits) == (10, 4)


class Event:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.log.append("event")

    def synchronize(self):
        self.log.append("wait")


def test_the_same_work_goes_ahead_of_what_is_timed(monkeypatch):
    """So that the GPU never waits for Python between the two events."""
    log = []

    class Cuda:
        @staticmethod
        def stream():
            return "a stream"

        @staticmethod
        def event():
            return Event(log)

        @staticmethod
        def event_elapsed_time(start, end):
            return 0.25

    monkeypatch.setattr(gpu, "require", lambda: Cuda)
    timer = device.Timer()
    assert timer.stream == "a stream"
    assert timer.elapsed(lambda: log.append("work")) == 250.0
    assert log == ["work", "event", "work", "event", "wait"]


def test_the_driver_says_no():
    assert device._done((0,)) is None
    assert device._done((0, "graph")) == "graph"
    with pytest.raises(DeviceError, match=r"^the GPU refused: 900"):
        device._done((900,))


def test_graphs_are_what_the_driver_has():
    """Capture needs a GPU; its names are those of the package, where that is installed."""
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in ("BeginCapture", "EndCapture"):
        assert hasattr(driver, f"cuStream{name}")
    for name in ("Instantiate", "Destroy", "Launch", "ExecDestroy"):
        assert hasattr(driver, f"cuGraph{name}")
    assert driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


# in the simulator: everything but the times


@pytest.fixture
def little(monkeypatch):
    """Few threads, small layers, few calls, and the timer that needs no GPU."""
    from linattn_edge.kernels import cuda as kernels

    for name, value in (("COLUMNS", 4), ("ROWS", 2), ("PARTS", 2), ("PIECE", 4)):
        monkeypatch.setattr(kernels, name, value)
    made = []
    monkeypatch.setattr(device, "Timer", lambda: made.append(Timer()) or made[-1])
    for name, value in (("SIZES", ((2, 4),)), ("STREAMS", (2,)), ("LENGTHS", (3, 5)), ("LAUNCHES", 2), ("COPIED", 64)):
        monkeypatch.setattr(cuda, name, value)
    return made


def settings(**options):
    return Settings(rounds=3, turn=1e-6, budget=1e-6, builds=1, **options)


@simulated
def test_a_token_in_the_simulator(little):
    jobs = cuda.plan(settings())
    assert [job.title.split(",")[1].strip() for job in jobs] == ["linear", "gated", "delta", "gated_delta", "linear"]
    for job in jobs[-2:]:
        group = job.run()
        rows = {row.name: row for row in group.rows}
        assert list(rows) == [OURS, cuda.REPLAY, cuda.REPLAYS, cuda.CALL, cuda.CALLS, COPY, LARGE_COPY]
        ours = rows[OURS]
        assert ours.clock == device.EVENTS and rows[cuda.CALL].clock == clock.WALL
        assert ours.time["min"] == 1.5 and rows[LARGE_COPY].time["min"] == 3.0
        assert ours.values["machine GB/s"] == pytest.approx(2 * 64 / 3.0 * 1e-3)
        assert ours.values["GB/s"] == pytest.approx(ours.values["bytes moved"] / 1.5 * 1e-3)
        assert ours.values["bytes moved"] > 2 * 2 * 2 * 4 * 4 * 4
        assert little[-1].captured == [2, 1, 2]
        (own, memory) = cuda.tables([group])
        assert len(own.rows) == len(memory.rows) == 1


@simulated
def test_a_prompt_in_the_simulator(little):
    jobs = cuda.plan_prefill(settings())
    assert len(jobs) == 3
    group = jobs[-1].run()
    assert [(row.name, row.case["T"], row.clock) for row in group.rows] == [
        ("T = 3", 3, device.EVENTS),
        (f"T = 3, {cuda.CALL}", 3, clock.WALL),
        ("T = 5", 5, device.EVENTS),
        (f"T = 5, {cuda.CALL}", 5, clock.WALL),
    ]
    assert group.rows[0].time["min"] == 1.0
    (found,) = cuda.prefill_tables([group])
    assert len(found.rows[0]) == len(found.header) == 7


@simulated
def test_a_wrong_layer_is_not_timed(little, monkeypatch):
    monkeypatch.setattr(cuda, "disagreement", lambda peer, problem: "its output is off by 1.0e+00")
    group = cuda.plan(settings())[0].run()
    assert [(row.name, row.time, row.note) for row in group.rows] == [
        (OURS, None, "NOT TIMED, its output is off by 1.0e+00")
    ]


@simulated
def test_torch_on_the_gpu(little, monkeypatch):
    """Left out where it has no GPU; else checked, and timed in a graph of its own."""
    cuda.torch_is_out.cache_clear()
    job = cuda.plan(settings(peers=("torch",)))[0]
    monkeypatch.setattr(device, "has_torch", lambda: False)
    rows = {row.name: row for row in job.run().rows}
    assert rows[cuda.TORCH].note == "left out, it can't use the GPU"
    assert rows[OURS].time
    cuda.torch_is_out.cache_clear()
    monkeypatch.setattr(device, "has_torch", lambda: True)
    monkeypatch.setattr(cuda, "disagreement", lambda peer, problem: None)
    asked = []
    peer = cuda.Peer(lambda: None, lambda: None)
    monkeypatch.setattr(cuda, "torch_peer", lambda problem, where: asked.append((problem.B, where)) or peer)
    monkeypatch.setattr(device, "torch_step", lambda step: lambda n: np.full(n, 6.0))
    rows = {row.name: row for row in job.run().rows}
    assert asked == [(1, "cuda"), (2, "cuda")]
    assert rows[cuda.TORCH].values[f"times {OURS}"] == 4.0
    cuda.torch_is_out.cache_clear()


@simulated
def test_the_simulator_is_not_timed(capsys):
    assert cli.main(["bench", "--device", "cuda", "--quick"]) == 1
    assert capsys.readouterr() == (
        "",
        "linattn-edge: error: --device cuda: Numba's simulator runs GPU kernels in Python (NUMBA_ENABLE_CUDASIM), "
        "and its times say nothing\n",
    )


@simulated
def test_the_whole_command_in_the_simulator(little, monkeypatch, capsys, tmp_path):
    """With the timer that needs no GPU: the report is like any other."""
    monkeypatch.setattr(device, "why_not", lambda: None)
    monkeypatch.setattr(Settings, "short", classmethod(lambda cls, **options: settings(quick=True, **options)))
    path = tmp_path / "gpu.json"
    words = ["bench", "--device", "cuda", "--quick", "--peers", "none", "--pin", "none", "--save", str(path)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "GPU: Numba's simulator" in out and "A token on the GPU\n====" in out and "A prompt on the GPU\n====" in out
    found = files.from_json(path)
    assert found.command == "linattn-edge bench --quick --device cuda --peers none --pin none --save gpu.json"
    assert [*dict.fromkeys(group.suite for group in found.groups)] == [cuda.STEP, cuda.PREFILL]
    assert cli.main(["bench", "--from", str(path), "--compare", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.count("A token on the GPU\n====") == 1


# what is refused, and what there is


def test_without_a_gpu_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "why_not", lambda: f"the package numba-cuda is missing: {gpu.INSTALL}")
    monkeypatch.setattr(commands, "measure", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["bench", "--device", "cuda", "--json"]) == 1
    assert capsys.readouterr() == (
        "",
        'linattn-edge: error: --device cuda: the package numba-cuda is missing: pip install "linattn-edge[cuda]"\n',
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["context"], "SUITE: on cuda there are step and prefill; got 'context'"),
        (["step", "model"], "SUITE: on cuda there are step and prefill; got 'model'"),
        (["nothing"], "SUITE: expected of step, context"),
        (["--peers", "numpy"], "--peers: on cuda there is torch, or none; got 'numpy'"),
        (["--plot", "x.png"], "--plot: draws what was measured on a CPU"),
    ],
)
def test_what_a_gpu_has_not(words, message, capsys, monkeypatch):
    monkeypatch.setattr(device, "why_not", lambda: None)
    monkeypatch.setattr(commands, "find_spec", lambda name: object())
    monkeypatch.setattr("linattn_edge.plots.check_plot", lambda path: None)
    monkeypatch.setattr(commands, "measure", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["bench", "--device", "cuda", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_the_light_tables_name_what_there_is():
    assert {name: tuple(table) for name, table in BY_DEVICE.items()} == commands.DEVICES
    assert {*SUITES, cuda.STEP, cuda.PREFILL} == set(REPORTED)
    assert commands.chosen_peers("none", "cuda") == ()
    assert set(commands.chosen_peers(None, "cuda")) <= {"torch"}


# what is shown


def test_tables_of_a_gpu():
    groups = made_up()
    own, memory, torch = cuda.tables(groups[:2])
    assert [cell.text for cell in own.rows[0]] == [
        "gated", "16", "8 × 64", "2.00", "3.00", "9.00", "20.0", "40.0", "–",
    ]  # fmt: skip
    assert [cell.text for cell in memory.rows[0][4:]] == ["2,000", "4,000", "50%", "1.25×"]
    assert [cell.text for cell in torch.rows[0][3:]] == ["2.00", "4.00×"]
    (prompts,) = cuda.prefill_tables(groups[2:])
    assert prompts.header[3:] == ["T = 512", "a call", "T = 4,096", "a call"]
    assert [cell.text for cell in prompts.rows[0]] == ["linear, elu", "8", "64", "0.500", "0.750", "0.500", "0.750"]
    for table in (own, memory, torch, prompts):
        assert all(len(row) == len(table.header) for row in table.rows)


def test_a_report_of_a_gpu_is_shown_like_any_other(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    files.save(path, files.to_json(report()))
    assert cli.main(["bench", "--from", str(path), "--html", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "; GPU: A card, compute capability 9.0, 80.0 GiB" in out
    assert "linattn_edge: left out, out of GPU memory (another)" in out
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What a token costs: A card" in html and '<section id="cuda-step">' in html
    assert html.count("<svg") == 1 and "out of GPU memory" in html
    assert html == page(files.from_json(path))
    assert cli.main(["bench", "--from", str(path), "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "clock" in lines[0] and any(line.startswith("cuda-step,") and OURS in line for line in lines)
    assert cli.main(["bench", "--from", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text(encoding="utf-8"))


def test_two_runs_on_a_gpu_are_compared():
    found = comparison.compare(report(), report(scale=1.5), 10)
    assert [row["verdict"] for row in found["rows"] if row["name"] == OURS] == [comparison.SLOWER]
    names = {row["name"] for row in found["rows"]}
    assert not {COPY, LARGE_COPY, cuda.TORCH} & names and {OURS, cuda.CALL, "T = 512"} <= names
    assert comparison.compare(report("Another"), report())["notes"] == ["The old run was on another GPU, Another."]
    assert tables.heading(report())[0].endswith("GPU: A card, compute capability 9.0, 80.0 GiB")
    assert asdict(report()) == report().to_dict()
