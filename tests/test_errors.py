"""What is refused: the kind of error, words that name the argument, and a state that is as it was, bit for bit."""

from functools import partial

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge.errors import DtypeError, NotFiniteError, ShapeError, StateMismatchError

pytestmark = pytest.mark.nojit

B, T, H, K, V = 2, 3, 2, 4, 5
F = K
BACKENDS = ["cpu", "reference"]


def layer(rule="linear", **options):
    return la.LinearAttention(H, K, V, update_rule=rule, **options)


def inputs(rule="linear", sequence=True, dtype=np.float32):
    """Fresh arrays that fit, by name."""
    rng = np.random.default_rng(0)
    lead = (B, T) if sequence else (B,)
    sizes = {"q": (H, K), "k": (H, K), "v": (H, V)}
    given = {name: rng.standard_normal((*lead, *s)).astype(dtype) for name, s in sizes.items()}
    if rule in ("gated", "gated_delta"):
        given["g"] = np.full((*lead, H), -0.1, dtype)
    if rule in ("delta", "gated_delta"):
        given["beta"] = np.full((*lead, H), 0.1, dtype)
    return given


def used(attn, rule="linear"):
    """A state that has seen some tokens."""
    state = attn.init_state(B)
    attn.prefill(**inputs(rule), state=state)
    return state


def bits(state):
    """All that a state says, as bytes."""
    return state.S.tobytes(), None if state.z is None else state.z.tobytes(), state.position.tobytes()


def refuse(call, error, words, state=None):
    """One line of that kind, and nothing changed."""
    before = None if state is None else bits(state)
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    if state is not None:
        assert bits(state) == before


# the layer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, "^num_heads: .*0"),
        ({"num_heads": -2}, "^num_heads: .*-2"),
        ({"num_heads": 2.0}, "^num_heads: .*2.0"),
        ({"num_heads": "2"}, "^num_heads: "),
        ({"num_heads": True}, "^num_heads: "),
        ({"key_dim": 0}, "^key_dim: "),
        ({"key_dim": None}, "^key_dim: "),
        ({"value_dim": 0}, "^value_dim: "),
        ({"value_dim": 1.5}, "^value_dim: "),
        ({"num_kv_heads": 3}, "^num_kv_heads: .*4.*3"),
        ({"num_kv_heads": 8}, "^num_kv_heads: "),
        ({"num_kv_heads": 0}, "^num_kv_heads: "),
        ({"num_value_heads": 6}, "^num_value_heads: .*4.*6"),
        ({"num_value_heads": 2}, "^num_value_heads: "),
        ({"num_kv_heads": 2, "num_value_heads": 8}, "num_kv_heads and num_value_heads"),
        ({"feature_map": "eluu"}, "^feature_map: .*eluu"),
        ({"feature_map": 3}, "^feature_map: "),
        ({"feature_map": la.Elu}, "^feature_map: "),
        ({"feature_map": ["elu"]}, "^feature_map: "),
        ({"update_rule": "lineal"}, "^update_rule: .*gated_delta.*lineal"),
        ({"update_rule": None}, "^update_rule: "),
        ({"update_rule": ["linear"]}, "^update_rule: "),
        ({"normalize": True, "update_rule": "delta"}, "^normalize: .*delta"),
        ({"normalize": True, "update_rule": "gated_delta"}, "^normalize: .*gated_delta"),
        ({"normalize": "yes"}, "^normalize: "),
        ({"normalize": 1}, "^normalize: "),
        ({"scale": 0.0, "normalize": False}, "^scale: "),
        ({"scale": np.nan, "normalize": False}, "^scale: "),
        ({"scale": np.inf, "normalize": False}, "^scale: "),
        ({"scale": "big", "normalize": False}, "^scale: "),
        ({"scale": 2.0}, "^scale: .*normalize"),  # elu and linear: normalised by default
        ({"scale": 1.0, "normalize": True}, "^scale: .*normalize"),
        ({"eps": -1e-9}, "^eps: "),
        ({"eps": np.nan}, "^eps: "),
        ({"eps": None}, "^eps: "),
        ({"eps": "small"}, "^eps: "),
        ({"eps_mode": "max"}, "^eps_mode: .*clamp.*add.*max"),
        ({"eps_mode": None}, "^eps_mode: "),
        ({"decay": [-1.0] * 4}, "^decay: .*linear"),
        ({"decay": [-1.0] * 4, "update_rule": "delta"}, "^decay: .*delta"),
        ({"decay": [-1.0] * 3, "update_rule": "gated"}, r"^decay: .*\[N\] = \[4\].*\[4, 8\].*\[3\]"),
        ({"decay": -1.0, "update_rule": "gated"}, "^decay: "),
        ({"decay": np.zeros((4, 7)), "update_rule": "gated"}, r"^decay: .*\[4, 7\]"),
        ({"decay": [np.nan] * 4, "update_rule": "gated"}, "^decay: "),
        ({"decay": [np.inf] * 4, "update_rule": "gated"}, "^decay: "),
        ({"decay": "retnet", "update_rule": "gated"}, "^decay: "),
        ({"decay": [-1j] * 4, "update_rule": "gated"}, "^decay: "),
        ({"backend": "gpu"}, "^backend: .*reference.*gpu"),
        ({"backend": None}, "^backend: "),
        ({"num_threads": 0}, "^num_threads: "),
        ({"num_threads": 1.0}, "^num_threads: "),
    ],
)
def test_layer_options(options, words):
    refuse(
        lambda: la.LinearAttention(**({"num_heads": 4, "key_dim": 8} | options)),
        (ValueError, TypeError),
        words,
    )


