"""The same on a GPU: one token by rule, sizes and streams, and prompts; arrays and state lie there."""

from collections.abc import Callable, Container
from functools import cache, partial
from typing import Any

from linattn_edge import gpu
from linattn_edge.attention import LinearAttention
from linattn_edge.bench import device
from linattn_edge.bench.device import COPIED, EVENTS, LAUNCHES, by_events, from_python
from linattn_edge.bench.inputs import layer_inputs, make_layer
from linattn_edge.bench.peers import Peer, Problem, disagreement, torch_peer
from linattn_edge.bench.record import OURS, Group, Row
from linattn_edge.bench.roofline import COPY, LARGE_COPY, share, step_bytes
from linattn_edge.bench.suites import prefill, step
from linattn_edge.bench.suites.base import Built, Job, Settings, measure
from linattn_edge.bench.views import Cell, Table, count, figure, figures, layer_name, memory, percent, times, word
from linattn_edge.errors import DeviceError

STEP, PREFILL = "cuda-step", "cuda-prefill"  # the suites' names in a report

SIZES = ((8, 64), (32, 64), (32, 128))  # H, d
STREAMS = (1, 16, 256)
LENGTHS = (512, 4096, 32768)

CALL, CALLS = "a call, waited for", f"{LAUNCHES} calls, then waited for"
REPLAY, REPLAYS = "a replay, waited for", f"{LAUNCHES} replays, then waited for"
TORCH = "torch"
ON_THE_GPU = {OURS, TORCH, COPY, LARGE_COPY}  # what is timed by events


def plan(settings: Settings) -> list[Job]:
    """Every size with every rule and number of streams, and with the normalised elu layer."""
    jobs = []
    for H, d in SIZES[:1] if settings.quick else SIZES:
        for rule, phi in (*((rule, "identity") for rule in step.RULES), ("linear", "elu")):
            layer = cache(partial(make_step_layer, rule, phi, H, d))  # one for all numbers of streams: compiled once
            for B in STREAMS[:1] if settings.quick else STREAMS:
                case = {"rule": rule, "map": phi, "B": B, "H": H, "d": d}
                jobs.append(Job(step.title(case), partial(token, settings, case, layer)))
    return jobs


def make_step_layer(rule: str, phi: str, H: int, d: int) -> tuple[LinearAttention, str | None]:
    """The layer, and what it gets wrong, or None."""
    if phi != "identity":
        return make_layer(rule, d, H, backend="cuda"), None
    problem = Problem(rule, H, d)
    attn = problem.layer(backend="cuda")
    return attn, disagreement(on_gpu(problem, attn), problem)


def on_gpu(problem: Problem, attn: LinearAttention) -> Peer:
    """Ours, with all arrays on the GPU."""
    x = dict(problem.arrays)
    state: Any = attn.init_state(problem.B)
    state.S = x.pop("S")
    there, out = device.upload(x), device.empty(x["v"].shape)
    return Peer(partial(attn.step, **there, state=state, out=out), lambda: (out.copy_to_host(), state.S.copy_to_host()))


@cache
def torch_is_out(rule: str, H: int, d: int) -> str | None:
    """Why torch is not timed, or None: it has no GPU, or its answers for one stream are wrong."""
    if not device.has_torch():
        return "left out, it can't use the GPU"
    problem = Problem(rule, H, d)
    wrong = disagreement(torch_peer(problem, "cuda"), problem)
    return f"NOT TIMED, {wrong}" if wrong else None


