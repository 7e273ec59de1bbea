"""`linattn-edge compare`: what each feature map costs, and how far from softmax it is, on one set of q, k and v."""

import argparse
import inspect
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_edge import plots
from linattn_edge.approximation import softmax_error
from linattn_edge.arrays import real_array
from linattn_edge.attention import LinearAttention
from linattn_edge.errors import ShapeError
from linattn_edge.features import (
    MAPS,
    T2R,
    CosFormer,
    Dpfp,
    ElementwiseProduct,
    Favor,
    FeatureMap,
    Hedgehog,
    Polynomial,
    Rff,
    Taylor,
    feature_map,
)
from linattn_edge.softmax import SoftmaxAttention
from linattn_edge.terminal import progress, size, table

Array = NDArray[Any]

TIMED_STEPS = 150


@dataclass(frozen=True)
class Tokens:
    """One stream to compare on: q [T, H, K], k [T, N, K], v [T, N, V]."""

    name: str
    q: Array
    k: Array
    v: Array

    def __post_init__(self) -> None:
        (T, H, K), N = self.q.shape, self.k.shape[1]
        good = self.k.shape == (T, N, K) and self.v.shape[:2] == (T, N)
        if not good or 0 in (T, H, K, N, self.v.shape[2]) or H % N:
            shapes = ", ".join(f"{name} {list(getattr(self, name).shape)}" for name in "qkv")
            raise ShapeError(
                f"expected q [T, H, K], k [T, N, K] and v [T, N, V], none of them 0, N a divisor of H; got {shapes}"
            )


@dataclass(frozen=True)
class Row:
    """A map: its cost, and by context length (tokens) its time and errors against softmax over heads and positions.

    Errors at a context of L tokens are those of the queries at positions from L/2 to L.
    """

    map: str
    F: int
    state_bytes: int
    us_per_token: dict[int, float] = field(default_factory=dict)
    outputs_mean: dict[int, float] = field(default_factory=dict)
    outputs_p99: dict[int, float] = field(default_factory=dict)
    weights_mean: dict[int, float] = field(default_factory=dict)
    weights_p99: dict[int, float] = field(default_factory=dict)
    refused: str = ""  # why there are no figures


@dataclass(frozen=True)
class Softmax:
    """The exact thing, by context length: bytes of its growing cache, time of a token."""

    cache_bytes: dict[int, int]
    us_per_token: dict[int, float]


@dataclass(frozen=True)
class Comparison:
    """All of it, for one set of tokens."""

    tokens: str
    H: int
    N: int
    K: int
    V: int
    lengths: list[int]
    rows: list[Row]
    softmax: Softmax


def gaussian(T: int, H: int = 4, K: int = 64, seed: int = 0) -> Tokens:
    """q, k and v of independent normal numbers: every key a little like every query. Attention is nearly flat."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, T, H, K), dtype=np.float32)
    return Tokens("gaussian", q, k, v)


def local(T: int, H: int = 4, K: int = 64, seed: int = 0) -> Tokens:
    """Keys that drift slowly, and queries like the keys beside them: attention to the neighbourhood."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((T, H, K), dtype=np.float32)
    k = np.empty_like(noise)
    k[0] = noise[0]
    for t in range(1, T):
        k[t] = 0.95 * k[t - 1] + np.sqrt(1 - 0.95**2) * noise[t]
    q = k + 0.5 * rng.standard_normal((T, H, K), dtype=np.float32)
    return Tokens("local", q, k, rng.standard_normal((T, H, K), dtype=np.float32))