def test_unknown_options_are_refused():
    refuse(lambda: la.LinearAttention(2, 4, colour="red"), TypeError, "colour")


# shapes

STEP_SHAPES = [
    ("q", (B, H, K + 1), r"\[B, H, K\] = \[2, 2, 4\], got \[2, 2, 5\]"),
    ("q", (B, H + 1, K), r"\[B, H, K\] = \[2, 2, 4\], got \[2, 3, 4\]"),
    ("q", (B + 1, H, K), r"\[B, H, K\] = \[2, 2, 4\], got \[3, 2, 4\]"),
    ("q", (H, K), r"\[B, H, K\] .*got \[2, 4\]"),
    ("q", (), r"\[B, H, K\] .*got \[\]"),
    ("q", (B, T, H, K), r"\[B, H, K\] .*got \[2, 3, 2, 4\]"),
    ("k", (B, H, V), r"\[B, Hk, K\] = \[2, 2, 4\], got \[2, 2, 5\]"),
    ("k", (1, H, K), r"\[B, Hk, K\] .*got \[1, 2, 4\]"),
    ("v", (B, H, K), r"\[B, Hv, V\] = \[2, 2, 5\], got \[2, 2, 4\]"),
    ("v", (B, V, H), r"\[B, Hv, V\] .*got \[2, 5, 2\]"),
    ("g", (B, H + 1), r"\[B, N\] = \[2, 2\], got \[2, 3\]"),
    ("g", (B, H, F + 1), r"\[B, N, F\] = \[2, 2, 4\], got \[2, 2, 5\]"),
    ("g", (H,), r"\[2\]"),
    ("g", (), r"got \[\]"),
    ("g", (0, 0), r"got \[0, 0\]"),
    ("beta", (B, H + 1), r"\[B, N\] = \[2, 2\], got \[2, 3\]"),
    ("beta", (B, H, 1), r"\[B, N\] .*got \[2, 2, 1\]"),
    ("beta", (0, 0), r"got \[0, 0\]"),
    ("out", (B, H, K), r"\[B, heads, V\] = \[2, 2, 5\], got \[2, 2, 4\]"),
    ("out", (B + 1, H, V), r"\[B, heads, V\] .*got \[3, 2, 5\]"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "shape", "words"), STEP_SHAPES)
