"""softmax_error and `linattn-edge compare` against a plain float64 recomputation."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge import cli, compare, terminal
from linattn_edge.errors import NotFiniteError, ShapeError

pytestmark = pytest.mark.nojit


def plain_errors(similarity, q, k, v):
    """Relative errors [T, H] of weights and outputs, one pair of tokens at a time. q [T, H, K], k, v [T, N, .]."""
    (T, H, K), N = q.shape, k.shape[1]
    weights, outputs = np.zeros((T, H)), np.zeros((T, H))
    for h in range(H):
        n = h * N // H
        for t in range(T):
            logits = np.array([math.fsum(q[t, h] * k[s, n]) / math.sqrt(K) for s in range(t + 1)])
            exact = np.exp(logits - logits.max())
            exact /= exact.sum()
            ours = np.array([similarity(q[t, h], k[s, n], t, s) for s in range(t + 1)])
            ours = ours / ours.sum()
            y = sum(a * v[s, n] for s, a in enumerate(exact))
            ours_y = sum(a * v[s, n] for s, a in enumerate(ours))
            weights[t, h] = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
            outputs[t, h] = np.linalg.norm(ours_y - y) / np.linalg.norm(y)
    return weights, outputs


SIMILARITIES = {
    "elu": lambda q, k, t, s: np.where(q >= 0, q + 1, np.exp(q)) @ np.where(k >= 0, k + 1, np.exp(k)),
    "taylor": lambda q, k, t, s: sum((q @ k / math.sqrt(len(q))) ** n / math.factorial(n) for n in range(3)),
    "cosformer": lambda q, k, t, s: np.maximum(q, 0) @ np.maximum(k, 0) * math.cos(math.pi / 2 * (t - s) / 12),
}
MAPS = {"elu": la.Elu(), "taylor": la.Taylor(), "cosformer": la.CosFormer(max_len=12)}


@pytest.mark.parametrize("name", SIMILARITIES)
@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_softmax_error_is_the_plain_one(name, block, monkeypatch):
    monkeypatch.setattr("linattn_edge.approximation._BLOCK", block)  # rows of a block: 1, a few, all
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((12, 4, 5)), rng.standard_normal((12, 2, 5)), rng.standard_normal((12, 2, 3))
    q, k = (np.abs(x) if name == "cosformer" else x for x in (q, k))
    found = la.softmax_error(MAPS[name], q[None], k[None], v[None])
    weights, outputs = plain_errors(SIMILARITIES[name], q, k, v)
    np.testing.assert_allclose(found.weights[0], weights, rtol=1e-9)
    np.testing.assert_allclose(found.outputs[0], outputs, rtol=1e-9)
    assert found.head_weights.shape == found.head_outputs.shape == (4,)


def test_the_error_over_a_head_sums_squares_first():
    q, k, v = np.random.default_rng(2).standard_normal((3, 2, 7, 1, 4))
    found = la.softmax_error("elu", q, k, v)
    ours = la.linear_attention(q, k, v, backend="reference", dtype="float64")[0]
    exact = la.SoftmaxAttention(1, 4)
    y = exact.prefill(q, k, v, exact.init_state(2))
    expected = np.linalg.norm((ours - y).ravel()) / np.linalg.norm(y.ravel())
    np.testing.assert_allclose(found.head_outputs, expected, rtol=1e-5)


def test_a_map_that_is_softmax_has_no_error():
    """κ = exp(xy) in one dimension is reached by Taylor of a high order."""
    q, k, v = np.random.default_rng(3).standard_normal((3, 1, 20, 1, 1))
    found = la.softmax_error(la.Taylor(order=40), q, k, v)
    assert found.weights.max() < 1e-10
    assert found.outputs.max() < 1e-10
    assert la.softmax_error(la.Taylor(order=2), q, k, v).weights.max() > 1e-3


def test_one_token_has_no_error_and_none_gives_nothing():
    x = np.ones((2, 1, 3, 4))
    assert la.softmax_error("elu", x, x, x).weights.max() < 1e-15
    none = la.softmax_error("elu", x[:, :0], x[:, :0], x[:, :0])
    assert none.weights.shape == (2, 0, 3)
    assert (none.head_outputs == 0).all()


def test_softmax_error_refuses_what_does_not_fit():
    x = np.ones((1, 3, 2, 4))
    with pytest.raises(ShapeError, match=r"q: expected shape \[B, T, heads, width\]"):
        la.softmax_error("elu", x[0], x, x)
    with pytest.raises(ShapeError, match="k: expected a number of heads that divides q's 2, got 3"):
        la.softmax_error("elu", x, np.ones((1, 3, 3, 4)), x)
    with pytest.raises(ShapeError, match="v: "):
        la.softmax_error("elu", x, x, x[:, :2])
    with pytest.raises(NotFiniteError, match="k"):
        la.softmax_error("elu", x, np.where(x > 0, np.nan, x), x)
    with pytest.raises(ValueError, match="max_len = 2"):
        la.softmax_error(la.CosFormer(max_len=2), x, x, x)


# the command


@pytest.fixture(scope="module")
def result():
    tokens = compare.gaussian(24, H=2, K=5)
    return tokens, compare.compare(tokens, [la.Elu(), la.Taylor(), la.Polynomial(degree=4)], [1, 6, 24])


def test_figures_are_those_of_a_plain_recomputation(result):
    tokens, found = result
    assert [row.map for row in found.rows] == ["elu", "taylor", "polynomial:degree=4"]
    for row in found.rows[:2]:
        _, outputs = plain_errors(
            SIMILARITIES[row.map], *(x.astype(np.float64) for x in (tokens.q, tokens.k, tokens.v))
        )
        for length in (1, 6, 24):
            part = outputs[length // 2 : length]
            assert row.outputs_mean[length] == pytest.approx(part.mean(), rel=1e-9, abs=1e-12)
            assert row.outputs_p99[length] == pytest.approx(np.quantile(part, 0.99), rel=1e-9, abs=1e-12)
    elu, taylor = found.rows[:2]
    assert (5, math.comb(7, 2)) == (elu.F, taylor.F)
    assert elu.state_bytes == 4 * 2 * 5 * (5 + 1) + 8  # S, z, position
    assert found.softmax.cache_bytes == {1: 80, 6: 480, 24: 1920}
    assert all(us > 0 for row in found.rows for us in row.us_per_token.values())


def test_a_map_that_refuses_is_a_line_and_not_the_end():
    tokens = compare.gaussian(8, H=1, K=16)
    loud = compare.Tokens("loud", tokens.q * 100, tokens.k, tokens.v)
    found = compare.compare(loud, [la.Rff(num_features=4), la.Polynomial(degree=12), la.Elu()], [8])
    assert [bool(row.refused) for row in found.rows] == [True, True, False]
    page = compare.text(found)
    assert "rff:num_features=4: q: " in page
    assert "the limit is 65536" in page


@pytest.mark.parametrize("name", compare.SAMPLES)
def test_samples_are_the_same_in_every_run(name):
    one, two = (compare.SAMPLES[name](20, H=2, K=4) for _ in range(2))
    for x, y in ((one.q, two.q), (one.k, two.k), (one.v, two.v)):
        np.testing.assert_array_equal(x, y)
        assert x.shape == (20, 2, 4)
        assert x.dtype == np.float32


def test_the_lookup_sample_asks_for_one_earlier_token():
    tokens = compare.lookup(40, H=1, K=32)
    logits = tokens.q[:, 0] @ tokens.k[:, 0].T
    best = np.where(np.tri(40, dtype=bool), logits, -np.inf).argmax(axis=1)
    np.testing.assert_allclose(tokens.q[:, 0], 1.5 * tokens.k[best, 0], rtol=1e-6)


def test_every_default_map_runs():
    maps = compare.default_maps(K=4, T=10)
    found = compare.compare(compare.gaussian(10, H=1, K=4), maps, [10])
    assert not [row.map for row in found.rows if row.refused]
    assert len({row.map for row in found.rows}) == len(maps)


@pytest.mark.parametrize(
    ("text", "phi"),
    [
        ("elu", la.Elu()),
        ("taylor:order=3", la.Taylor(order=3)),
        ("favor:num_features=16,seed=2,orthogonal=False", la.Favor(16, seed=2, orthogonal=False)),
    ],
)
def test_maps_are_written_as_they_are_shown(text, phi):
    assert compare.parse_map(text) == phi
    assert compare.label(phi) == text


@pytest.mark.parametrize("text", ["none", "taylor:order", "taylor:order=x", "taylor:depth=3", "hedgehog", "elu:a=1"])
def test_wrong_maps_are_one_line(text, capsys):
    assert cli.main(["compare", "--tokens", "8", "--maps", text]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def run(capsys, *arguments):
    status = cli.main(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_on_files(capsys, tmp_path):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((9, 4, 6)), rng.standard_normal((9, 2, 6)), rng.standard_normal((9, 2, 5))
    np.savez(tmp_path / "qk.npz", q=q, k=k[None])
    np.save(tmp_path / "v.npy", v.astype(np.float16))
    names = ["--q", tmp_path / "qk.npz", "--k", tmp_path / "qk.npz", "--v", tmp_path / "v.npy"]
    status, out, err = run(capsys, *names, "--maps", "elu", "--lengths", "9", "3", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["tokens"], found["H"], found["N"], found["K"], found["V"]) == ("qk.npz v.npy", 4, 2, 6, 5)
    assert found["lengths"] == [3, 9]
    _, outputs = plain_errors(SIMILARITIES["elu"], *(x.astype(np.float32).astype(float) for x in (q, k)), v.astype("e"))
    assert found["rows"][0]["outputs_mean"]["9"] == pytest.approx(outputs[4:9].mean(), rel=1e-6)

    status, out, err = run(capsys, *names, "--maps", "elu", "relu")
    assert (status, err) == (0, "")
    assert re.search(r"^elu +6 ", out, re.MULTILINE)
    assert "softmax, 9 tokens" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--q", "x.npy"], "give all of --q, --k and --v"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "8", "--lengths", "9"], "lengths: expected 1 to the T = 8"),
        (["--plot", "x.gif"], "--plot: expected a file that ends in"),
        (["--plot", "none/x.png"], "--plot: none/x.png can't be written to"),
        (["--maps", "hedgehog"], "only a program can give"),
        (["--maps", "cosformer"], "cosformer:max_len=1024"),
        (["--maps", "taylor:foo=1"], "taylor has no 'foo'; it has order"),
        (["--maps", "taylor:order=1,order=2"], "each key once"),
        (["--q", "nan.npy", "--k", "nan.npy", "--v", "nan.npy"], "--q nan.npy: it holds NaN"),
        (["--q", "huge.npy", "--k", "huge.npy", "--v", "huge.npy"], "beyond float32"),
        (["--q", "none.npy", "--k", "none.npy", "--v", "none.npy"], "--q none.npy"),
        (["--q", "no.npy", "--k", "no.npy", "--v", "no.npy"], "no.npy"),
        (["--q", "text.npy", "--k", "text.npy", "--v", "text.npy"], "--q text.npy"),
        (
            ["--q", "flat.npy", "--k", "flat.npy", "--v", "flat.npy"],
            "--q flat.npy: expected an array [T,",
        ),
        (["--q", "named.npz", "--k", "named.npz", "--v", "named.npz"], "it has no array 'k', only q"),
        (["--q", "objects.npy", "--k", "objects.npy", "--v", "objects.npy"], "--q objects.npy"),
        (["--q", "long.npy", "--k", "short.npy", "--v", "short.npy"], "none of them 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("not an array")
    np.save("flat.npy", np.ones(4))
    np.save("nan.npy", np.full((2, 1, 2), np.nan))
    np.save("huge.npy", np.full((2, 1, 2), 1e300))
    np.save("none.npy", np.ones((0, 2, 1, 2)))
    np.save("objects.npy", np.array([{}], dtype=object))
    np.save("long.npy", np.ones((3, 1, 2)))
    np.save("short.npy", np.ones((2, 1, 2)))
    np.savez("named.npz", q=np.ones((2, 1, 2)))
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plots_are_written_whole(suffix, result, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"plot.{suffix}"
    compare.plot(result[1], target)
    assert target.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    assert list(tmp_path.iterdir()) == [target]


def test_a_plot_that_fails_leaves_nothing(result, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(OSError, match="no such folder"):
        compare.plot(result[1], tmp_path / "no such folder" / "plot.png")
    assert list(tmp_path.iterdir()) == []


def test_when_no_map_could_be_compared(capsys):
    status, out, err = run(capsys, "--tokens", "8", "--maps", "polynomial:degree=30")
    assert status == 1
    assert "the limit is 65536" in out
    assert err == "linattn-edge: error: no map could be compared\n"


def test_products_beyond_float64_are_refused():
    x = np.full((1, 2, 1, 2), 1e200)
    with pytest.raises(ValueError, match="exceed the range of float64"):
        la.softmax_error("identity", x, x, x)


def test_progress_is_for_terminals(capsys, monkeypatch):
    assert list(terminal.progress([1, 2], "working")) == [1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert list(terminal.progress([1, 2], "working")) == [1, 2]
    assert "working 1/2" in capsys.readouterr().err


# the worked example of CONTRIBUTING.md


def test_the_map_of_the_worked_example_runs():
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(FeatureMap)" in block]
    from linattn_edge.kernels.maths import exp

    names = {"np": np, "FeatureMap": la.FeatureMap, "Array": np.ndarray, "exp": exp}
    exec(code, names)
    x = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 4)) * 3
    attn = la.LinearAttention(2, 4, feature_map=names["Softplus"]())
    y = attn.prefill(*x, attn.init_state(1, "float64"))
    np.testing.assert_allclose(attn.layer.phi(x[0]), np.log1p(np.exp(x[0])))
    expected = la.LinearAttention(2, 4, feature_map=attn.layer.phi, backend="reference")
    np.testing.assert_allclose(y, expected.prefill(*x, expected.init_state(1, "float64")), rtol=1e-12)