def lookup(T: int, H: int = 4, K: int = 64, seed: int = 0) -> Tokens:
    """Each query is a louder copy of one earlier key: attention picks one token out, the hardest case for small F."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, T, H, K), dtype=np.float32)
    wanted = (rng.random((T, H)) * (np.arange(T)[:, None] + 1)).astype(int)
    q = 1.5 * np.take_along_axis(k, wanted[:, :, None], axis=0)
    return Tokens("lookup", q.astype(np.float32), k, v)


SAMPLES = {make.__name__: make for make in (gaussian, local, lookup)}


def default_maps(K: int, T: int) -> list[FeatureMap]:
    """One or two of each kind. Hedgehog has W = 1 here, as it has before training."""
    return [
        *(feature_map(name) for name in ("elu", "relu", "relu2")),
        Dpfp(),
        CosFormer(max_len=max(T, 1)),
        Hedgehog(np.eye(K)),
        Polynomial(degree=2),
        Taylor(order=1),
        Taylor(order=2),
        Favor(num_features=64),
        Favor(num_features=256),
        Rff(num_features=128),
    ]


def parse_map(text: str) -> FeatureMap:
    """A map from the command line: `elu`, `taylor:order=3`, `favor:num_features=256,seed=1`."""
    name, _, rest = text.partition(":")
    parameters: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key.strip() in parameters:
            raise ValueError(f"maps: expected name:key=value,… with each key once, got {text!r}")
        try:
            parameters[key.strip()] = json.loads(value.strip().lower() if value.strip() in ("True", "False") else value)
        except json.JSONDecodeError:
            parameters[key.strip()] = value
    if name not in MAPS:
        raise ValueError(f"maps: expected one of {', '.join(MAPS)}, got {name!r}")
    if issubclass(MAPS[name], Hedgehog | T2R | ElementwiseProduct):
        raise ValueError(f"maps: {name} has weights, which only a program can give; see la.softmax_error")
    known = MAPS[name].parameters
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(f"maps: {name} has no {parameter!r}; it has {', '.join(known) or 'no parameters'}")
    if name == "cosformer" and not parameters:
        raise ValueError("maps: cosformer needs max_len, as in cosformer:max_len=1024")
    return feature_map(name, **parameters)


def compare(tokens: Tokens, maps: list[FeatureMap], lengths: list[int]) -> Comparison:
    """Measure every map, and softmax, at these context lengths (each at most T)."""
    (T, H, K), (N, V) = tokens.q.shape, tokens.v.shape[1:]
    for length in lengths:
        if not 1 <= length <= T:
            raise ValueError(f"lengths: expected 1 to the T = {T} tokens there are, got {length}")
    rows = [_row(tokens, phi, lengths) for phi in progress(maps, "comparing")]
    attn = SoftmaxAttention(H, K, V, num_kv_heads=N if N < H else None)
    sizes, times = {}, {}
    for length in lengths:
        state = attn.init_state(1)
        attn.write(tokens.k[None, :length], tokens.v[None, :length], state)
        sizes[length] = 4 * length * N * (K + V)
        times[length] = _us_per_token(attn, state, tokens)
    return Comparison(tokens.name, H, N, K, V, lengths, rows, Softmax(sizes, times))


def _row(tokens: Tokens, phi: FeatureMap, lengths: list[int]) -> Row:
    (_, H, K), (N, V) = tokens.q.shape, tokens.v.shape[1:]
    try:
        F = phi.checked_dim(K)
        phi.check_norms("q", tokens.q, "float32")
        phi.check_norms("k", tokens.k, "float32")
        attn = LinearAttention(
            H,
            K,
            V,
            num_kv_heads=N if N < H else None,
            feature_map=phi,
            scale=None,
            normalize=True,
            update_rule="linear",
        )
        row = Row(label(phi), F, attn.init_state(1).nbytes)
        longest = max(lengths)
        error = softmax_error(phi, *(x[None, :longest] for x in (tokens.q, tokens.k, tokens.v)))
        for length in lengths:
            state = attn.init_state(1)
            attn.write(tokens.k[None, : length - 1], tokens.v[None, : length - 1], state)
            row.us_per_token[length] = _us_per_token(attn, state, tokens)
            for name in ("outputs", "weights"):
                values = getattr(error, name)[:, length // 2 : length]
                getattr(row, f"{name}_mean")[length] = float(values.mean())
                getattr(row, f"{name}_p99")[length] = float(np.quantile(values, 0.99))
        return row
    except ValueError as refusal:  # too many features, or vectors that φ does not take
        return Row(label(phi), 0, 0, refused=str(refusal))


def _us_per_token(attn: LinearAttention | SoftmaxAttention, state: Any, tokens: Tokens) -> float:
    """The least time of a step, each from the same state; its inputs are the last token again."""
    from linattn_edge.bench.turns import alternate, timed

    q, k, v = (np.ascontiguousarray(x[None, -1], np.float32) for x in (tokens.q, tokens.k, tokens.v))
    out = np.empty((1, q.shape[1], v.shape[2]), np.float32)
    now = state.copy()

    def again() -> None:
        nonlocal now
        if isinstance(attn, SoftmaxAttention) or attn.layer.phi.horizon is not None:
            now = state.copy()  # neither the cache nor the position may run on

    step = timed(lambda: attn.step(q, k, v, now, out=out), before=again)
    return alternate({"step": step}, TIMED_STEPS, turn=0, budget=1.0)["step"]["min"]


def text(result: Comparison) -> str:
    """The comparison as tables for a terminal."""
    columns = [f"{kind} @{length}" for length in result.lengths for kind in ("mean", "p99")]
    last = result.lengths[-1]
    rows, refused = [], []
    for row in result.rows:
        if row.refused:
            refused.append(f"{row.map}: {row.refused}")
            continue
        errors = [f"{part[length]:.3g}" for length in result.lengths for part in (row.outputs_mean, row.outputs_p99)]
        rows.append([row.map, str(row.F), size(row.state_bytes), f"{row.us_per_token[last]:.1f}", *errors])
    exact = [
        [
            f"softmax, {length} tokens",
            "-",
            size(result.softmax.cache_bytes[length]),
            f"{us:.1f}",
            *["0"] * len(columns),
        ]
        for length, us in result.softmax.us_per_token.items()
    ]
    lines = [
        f"{result.tokens}: {result.H} query heads, {result.N} key heads, K = {result.K}, V = {result.V}, float32 state",
        "relative error of the outputs against exact causal softmax, over heads and the later half of each context",
        "",
        table(["map", "F", "state", "µs/token", *columns], [*rows, *exact]),
    ]
    return "\n".join([*lines, *(["", *refused] if refused else [])])


def plot(result: Comparison, path: Path) -> None:
    """Error against state bytes, and time of a token against context length."""
    figure = plots.new_figure((12, 5))
    from matplotlib.ticker import LogLocator, ScalarFormatter

    last = result.lengths[-1]
    left, right = figure.subplots(1, 2)
    cache = result.softmax.cache_bytes[last]
    left.axvline(cache, color="black", linestyle=":", linewidth=1.2)
    name = f"softmax cache at {last} tokens "
    left.annotate(
        name, (cache, 0.98), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top", fontsize=8
    )
    for number, row in enumerate(row for row in result.rows if not row.refused):
        style: dict[str, Any] = {"marker": "osD^vP*Xh<>p"[number % 12], "color": f"C{number % 10}"}
        left.plot(row.state_bytes, max(row.outputs_mean[last], 1e-9), markersize=8, linestyle="none", **style)
        times = [row.us_per_token[length] for length in result.lengths]
        right.plot(result.lengths, times, label=row.map, linewidth=1.2, **style)
    times = [result.softmax.us_per_token[length] for length in result.lengths]
    right.plot(result.lengths, times, "k:", marker="o", linewidth=2.5, label="softmax")
    left.set(
        xscale="log", yscale="log", xlabel="state, bytes", ylabel=f"mean relative error of the outputs, {last} tokens"
    )
    right.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="µs per token")
    right.set_xticks(result.lengths, [str(length) for length in result.lengths])
    right.minorticks_off()
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter(ScalarFormatter())
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    figure.suptitle(f"{result.tokens}: {result.H} heads, K = {result.K}, V = {result.V}")
    plots.save(figure, path)


def label(phi: FeatureMap) -> str:
    """A map as it is written on the command line: its name, and what is not as by default."""
    defaults = {name: p.default for name, p in inspect.signature(type(phi)).parameters.items()}
    own = [f"{name}={getattr(phi, name)}" for name in phi.parameters if getattr(phi, name) != defaults.get(name)]
    return f"{phi.name}:{','.join(own)}" if own else phi.name


def load_tokens(args: argparse.Namespace) -> Tokens:
    """The files that were named, or a built-in sample."""
    files = {name: getattr(args, name) for name in "qkv"}
    if not any(files.values()):
        return SAMPLES[args.sample](args.tokens)
    missing = [f"--{name}" for name, path in files.items() if not path]
    if missing:
        raise ValueError(f"give all of --q, --k and --v; {', '.join(missing)} is missing")
    loaded = {name: _load(name, Path(path)) for name, path in files.items()}
    return Tokens(" ".join(dict.fromkeys(Path(path).name for path in files.values())), **loaded)


def _load(name: str, path: Path) -> Array:
    """An array [T, heads, width] from a .npy, or from a .npz that has one of that name; of a batch the first."""
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.lib.npyio.NpzFile):
            with content:
                if name not in content:
                    raise ValueError(f"it has no array {name!r}, only {', '.join(content.files) or 'none'}")
                content = content[name]
        array = real_array(name, content)
        if array.ndim == 4 and array.shape[0] > 0:
            array = array[0]
        if array.ndim != 3:
            raise ShapeError(f"expected an array [T, heads, width] or [B, T, heads, width], got {list(array.shape)}")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise ValueError("it holds NaN, inf or numbers beyond float32")
    except OSError:
        raise
    except Exception as error:
        reason = "not an array file of NumPy" if "pickle" in str(error) else error
        raise ValueError(f"--{name} {path}: {reason}") from None
    return array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `linattn-edge compare`."""
    for name, shape in (("q", "[T, H, K]"), ("k", "[T, N, K]"), ("v", "[T, N, V]")):
        parser.add_argument(
            f"--{name}", metavar="FILE", help=f"{name} {shape}: a .npy, or a .npz with an array {name!r}"
        )
    parser.add_argument(
        "--sample", choices=SAMPLES, default="gaussian", help="built-in vectors, where no files are given"
    )
    parser.add_argument("--tokens", type=int, default=1024, metavar="T", help="tokens of the sample (default 1024)")
    parser.add_argument("--maps", nargs="+", metavar="MAP", help="such as: elu taylor:order=2 favor:num_features=256")
    parser.add_argument(
        "--lengths", nargs="+", type=int, metavar="L", help="context lengths (default: a sixteenth, a quarter, all)"
    )
    plots.add_plot_option(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.tokens < 1:
        raise ValueError(f"--tokens: expected at least 1, got {args.tokens}")
    plots.check_plot(args.plot)
    tokens = load_tokens(args)
    T, _, K = tokens.q.shape
    lengths = sorted(set(args.lengths or [max(1, T // 16), max(1, T // 4), T]))
    maps = [parse_map(name) for name in dict.fromkeys(args.maps)] if args.maps else default_maps(K, T)
    result = compare(tokens, maps, lengths)
    print(json.dumps(asdict(result), indent=2) if args.json else text(result))
    if all(row.refused for row in result.rows):
        raise ValueError("no map could be compared")
    if args.plot is not None:
        plot(result, args.plot)