def test_step_shapes(backend, name, shape, words):
    attn = layer("gated_delta", backend=backend)
    state = used(attn, "gated_delta")
    given = inputs("gated_delta", sequence=False) | {name: np.zeros(shape, np.float32)}
    refuse(lambda: attn.step(**given, state=state), ShapeError, rf"^{name}: .*{words}", state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("q", (B, T, H, K + 1), r"\[B, T, H, K\] = \[2, T, 2, 4\], got \[2, 3, 2, 5\]"),
        ("q", (B, H, K), r"\[B, T, H, K\] .*got \[2, 2, 4\]"),
        ("k", (B, T + 1, H, K), r"\[B, T, Hk, K\] = \[2, 3, 2, 4\], got \[2, 4, 2, 4\]"),
        ("v", (B, 0, H, V), r"\[B, T, Hv, V\] .*got \[2, 0, 2, 5\]"),
        ("v", (B, T, H, V, 1), r"\[B, T, Hv, V\] .*got \[2, 3, 2, 5, 1\]"),
        ("g", (B, T, H, F - 1), r"\[B, T, N, F\] = \[2, 3, 2, 4\], got \[2, 3, 2, 3\]"),
        ("g", (B, T - 1, H), r"\[B, T, N\] = \[2, 3, 2\], got \[2, 2, 2\]"),
        ("g", (B, T), r"got \[2, 3\]"),
        ("beta", (B, T), r"\[B, T, N\] = \[2, 3, 2\], got \[2, 3\]"),
        ("beta", (B, T, H + 1), r"\[B, T, N\] .*got \[2, 3, 3\]"),
        ("out", (B, T, H, V + 1), r"\[B, T, heads, V\] = \[2, 3, 2, 5\], got \[2, 3, 2, 6\]"),
        ("lengths", (B + 1,), r"\[B\] = \[2\], got \[3\]"),
        ("lengths", (B, 1), r"\[B\] = \[2\], got \[2, 1\]"),
        ("lengths", (), r"\[B\] = \[2\], got \[\]"),
    ],
)
def test_prefill_shapes(backend, name, shape, words):
    attn = layer("gated_delta", backend=backend)
    state = used(attn, "gated_delta")
    value = np.zeros(shape, int if name == "lengths" else np.float32)
    given = inputs("gated_delta") | {name: value}
    refuse(lambda: attn.prefill(**given, state=state), ShapeError, rf"^{name}: .*{words}", state)