def token(settings: Settings, case: dict[str, Any], layer: Callable[[], tuple[LinearAttention, str | None]]) -> Group:
    """One token of each stream: on the GPU, by replay and by call; and copies on the GPU."""
    group, B = Group(STEP, step.title(case), case), case["B"]
    timer = device.Timer()

    def build() -> Built:
        attn, wrong = layer()
        if wrong:
            return {}, {OURS: f"NOT TIMED, {wrong}"}
        x, state = device.upload(layer_inputs(attn, (B,))), attn.init_state(B)
        work = partial(_step, attn, x, state, device.empty(tuple(x["v"].shape)))
        many, one = timer.capture(work, LAUNCHES), timer.capture(work)
        copies, call = timer.capture(device.copy(state.S.nbytes), LAUNCHES), partial(work, timer.stream)
        found = {
            OURS: by_events(timer, many, LAUNCHES),
            REPLAY: from_python(timer, one),
            REPLAYS: from_python(timer, one, LAUNCHES),
            CALL: from_python(timer, call),
            CALLS: from_python(timer, call, LAUNCHES),
            COPY: by_events(timer, copies, LAUNCHES),
            LARGE_COPY: by_events(timer, partial(device.copy(COPIED), timer.stream)),
        }
        if "torch" not in settings.peers or case["map"] != "identity":
            return found, {}
        problem = Problem(case["rule"], case["H"], case["d"], B, empty=True)
        reason = torch_is_out(problem.rule, problem.H, problem.d)
        if reason:
            return found, {TORCH: reason}
        return {**found, TORCH: device.torch_step(torch_peer(problem, "cuda").step)}, {}

    run(group, settings, build, ON_THE_GPU)
    ours, large = group.row(OURS), group.row(LARGE_COPY)
    if ours and ours.time and large and large.time:
        attn, _ = layer()
        possible = 2 * COPIED / large.time["min"] * 1e-3
        ours.values |= share(ours.time["min"], step_bytes(attn, layer_inputs(attn, (B,))), possible)
        ours.values["state bytes"] = attn.init_state(B).nbytes
    group.add_ratios()
    return group


def _step(attn: LinearAttention, x: dict[str, Any], state: Any, out: Any, stream: Any) -> None:
    attn.step(**x, state=state, out=out, stream=stream)


def _prefill(attn: LinearAttention, x: dict[str, Any], state: Any, out: Any, stream: Any) -> None:
    attn.prefill(**x, state=state, out=out, stream=stream)


def run(group: Group, settings: Settings, build: Callable[[], Built], by_events: Container[str]) -> None:
    """Measure; what needs more memory than there is gets the reason in place of times."""
    try:
        with gpu.guard():
            measure(group, settings, build, controlled=False)
    except DeviceError as error:
        if gpu.OUT_OF_MEMORY not in str(error):
            raise
        group.rows.append(Row(OURS, note=f"left out, {gpu.OUT_OF_MEMORY}"))
    for row in group.rows:
        if row.name in by_events:
            row.clock = EVENTS


def plan_prefill(settings: Settings) -> list[Job]:
    """Every rule at every size, prompts of several lengths in turn."""
    jobs = []
    for H, d in SIZES[:1] if settings.quick else SIZES:
        for rule in prefill.RULES:
            lengths = LENGTHS[:1] if settings.quick else LENGTHS
            jobs.append(Job(f"prefill, {rule}, H = {H}, d = {d}", partial(prompt, settings, rule, H, d, lengths)))
    return jobs


def prompt(settings: Settings, rule: str, H: int, d: int, lengths: tuple[int, ...]) -> Group:
    """Per token of a prompt of one stream, by its length: on the GPU, and by a call."""
    attn, timer = make_layer(rule, d, H, backend="cuda"), device.Timer()
    case = {"rule": rule, "map": attn.layer.phi.name, "H": H, "d": d}
    group = Group(PREFILL, f"{rule}, H = {H}, d = {d}", case)

    @cache
    def tokens(T: int) -> dict[str, Any]:
        return device.upload(layer_inputs(attn, (1, T)))

    def build() -> Built:
        contestants = {}
        for T in lengths:
            x, state = tokens(T), attn.init_state()
            work = partial(_prefill, attn, x, state, device.empty(tuple(x["v"].shape)))
            contestants[f"T = {T}"] = by_events(timer, timer.capture(work), T)
            contestants[f"T = {T}, {CALL}"] = from_python(timer, partial(work, timer.stream), units=T)
        return contestants, {}

    run(group, settings, build, [f"T = {T}" for T in lengths])
    for row, T in zip(group.rows, (T for T in lengths for _ in range(2)), strict=False):
        if row.time:
            row.case["T"] = T
    return group