@pytest.mark.parametrize(
    ("options", "name", "shape", "words"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, "k", (1, 4, 4), r"\[B, Hk, K\] = \[1, 2, 4\], got \[1, 4, 4\]"),
        ({"num_heads": 4, "num_kv_heads": 2}, "v", (1, 4, 4), r"\[B, Hv, V\] = \[1, 2, 4\], got \[1, 4, 4\]"),
        (
            {"num_heads": 2, "num_value_heads": 4},
            "q",
            (1, 4, 4),
            r"\[B, H, K\] = \[1, 2, 4\], got \[1, 4, 4\]",
        ),
        (
            {"num_heads": 2, "num_value_heads": 4},
            "v",
            (1, 2, 4),
            r"\[B, Hv, V\] = \[1, 4, 4\], got \[1, 2, 4\]",
        ),
        ({"num_heads": 2, "num_value_heads": 4}, "out", (1, 2, 4), r"\[B, heads, V\] = \[1, 4, 4\]"),
    ],
)
def test_shapes_of_grouped_heads(options, name, shape, words):
    attn = la.LinearAttention(key_dim=4, **options)
    state = attn.init_state(1)
    a = attn.layer
    given = {"q": np.ones((1, a.H, 4)), "k": np.ones((1, a.HK, 4)), "v": np.ones((1, a.N, 4))}
    given[name] = np.zeros(shape)
    refuse(lambda: attn.step(**given, state=state), ShapeError, rf"^{name}: .*{words}", state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_and_read_shapes(backend):
    attn = layer(backend=backend)
    state = used(attn)
    k, v = np.zeros((B, T, H, K)), np.zeros((B, T, H, V))
    for kk, vv, words in [
        (k[..., 1:], v, r"^k: .*\[B, T, Hk, K\]"),
        (k, v[:, 1:], r"^v: .*\[B, T, Hv, V\]"),
        (k[:, 0], v, r"^v: .*\[B, Hv, V\]"),
        (k, v[:, 0], r"^v: .*\[B, T, Hv, V\]"),
        (k[0, 0], v[0, 0], r"^k: .*got \[2, 4\]"),
        (k[:, 0, 1:], v[:, 0], r"^k: .*\[B, Hk, K\]"),
    ]:
        refuse(lambda kk=kk, vv=vv: attn.write(kk, vv, state), ShapeError, words, state)
    for q, words in [(k[1:], "^q: "), (k[:, 0, 1:], r"^q: .*\[B, H, K\]"), (k[0, 0], "^q: .*got")]:
        refuse(lambda q=q: attn.read(q, state), ShapeError, words, state)
    refuse(lambda: attn.read(k, state, out=np.zeros((B, H, V))), ShapeError, "^out: ", state)


# which arguments a rule takes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["step", "prefill", "write"])
@pytest.mark.parametrize(
    ("rule", "missing", "extra"),
    [
        ("linear", (), ("g", "beta")),
        ("gated", ("g",), ("beta",)),
        ("delta", ("beta",), ("g",)),
        ("gated_delta", ("g", "beta"), ()),
    ],
)
def test_gates_that_are_missing_or_too_many(backend, call, rule, missing, extra):
    attn = layer(rule, backend=backend)
    state = used(attn, rule)
    given = inputs(rule, sequence=call != "step")
    if call == "write":
        del given["q"]
    everything = inputs("gated_delta", sequence=call != "step")
    run = getattr(attn, call)
    for name in missing:
        less = {n: a for n, a in given.items() if n != name}
        refuse(lambda less=less: run(**less, state=state), ValueError, rf"^{name}: .*{rule}", state)
    for name in extra:
        more = given | {name: everything[name]}
        refuse(lambda more=more: run(**more, state=state), ValueError, rf"^{name}: .*{rule}", state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_g_with_one_channel_is_g_per_head(backend):
    attn = layer("gated", backend=backend)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs("gated", sequence=sequence)
        a, b = attn.init_state(B), attn.init_state(B)
        for _ in range(2):
            y = call(**given, state=a)
            np.testing.assert_array_equal(call(**given | {"g": given["g"][..., None]}, state=b), y)
        assert bits(a) == bits(b)


def test_both_a_constant_decay_and_g():
    attn = layer("gated", decay=[-1, -2])
    state = attn.init_state(B)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs("gated", sequence=sequence)
        refuse(lambda call=call, given=given: call(**given, state=state), ValueError, "^g: .*constant", state)


# dtypes and kinds of things


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.astype(complex),
        lambda a: a.astype(bool),
        lambda a: a.astype(str),
        lambda a: a.astype(object),
        lambda a: "text",
        lambda a: [[1.0], [1.0, 2.0]],
    ],
    ids=["complex", "bool", "str", "object", "text", "ragged"],
)
def test_what_is_no_array_of_real_numbers(backend, name, make):
    attn = layer("gated_delta", backend=backend)
    state = used(attn, "gated_delta")
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs("gated_delta", sequence=sequence)
        given[name] = make(given[name])
        refuse(lambda call=call, given=given: call(**given, state=state), DtypeError, f"^{name}: ", state)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_none_is_no_array(name):
    attn = layer()
    state = used(attn)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs(sequence=sequence) | {name: None}
        refuse(
            lambda call=call, given=given: call(**given, state=state),
            (TypeError, ValueError),
            f"^{name}: ",
            state,
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        ([1, T + 1], ValueError),
        ([-1, 1], ValueError),
        ([1.0, 2.0], DtypeError),
        ([True, False], DtypeError),
        (2, ShapeError),
        (["1", "2"], DtypeError),
        ([2**62, 0], ValueError),
    ],
)
def test_lengths(backend, lengths, error):
    attn = layer(backend=backend)
    state = used(attn)
    refuse(lambda: attn.prefill(**inputs(), state=state, lengths=lengths), error, "^lengths: ", state)
    given = inputs()
    del given["q"]
    refuse(lambda: attn.write(**given, state=state, lengths=lengths), error, "^lengths: ", state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[2, 0], [-1, 0], [1, 1, 1], np.array([5, 0]), np.array([1]), [1.0, 1.0]])