def tables(groups: list[Group]) -> list[Table]:
    """On the GPU and from Python, then the memory's speed, then torch."""
    own, memory_, ratios = [], [], []
    for group in groups:
        rows = {row.name: row for row in group.rows if row.time}
        if OURS not in rows:
            continue
        ours, about = rows[OURS], step.what(group)
        least = [figure((rows[name].time or {}).get("min")) for name in (OURS, REPLAYS, REPLAY, CALLS, CALL)]
        own.append([*about, *least, memory(ours.values.get("state bytes"))])
        speeds = [figure(ours.values.get(name)) for name in ("GB/s", "machine GB/s")]
        moved, part = memory(ours.values.get("bytes moved")), percent(ours.values.get("share of machine"))
        memory_.append([*about, moved, *speeds, part, times(rows[COPY].values.get(f"times {OURS}"))])
        if TORCH in rows:
            ratios.append([*about, *figures(ours.time, ["min"]), times(rows[TORCH].values.get(f"times {OURS}"))])
    texts = (
        f"µs, the least. On the GPU: between two CUDA events, {LAUNCHES} steps in one graph, divided. Replays, calls: "
        f"wall time from Python, all checks on: of a graph of one step, or of step(); {LAUNCHES} of them and then "
        "one wait for the GPU, divided, or a wait after each. φ is the identity; elu: elu(x) + 1, normalised. state: "
        "what a step reads and writes at any position.",
        f"moved: what a step must read and write; GB/s: that, in the least time on the GPU; possible: {LARGE_COPY} on "
        "the GPU, read and write counted, in the same turns; share: how much of that the step reaches, more than 100 % "
        "where the state stays in a cache. copy: how many times as long it takes to copy as much as the state, "
        f"{LAUNCHES} copies in one graph.",
        f"How many times as long as {OURS} torch takes on the GPU for the same token, least times, in place, "
        f"{LAUNCHES} steps in one graph. Below 1 it is faster than {OURS}.",
    )
    header = ["update rule", "streams", "heads × width"]
    found = [
        Table(
            "A token on the GPU",
            texts[0],
            [*header, "on the GPU", "replays", "a replay, waited for", "calls", "a call, waited for", "state"],
            own,
        ),
        Table(
            "Beside the speed of the GPU's memory",
            texts[1],
            [*header, "moved", "GB/s", "possible", "share", "copy"],
            memory_,
        ),
    ]
    if ratios:
        found.append(Table("The same token by torch", texts[2], [*header, f"{OURS}, µs", TORCH], ratios))
    return found


def prefill_tables(groups: list[Group]) -> list[Table]:
    """A row for each layer, two columns for each length."""
    lengths = sorted({row.case["T"] for group in groups for row in group.rows if row.time})
    rows: list[list[Cell]] = []
    for group in groups:
        by_name = {row.name: row.time for row in group.rows if row.time}
        names = [name for T in lengths for name in (f"T = {T}", f"T = {T}, {CALL}")]
        rows.append(
            [
                word(layer_name(group.case)),
                count(group.case["H"]),
                count(group.case["d"]),
                *(figure((by_name.get(name) or {}).get("min")) for name in names),
            ]
        )
    heads = [title for T in lengths for title in (f"T = {T:,}", "a call")]
    text = (
        "µs for each token of a prompt of T tokens of one stream, the least: on the GPU between two CUDA events, and "
        "by a call of prefill() from Python that waits for the GPU. φ is the identity; elu: elu(x) + 1, normalised."
    )
    return [Table("A prompt on the GPU", text, ["update rule", "heads", "width", *heads], rows)]