def test_lengths_of_a_write_of_one_token(backend, lengths):
    """`write` takes a step too; there a length is 0 or 1."""
    attn = layer(backend=backend)
    state = used(attn)
    given = inputs(sequence=False)
    del given["q"]
    refuse(
        lambda: attn.write(**given, state=state, lengths=lengths),
        (TypeError, ValueError),
        "^lengths: ",
        state,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("active", "error"),
    [
        ([1, 0], DtypeError),
        ([1.0, 0.0], DtypeError),
        ([True], ShapeError),
        ([[True, False]], ShapeError),
        (True, ShapeError),
        ("yes", DtypeError),
    ],
)
def test_active(backend, active, error):
    attn = layer(backend=backend)
    state = used(attn)
    given = inputs(sequence=False)
    refuse(lambda: attn.step(**given, state=state, active=active), error, "^active: ", state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros((B, H, V)), DtypeError),
        (np.zeros((B, H, V), np.float16), DtypeError),
        (np.zeros((B, H, V), int), DtypeError),
        (np.zeros((B, H, V)).tolist(), DtypeError),
        (np.zeros((H, B, V), np.float32).transpose(1, 0, 2), ValueError),
        (np.zeros((B, H, 2 * V), np.float32)[..., ::2], ValueError),
        (np.frombuffer(bytes(4 * B * H * V), np.float32).reshape(B, H, V), ValueError),  # read-only
    ],
    ids=["float64", "float16", "int", "list", "transposed", "strided", "read-only"],
)
def test_out(backend, out, error):
    attn = layer(backend=backend)
    state = used(attn)
    given = inputs(sequence=False)
    refuse(lambda: attn.step(**given, state=state, out=out), error, "^out: ", state)
    refuse(lambda: attn.read(given["q"], state, out=out), error, "^out: ", state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_out_may_not_overlap_an_input(backend, name):
    attn = la.LinearAttention(H, K, update_rule="gated_delta", backend=backend)
    state = attn.init_state(B)
    for lead, call in (((B,), attn.step), ((B, T), attn.prefill)):
        memory = np.zeros((*lead, H, 2 * K), np.float32).reshape(-1)
        size = int(np.prod((*lead, H, K)))
        out = memory[:size].reshape(*lead, H, K)
        shape = (*lead, H) if name == "beta" else (*lead, H, K)
        given = {n: np.zeros((*lead, H, K), np.float32) for n in "qkvg"} | {"beta": np.zeros((*lead, H), np.float32)}
        for start in (0, size - 1):  # the very same memory, and one shared number
            given[name] = memory[start : start + int(np.prod(shape))].reshape(shape)
            run = partial(call, **given, state=state, out=out)
            refuse(run, ValueError, f"^out: overlaps {name}", state)
        apart = given | {name: np.zeros(shape, np.float32)}
        assert call(**apart, state=state.copy(), out=out) is out


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_not_overlap_the_state(backend):
    attn = la.LinearAttention(1, 8, 8, backend=backend)
    state = attn.init_state(1)
    state.S = np.arange(64.0).reshape(1, 1, 8, 8)
    given = {n: np.ones((1, 1, 8), np.float32) for n in "qkv"}
    for out in (state.S[:, :, 3], state.z):
        refuse(
            lambda out=out: attn.step(**given, state=state, out=out),
            ValueError,
            "^out: overlaps the state",
            state,
        )
        refuse(
            lambda out=out: attn.read(given["q"], state, out=out),
            ValueError,
            "^out: overlaps the state",
            state,
        )


@pytest.mark.parametrize(
    "thing", [None, 3, "state", np.zeros((90, 90)), {}, la.SoftmaxAttention(H, K, V).init_state(B)]
)
def test_what_is_no_state(thing):
    attn = layer()
    step, sequence = inputs(sequence=False), inputs()
    for call in (
        lambda: attn.step(**step, state=thing),
        lambda: attn.prefill(**sequence, state=thing),
        lambda: attn.write(step["k"], step["v"], thing),
        lambda: attn.read(step["q"], thing),
    ):
        refuse(call, StateMismatchError, "^state: ")


@pytest.mark.parametrize(
    "options",
    [
        {"feature_map": "relu"},
        {"update_rule": "gated", "normalize": True},
        {"eps": 1e-20},
        {"eps_mode": "add"},
        {"qk_norm": True},
        {"normalize": False},
    ],
    ids=str,
)
def test_states_of_other_layers(options):
    """Also where the shapes are the same: the numbers mean something else."""
    attn = layer()
    state = la.LinearAttention(H, K, V, **options).init_state(B)
    name = next(iter(options))
    for call in (
        lambda: attn.step(**inputs(sequence=False), state=state),
        lambda: attn.prefill(**inputs(), state=state),
        lambda: attn.write(inputs()["k"], inputs()["v"], state),
        lambda: attn.read(inputs()["q"], state),
    ):
        refuse(call, StateMismatchError, f"^state: .*{name}", state)
    refuse(lambda: la.linear_attention(**inputs(), initial_state=state), StateMismatchError, "^state: ")


def test_a_state_of_an_equal_layer_is_taken():
    a, b = layer(), layer(backend="reference")
    state = a.init_state(B)
    b.prefill(**inputs(), state=state)
    layer(num_threads=2).step(**inputs(sequence=False), state=state)
    assert state.position.tolist() == [T + 1] * B


# the pure function


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": np.zeros((T, H, K))}, ShapeError, r"^q: .*\[B, T, heads, width\].*\[3, 2, 4\]"),
        ({"v": np.zeros(3)}, ShapeError, "^v: "),
        ({"k": np.zeros((B, T, H, K + 1))}, ShapeError, "^k: "),
        ({"k": np.zeros((B, T + 1, H, K))}, ShapeError, "^k: "),
        ({"k": np.zeros((B, T, 3, K))}, ValueError, "num_kv_heads|^k: "),
        ({"v": np.zeros((B, T, 3, V))}, ValueError, "num_value_heads|^v: "),
        ({"q": "text"}, DtypeError, "^q: "),
        ({"g": np.zeros((B, T, H))}, ValueError, "^g: .*linear"),
        ({"beta": np.zeros((B, T, H))}, ValueError, "^beta: .*linear"),
        ({"lengths": [9, 9]}, ValueError, "^lengths: "),
        ({"update_rule": "x"}, ValueError, "^update_rule: "),
        ({"dtype": "float16"}, DtypeError, "^dtype: "),
        ({"initial_state": np.zeros((B, H, K, V))}, StateMismatchError, "^z: "),
        ({"initial_state": (np.zeros((B, H, K, K)), np.zeros((B, H, K)))}, ShapeError, "^S: "),
        ({"initial_state": (np.zeros((B, H, K, V)), np.zeros((B, H)))}, ShapeError, "^z: "),
        (
            {"initial_state": (np.zeros((B + 1, H, K, V)), np.zeros((B + 1, H, K)))},
            ShapeError,
            r"^q: .*\[3, ",
        ),
        ({"initial_state": (np.full((B, H, K, V), np.nan), np.zeros((B, H, K)))}, NotFiniteError, "^S"),
        ({"initial_state": (np.zeros((B, H, K, V)),)}, (TypeError, ValueError), "initial_state"),
    ],
)
def test_linear_attention(change, error, words):
    given = inputs() | change
    refuse(lambda: la.linear_attention(**given), error, words)


def test_linear_attention_leaves_what_it_is_given():
    attn = layer()
    state = used(attn)
    S, z = state.S.copy(), state.z.copy()
    given = inputs()
    copies = {n: a.copy() for n, a in given.items()}
    before = bits(state)
    for start in (state, (S, z)):
        _, final = la.linear_attention(**given, initial_state=start)
        assert not np.may_share_memory(final.S, state.S)
    assert bits(state) == before
    np.testing.assert_array_equal(S, state.S)
    assert all((given[n] == copies[n]).all() for n in given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_leave_the_callers_arrays(backend):
    attn = layer("gated_delta", backend=backend)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        for dtype in (np.float32, np.float64):
            given = inputs("gated_delta", sequence=sequence, dtype=dtype)
            copies = {n: a.copy() for n, a in given.items()}
            call(**given, state=attn.init_state(B))
            assert all((given[n] == copies[n]).all() for n in given)


# NaN and infinity


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_not_finite(backend, dtype, bad, name):
    attn = layer("gated_delta", backend=backend)
    state = used(attn, "gated_delta")
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs("gated_delta", sequence=sequence, dtype=dtype)
        where = (1, 2, 1) if sequence else (1, 1)
        given[name][where] = bad
        if name == "g" and bad == -np.inf:
            assert np.isfinite(call(**given, state=state.copy())).all()  # a hard reset
            continue
        words = f"^{name}: .*stream 1" + (", token 2" if sequence else "")
        refuse(lambda call=call, given=given: call(**given, state=state), NotFiniteError, words, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_not_finite_in_the_two_halves(backend):
    attn = layer(backend=backend)
    state = used(attn)
    k, v = inputs()["k"], inputs()["v"]
    k[0, 1, 0, 0] = np.nan
    refuse(lambda: attn.write(k, v, state), NotFiniteError, "^k: .*stream 0, token 1", state)
    refuse(lambda: attn.write(k[:, 1], v[:, 1], state), NotFiniteError, "^k: .*stream 0", state)
    refuse(lambda: attn.read(k, state), NotFiniteError, "^q: ", state)
    refuse(lambda: la.linear_attention(k, k, v), NotFiniteError, "^q: ")


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_too_large_for_the_state_are_infinite(backend):
    attn = layer(backend=backend)
    state = used(attn)
    given = inputs(dtype=np.float64)
    given["v"][0, 0, 0, 0] = 1e39
    refuse(lambda: attn.prefill(**given, state=state), NotFiniteError, "^v: ", state)
    wide = attn.init_state(B, "float64")
    assert np.isfinite(attn.prefill(**given, state=wide)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_check_finite_off_lets_it_through(backend, name):
    attn = layer("gated_delta", backend=backend, check_finite=False)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        state = attn.init_state(B)
        given = inputs("gated_delta", sequence=sequence)
        given[name][(0, 0, 0) if sequence else (0, 0)] = np.nan
        y = call(**given, state=state)
        first = y[0, 0, 0] if sequence else y[0, 0]
        assert np.isnan(first).all() or (name == "v")
        assert np.isnan(y[0]).any()
        assert not np.isnan(y[1]).any()  # the other stream has nothing to do with it
        assert not np.isnan(state.S[1]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checks", [True, False])
def test_the_layer_decides_whether_nan_is_refused(backend, checks):
    """A state made by a layer that checks may be stepped by one that doesn't, and the other way round."""
    attn, other = layer(backend=backend, check_finite=checks), layer(backend=backend, check_finite=not checks)
    for sequence, name in ((False, "step"), (True, "prefill")):
        for repeat in range(2):  # the second step is the compiled one
            state = other.init_state(B)
            given = inputs(sequence=sequence)
            getattr(attn, name)(**given, state=state)
            given["q"][(0,) * given["q"].ndim] = np.nan
            if checks:
                refuse(
                    lambda n=name, g=given, s=state: getattr(attn, n)(**g, state=s),
                    NotFiniteError,
                    "^q: ",
                    state,
                )
            else:
                assert np.isnan(getattr(attn, name)(**given, state=state)).any(), repeat


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_places_are_not_looked_at(backend):
    attn = layer("gated_delta", backend=backend)
    state, clean = attn.init_state(B), attn.init_state(B)
    given = inputs("gated_delta")
    expected = attn.prefill(**given, state=clean, lengths=[1, 3])
    for a in given.values():
        a[0, 1] = np.nan
        a[0, 2] = np.inf
    y = attn.prefill(**given, state=state, lengths=[1, 3])
    np.testing.assert_array_equal(y, expected)
    assert not y[0, 1:].any()
    assert bits(state) == bits(clean)
    given["k"][1, 2] = np.nan  # but in a place that counts
    refuse(
        lambda: attn.prefill(**given, state=state, lengths=[1, 3]),
        NotFiniteError,
        "^k: .*stream 1, token 2",
        state,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_inactive_rows_are_not_looked_at(backend):
    attn = layer("gated_delta", backend=backend)
    state = used(attn, "gated_delta")
    before = state.copy()
    given = inputs("gated_delta", sequence=False)
    for a in given.values():
        a[0] = np.nan
    y = attn.step(**given, state=state, active=[False, True])
    assert not y[0].any()
    assert y[1].all()
    np.testing.assert_array_equal(state.S[0], before.S[0])
    assert (state.S[1] != before.S[1]).any()
    assert state.position.tolist() == [T, T + 1]
    refuse(lambda: attn.step(**given, state=state, active=[True, True]), NotFiniteError, "^q: .*stream 0", state)


# things that behave like arrays


class WithArray:
    """What a tensor library offers: `__array__`."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)


class WithDlpack:
    """DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnAnotherDevice:
    """A tensor that is not in the CPU's memory."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse Tensor.cpu() first.")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrap", [WithArray, WithDlpack, lambda a: a.tolist()], ids=["array", "dlpack", "list"])
def test_tensors_are_taken(backend, wrap):
    attn = layer("gated_delta", backend=backend)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs("gated_delta", sequence=sequence)
        expected, state = attn.init_state(B), attn.init_state(B)
        y = call(**given, state=expected)
        wrapped = {n: wrap(a) for n, a in given.items()}
        got = call(**wrapped, state=state)
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, y, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(state.S, expected.S, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrap", [WithArray, WithDlpack, lambda a: a.tolist()], ids=["array", "dlpack", "list"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensors_are_taken_by_the_two_halves(wrap, sequence):
    attn = layer()
    given = inputs(sequence=sequence)
    expected, state = attn.init_state(B), attn.init_state(B)
    attn.write(given["k"], given["v"], expected)
    attn.write(wrap(given["k"]), wrap(given["v"]), state)
    assert bits(state) == bits(expected)
    np.testing.assert_allclose(attn.read(wrap(given["q"]), state), attn.read(given["q"], state), rtol=1e-6)


@pytest.mark.parametrize("wrap", [WithArray, WithDlpack], ids=["array", "dlpack"])
def test_tensors_are_taken_by_the_pure_function(wrap):
    given = inputs("gated")
    y, final = la.linear_attention(**given, update_rule="gated", lengths=np.array([1, 3]))
    wrapped = {n: wrap(a) for n, a in given.items()}
    got, state = la.linear_attention(**wrapped, update_rule="gated", lengths=wrap(np.array([1, 3])))
    np.testing.assert_array_equal(got, y)
    assert bits(state) == bits(final)
    _, again = la.linear_attention(**wrapped, update_rule="gated", initial_state=wrap(final.S.copy()))
    _, same = la.linear_attention(**given, update_rule="gated", initial_state=final.S.copy())
    assert bits(again) == bits(same)


def test_active_of_a_tensor():
    attn = layer()
    state = attn.init_state(B)
    attn.step(**inputs(sequence=False), state=state, active=WithArray(np.array([True, False])))
    attn.step(**inputs(sequence=False), state=state, active=WithDlpack(np.array([True, False])))
    assert state.position.tolist() == [2, 0]


def test_tensors_on_another_device_are_refused_in_words():
    attn = layer()
    state = used(attn)
    for sequence, call in ((False, attn.step), (True, attn.prefill)):
        given = inputs(sequence=sequence) | {"k": OnAnotherDevice()}
        refuse(lambda call=call, given=given: call(**given, state=state), DtypeError, "^k: .*CPU", state)


def test_empty_lists_stand_for_empty_batches():
    attn = layer()
    state = attn.init_state(0)
    q, v = np.zeros((0, 3, H, K)), np.zeros((0, 3, H, V))
    assert attn.prefill(q, q, v, state, lengths=[]).shape == (0, 3, H, V)
    assert attn.step(q[:, 0], q[:, 0], v[:, 0], state, active=[]).shape == (0, H, V)
    refuse(lambda: attn.prefill(**inputs(), state=used(attn), lengths=[]), (ShapeError, DtypeError), "^lengths: ")


@pytest.mark.parametrize("thing", [None, "attn", la.SoftmaxAttention(1, 4)])
def test_warmup_of_what_is_no_layer(thing):
    if isinstance(thing, la.SoftmaxAttention):
        la.warmup(thing)  # the baseline needs a first token that costs what the others do, too
    else:
        refuse(lambda: la.warmup(thing), (TypeError, ValueError), "attn")
