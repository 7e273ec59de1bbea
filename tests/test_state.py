"""State: views, copies, rows, memory, files."""

import copy
import gc
import json
import os
import pickle
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import linattn_edge as la
from linattn_edge.errors import DtypeError, NotFiniteError, ShapeError, StateMismatchError

pytestmark = pytest.mark.nojit

B, N, K, V = 3, 2, 4, 5  # V is no multiple of a SIMD register: S is a view of padded memory


@pytest.fixture
def attn():
    return la.LinearAttention(N, K, V)


def filled(attn, B=B, dtype="float32"):
    """A state of small whole numbers, all different: every comparison below is exact."""
    state = attn.init_state(B, dtype)
    state.S = np.arange(state.S.size).reshape(state.S.shape) + 1
    if state.z is not None:
        state.z = np.arange(state.z.size).reshape(state.z.shape) + 0.5
    state.position = np.arange(B) * 7 + 1
    return state


def numbers(state):
    return state.S.copy(), None if state.z is None else state.z.copy(), state.position.copy()


def assert_same(state, expected):
    S, z, position = expected
    assert state.S.dtype == S.dtype
    np.testing.assert_array_equal(state.S, S)
    if z is None:
        assert state.z is None
    else:
        np.testing.assert_array_equal(state.z, z)
    np.testing.assert_array_equal(state.position, position)


def tokens(attn, B=B, T=2, seed=0):
    rng = np.random.default_rng(seed)
    layer = attn.layer
    sizes = ((layer.H, layer.K), (layer.HK, layer.K), (layer.N, layer.V))
    return [rng.standard_normal((B, T, *s)).astype(np.float32) for s in sizes]


# what a state is made of


@pytest.mark.parametrize("dtype", ["float32", "float64", np.float32, np.dtype("float64")])
def test_shapes_and_dtypes(attn, dtype):
    state = attn.init_state(B, dtype)
    assert state.S.shape == (B, N, K, V)
    assert state.z.shape == (B, N, K)
    assert state.position.shape == (B,)
    assert state.S.dtype == state.z.dtype == state.dtype == np.dtype(dtype)
    assert state.position.dtype == np.int64
    assert state.batch_size == B
    assert not state.S.any()
    assert not state.z.any()
    assert not state.position.any()


@pytest.mark.parametrize(
    ("options", "S", "z"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, (B, 2, K, V), (B, 2, K)),
        ({"num_heads": 2, "num_value_heads": 6}, (B, 6, K, V), (B, 6, K)),
        ({"num_heads": 2, "feature_map": la.Taylor(order=2)}, (B, 2, 15, V), (B, 2, 15)),
        ({"num_heads": 2, "feature_map": "identity"}, (B, 2, K, V), None),
        ({"num_heads": 2, "update_rule": "delta"}, (B, 2, K, V), None),
        ({"num_heads": 2, "update_rule": "gated", "normalize": True}, (B, 2, K, V), (B, 2, K)),
    ],
)
def test_shapes_of_layouts_maps_and_rules(options, S, z):
    state = la.LinearAttention(key_dim=K, value_dim=V, **options).init_state(B)
    assert state.S.shape == S
    assert (None if state.z is None else state.z.shape) == z


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float64", 8)])
def test_nbytes_counts_S_z_and_positions(dtype, itemsize):
    assert la.LinearAttention(N, K, V).init_state(B, dtype).nbytes == B * N * (K * V + K) * itemsize + 8 * B
    plain = la.LinearAttention(N, K, V, feature_map="identity").init_state(B, dtype)
    assert plain.nbytes == B * N * K * V * itemsize + 8 * B


def test_nbytes_is_the_same_at_any_position(attn):
    state = attn.init_state(B)
    before = state.nbytes
    attn.prefill(*tokens(attn, T=9), state)
    assert state.nbytes == before
    state.position = 10**12
    assert state.nbytes == before


def test_views_are_writable(attn):
    """What is written through the views is what the layer reads."""
    state = attn.init_state(B)
    state.S[1, 0, 2] = 3.0
    state.z[1, 0, 2] = 1.5
    state.position[2] = 40
    assert state.S[1, 0, 2, 4] == 3.0
    q = np.full((B, N, K), -100.0, np.float32)
    q[..., 2] = 0  # elu(0) + 1 = 1 at channel 2, exp(-100) = 4e-44 elsewhere
    np.testing.assert_array_equal(attn.read(q, state)[1, 0], [2.0] * V)
    assert state.position.tolist() == [0, 0, 40]


def test_step_changes_what_the_views_show(attn):
    state = attn.init_state(B)
    S, z, position = state.S, state.z, state.position
    one = np.ones((B, N, K), np.float32)
    attn.step(one, one, np.full((B, N, V), 3, np.float32), state)
    np.testing.assert_array_equal(S, np.full((B, N, K, V), 6))  # elu(1) + 1 = 2, times 3
    np.testing.assert_array_equal(z, np.full((B, N, K), 2))
    np.testing.assert_array_equal(position, [1] * B)


def test_assigning_copies_in(attn):
    state = attn.init_state(B)
    S, z = np.ones((B, N, K, V)), np.ones((B, N, K))
    position = np.array([1, 2, 3])
    state.S, state.z, state.position = S, z, position
    S[:], z[:], position[:] = 9, 9, 9
    assert_same(state, (np.ones((B, N, K, V), np.float32), np.ones((B, N, K), np.float32), [1, 2, 3]))
    state.position = 5
    assert state.position.tolist() == [5, 5, 5]


@pytest.mark.parametrize("make", [np.float16, np.int32, np.float64, lambda a: a.astype(">f4"), lambda a: a.tolist()])
def test_assigning_takes_any_real_numbers(attn, make):
    state = attn.init_state(B)
    S = np.arange(B * N * K * V).reshape(B, N, K, V)
    state.S = make(S) if not isinstance(make, type) else S.astype(make)
    np.testing.assert_array_equal(state.S, S)


def test_assigning_a_view_of_itself(attn):
    state = filled(attn)
    S = state.S.copy()
    state.S = state.S[::-1]
    np.testing.assert_array_equal(state.S, S[::-1])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("S", np.zeros((B, N, V, K)), ShapeError),  # handed over transposed
        ("S", np.zeros((B, N, K, V + 1)), ShapeError),
        ("S", 0.0, ShapeError),
        ("S", np.zeros((B, N, K, V), complex), DtypeError),
        ("S", np.zeros((B, N, K, V), bool), DtypeError),
        ("z", np.zeros((B, N, V)), ShapeError),
        ("z", np.full((B, N, K), "a"), DtypeError),
        ("position", np.zeros(B + 1, int), ValueError),
        ("position", -1, ValueError),
        ("position", np.arange(B) - 1, ValueError),
        ("position", np.zeros(B), (TypeError, ValueError)),
        ("position", True, (TypeError, ValueError)),
    ],
)
def test_assigning_what_does_not_fit(attn, name, value, error):
    state = filled(attn)
    before = numbers(state)
    with pytest.raises(error, match=rf"^{name}: ") as caught:
        setattr(state, name, value)
    assert "\n" not in str(caught.value)
    assert_same(state, before)


def test_a_wrong_position_of_many_streams_is_one_line(attn):
    state = attn.init_state(200)
    for wrong in (np.arange(200) - 1, np.zeros(200), np.zeros(2000, int)):
        with pytest.raises((TypeError, ValueError), match=r"^position: ") as caught:
            state.position = wrong
        assert "\n" not in str(caught.value)


def test_no_z_to_assign():
    state = la.LinearAttention(N, K, V, update_rule="delta").init_state(B)
    with pytest.raises(StateMismatchError, match=r"^z: "):
        state.z = np.zeros((B, N, K))


@pytest.mark.parametrize("batch_size", [-1, 1.0, "2", True, None])
def test_batch_size(attn, batch_size):
    with pytest.raises(ValueError, match=r"^batch_size: "):
        attn.init_state(batch_size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", np.int32, "nonsense", complex, None])
def test_dtype_of_a_state(attn, dtype):
    with pytest.raises(DtypeError, match=r"^dtype: "):
        attn.init_state(1, dtype)


# copies and rows


def test_copy_is_apart(attn):
    state = filled(attn)
    before = numbers(state)
    other = state.copy()
    assert_same(other, before)
    other.S[:], other.z[:], other.position[:] = 0, 0, 0
    assert_same(state, before)
    assert not np.may_share_memory(state.S, other.S)


def test_a_copy_goes_on_as_the_original(attn):
    state = attn.init_state(B)
    attn.prefill(*tokens(attn), state)
    other = state.copy()
    more = tokens(attn, seed=1)
    np.testing.assert_array_equal(attn.prefill(*more, state), attn.prefill(*more, other))
    assert_same(other, numbers(state))


@pytest.mark.parametrize(
    ("rows", "picked"),
    [
        ([2, 0], [2, 0]),
        ([0], [0]),
        (1, [1]),
        (np.int64(1), [1]),
        ([-1, -3], [2, 0]),
        ([1, 1, 0, 1], [1, 1, 0, 1]),
        ((2, 1), [2, 1]),
        ([], []),
        (np.zeros(0, np.int64), []),
        (np.array([2, 0], np.uint8), [2, 0]),
        (np.array([2, 0], np.uint64), [2, 0]),
        ([True, False, True], [0, 2]),
        (np.zeros(3, bool), []),
    ],
)
def test_select(attn, rows, picked):
    state = filled(attn)
    before = numbers(state)
    other = state.select(rows)
    assert_same(other, tuple(a[np.array(picked, int)] for a in before))
    other.S[:] = -1
    assert_same(state, before)


def test_beams_reordered_go_on_from_their_own_history(attn):
    state = attn.init_state(B)
    attn.prefill(*tokens(attn), state)
    more = tokens(attn, seed=1)
    rows = [2, 0, 0]
    picked = state.select(rows)
    y = attn.prefill(*(a[rows] for a in more), picked)
    np.testing.assert_array_equal(y, attn.prefill(*more, state)[rows])
    assert_same(picked, tuple(a[rows] for a in numbers(state)))


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        (None, []),
        ([1], [0, 2]),
        (2, [0, 1]),
        ([-1, 0], [1]),
        ([False, True, False], [0, 2]),
        (np.array([0, 0]), [1, 2]),
        ([], [0, 1, 2]),
    ],
)
def test_reset(attn, rows, left):
    state = filled(attn)
    S, z, position = numbers(state)
    gone = np.setdiff1d(np.arange(B), left)
    for array in (S, z, position):
        array[gone] = 0
    state.reset(rows)
    assert_same(state, (S, z, position))


def test_a_reset_row_starts_from_nothing(attn):
    """A reused slot must not answer from the stream that had it before."""
    state = attn.init_state(B)
    attn.prefill(*tokens(attn), state)
    state.reset([1])
    more = tokens(attn, seed=1)
    fresh = attn.init_state(1)
    np.testing.assert_array_equal(attn.prefill(*more, state)[1], attn.prefill(*(a[1:2] for a in more), fresh)[0])


@pytest.mark.parametrize(
    "rows",
    [[3], [-4], [0, 7], 1.0, [0.5], "a", [[0, 1]], [True, False], np.ones(4, bool), np.ones((3, 1), bool)],
)
@pytest.mark.parametrize("method", ["select", "reset"])
def test_rows_that_are_not_there(attn, method, rows):
    state = filled(attn)
    before = numbers(state)
    with pytest.raises((ValueError, TypeError), match=r"^rows: ") as caught:
        getattr(state, method)(rows)
    assert "\n" not in str(caught.value)
    assert_same(state, before)


def test_select_of_an_empty_state(attn):
    state = attn.init_state(0)
    assert state.select([]).S.shape == (0, N, K, V)
    state.reset()
    state.reset([])
    with pytest.raises(ValueError, match=r"^rows: "):
        state.select([0])


def test_select_does_not_keep_the_batch_alive():
    attn = la.LinearAttention(1, 16)
    state = attn.init_state(1000)
    owner = state.S
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    memory = weakref.ref(owner)
    one = state.select([7])
    held = one.S
    while isinstance(held.base, np.ndarray):
        held = held.base
    assert held.nbytes < 20_000
    del state, owner
    gc.collect()
    assert memory() is None
    assert one.S.shape == (1, 1, 16, 16)


@pytest.mark.parametrize("by", ["deepcopy", "pickle"])
def test_python_copies_are_whole_states(attn, by):
    """S of a deep copy or of an unpickled state is still the memory that a step changes."""
    state = filled(attn)
    other = copy.deepcopy(state) if by == "deepcopy" else pickle.loads(pickle.dumps(state))
    assert_same(other, numbers(state))
    more = tokens(attn)
    np.testing.assert_array_equal(attn.prefill(*more, other), attn.prefill(*more, state))
    assert_same(other, numbers(state))


def test_a_layer_can_be_copied_and_pickled(attn):
    """As a process pool does; before and after its first token."""
    state = attn.init_state(B)
    more = tokens(attn)
    for _ in range(2):
        others = copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))
        before = state.copy()
        y = attn.prefill(*more, state)
        for other in others:
            np.testing.assert_array_equal(other.prefill(*more, before.copy()), y)


def test_repr_is_one_line(attn):
    text = repr(filled(attn))
    assert "\n" not in text
    assert "B=3" in text


# from arrays


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_from_arrays_round_trip(attn, dtype):
    state = filled(attn, dtype=dtype)
    S, z, position = numbers(state)
    other = la.State.from_arrays(attn, S, z, position, dtype)
    assert_same(other, (S, z, position))
    S[:] = 0
    assert other.S.all()  # copied
    assert la.State.from_arrays(attn, S.tolist(), z.tolist(), 4).position.tolist() == [4] * B


def test_from_arrays_takes_dlpack(attn):
    class Tensor:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    S, z, _ = numbers(filled(attn))
    assert_same(la.State.from_arrays(attn, Tensor(S), Tensor(z)), (S, z, [0] * B))


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"S": np.zeros((B, N, V, K))}, ShapeError, "S"),
        ({"S": np.zeros((N, K, V))}, ShapeError, "S"),
        ({"S": np.zeros((B, N, K, V), complex)}, DtypeError, "S"),
        ({"z": None}, StateMismatchError, "z"),
        ({"z": np.zeros((B, N))}, ShapeError, "z"),
        ({"z": np.zeros((B + 1, N, K))}, ShapeError, "z"),
        ({"position": -1}, ValueError, "position"),
        ({"position": [1, 2]}, ValueError, "position"),
        ({"position": 1.5}, (TypeError, ValueError), "position"),
        ({"S": np.full((B, N, K, V), np.nan)}, NotFiniteError, "S"),
        ({"S": np.full((B, N, K, V), 1e300)}, NotFiniteError, "S"),  # inf in float32
        ({"z": np.full((B, N, K), np.inf)}, NotFiniteError, "z"),
        ({"dtype": "float16"}, DtypeError, "dtype"),
    ],
)
def test_from_arrays_refuses(attn, change, error, name):
    given = {"S": np.zeros((B, N, K, V)), "z": np.zeros((B, N, K)), "position": 0} | change
    with pytest.raises(error, match=rf"^{name}\b") as caught:
        la.State.from_arrays(attn, **given)
    assert "\n" not in str(caught.value)


def test_from_arrays_refuses_z_where_there_is_none():
    attn = la.LinearAttention(N, K, V, feature_map="identity")
    with pytest.raises(StateMismatchError, match=r"^z: "):
        la.State.from_arrays(attn, np.zeros((B, N, K, V)), np.zeros((B, N, K)))


def test_from_arrays_lets_nan_through_where_the_layer_does():
    attn = la.LinearAttention(N, K, V, check_finite=False)
    state = la.State.from_arrays(attn, np.full((B, N, K, V), np.nan), np.ones((B, N, K)))
    assert np.isnan(state.S).all()


# backends


def test_a_state_moves_between_backends(attn):
    reference = la.LinearAttention(N, K, V, backend="reference")
    first, second = tokens(attn), tokens(attn, seed=1)
    state, whole = attn.init_state(B, "float64"), reference.init_state(B, "float64")
    attn.prefill(*first, state)
    y = reference.prefill(*second, state)
    reference.prefill(*first, whole)
    np.testing.assert_allclose(y, reference.prefill(*second, whole), rtol=1e-6)
    np.testing.assert_allclose(state.S, whole.S, rtol=1e-12, atol=1e-12)
    attn.prefill(*first, whole)
    assert whole.position.tolist() == [6] * B


def test_a_saved_state_moves_between_backends(attn, tmp_path):
    state = filled(attn)
    state.save(tmp_path / "s")
    reference = la.LinearAttention(N, K, V, backend="reference", num_threads=2)
    assert_same(la.State.load(tmp_path / "s", reference), numbers(state))


# files

LAYERS = {
    "elu": {},
    "identity": {"feature_map": "identity"},
    "taylor": {"feature_map": la.Taylor(order=3), "normalize": True},
    "polynomial": {"feature_map": la.Polynomial(degree=3, bias=0.1), "scale": 0.3},
    "dpfp": {"feature_map": la.Dpfp(nu=2), "eps": 1e-10, "eps_mode": "add"},
    "gqa": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "gva": {"num_value_heads": 4, "update_rule": "gated_delta"},
    "decay": {"update_rule": "gated", "decay": [-0.1, -np.inf]},
    "channel decay": {
        "update_rule": "gated",
        "decay": -np.arange(N * K).reshape(N, K) / 3,
        "normalize": True,
    },
    "unchecked": {"check_finite": False},
}


def layer(name, **more):
    return la.LinearAttention(**({"num_heads": N, "key_dim": K, "value_dim": V} | LAYERS[name] | more))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_save_and_load(tmp_path, name, dtype):
    attn = layer(name)
    state = attn.init_state(B, dtype)
    rng = np.random.default_rng(0)
    state.S = rng.standard_normal(state.S.shape)
    if state.z is not None:
        state.z = rng.standard_normal(state.z.shape)
    state.position = [0, 10**15, 3]
    state.S[0, 0, 0, 0], state.S[0, 0, 0, 1] = -0.0, 1e-42 if dtype == "float32" else 5e-324
    path = tmp_path / "state.safetensors"
    before = numbers(state)
    state.save(path)
    assert_same(state, before)
    other = la.State.load(path, layer(name))
    assert other.S.tobytes() == state.S.tobytes()
    assert_same(other, before)
    state.save(str(path))  # again, over the old one
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", LAYERS)
def test_save_and_load_a_layer(tmp_path, name):
    attn = layer(name)
    path = tmp_path / "layer.safetensors"
    attn.save(path)
    assert os.listdir(tmp_path) == [path.name]
    other = la.LinearAttention.load(path)
    assert repr(other) == repr(attn)
    assert other.check_finite == attn.check_finite
    state = filled(attn)
    state.save(tmp_path / "state")
    back = la.State.load(tmp_path / "state", other)  # refused if the configurations differed
    more = tokens(attn)
    g = None
    beta = None if name != "gva" else np.full((B, 2, 4), 0.3, np.float32)
    if name == "gva":
        g = -np.ones((B, 2, 4), np.float32)
    y = attn.prefill(*more, state, g=g, beta=beta)
    np.testing.assert_array_equal(other.prefill(*more, back, g=g, beta=beta), y)


def test_a_loaded_layer_has_the_backend_asked_for(tmp_path):
    la.LinearAttention(N, K).save(tmp_path / "layer")
    attn = la.LinearAttention.load(tmp_path / "layer", backend="reference", num_threads=2)
    assert (attn.backend, attn.num_threads) == ("reference", 2)


def test_what_is_in_the_file(tmp_path):
    """Tensors S, z, position, and JSON metadata: another program can read it without this package."""
    attn = layer("channel decay")
    state = filled(attn)
    state.save(tmp_path / "s")
    raw = (tmp_path / "s").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert metadata["format_version"] == "1"
    config = json.loads(metadata["layer"])
    assert config["update_rule"] == "gated"
    assert config["feature_map"] == {"name": "elu"}
    assert {"S", "z", "position"} <= set(header)
    assert header["S"]["dtype"] == "F32"
    assert header["S"]["shape"] == [B, N, K, V]
    start, stop = header["S"]["data_offsets"]
    S = np.frombuffer(raw[8 + size + start : 8 + size + stop], "<f4").reshape(B, N, K, V)
    np.testing.assert_array_equal(S, state.S)


def test_another_process_goes_on(tmp_path, attn):
    state = attn.init_state(B)
    first, second = tokens(attn), tokens(attn, seed=1)
    attn.prefill(*first, state)
    state.save(tmp_path / "state")
    attn.save(tmp_path / "layer")
    np.savez(tmp_path / "more.npz", *second)
    code = """
import sys
import numpy as np
import linattn_edge as la
attn = la.LinearAttention.load("layer")
state = la.State.load("state", attn)
more = np.load("more.npz")
np.save("y.npy", attn.prefill(*(more[f"arr_{i}"] for i in range(3)), state))
state.save("after")
"""
    path = os.pathsep.join([str(Path(la.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), attn.prefill(*second, state))
    assert_same(la.State.load(tmp_path / "after", attn), numbers(state))


@pytest.mark.parametrize("broken", ["replace", "fsync"])
@pytest.mark.parametrize("what", ["state", "layer"])
def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, attn, broken, what):
    thing = filled(attn) if what == "state" else attn
    path = tmp_path / "file"
    thing.save(path)
    old = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    if what == "state":
        thing.S[:] = 0
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        thing.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["file"]


def test_files_that_are_not_there(tmp_path, attn):
    with pytest.raises(FileNotFoundError):
        la.State.load(tmp_path / "nothing", attn)
    with pytest.raises(FileNotFoundError):
        la.LinearAttention.load(tmp_path / "nothing")
    with pytest.raises(OSError, match="nowhere"):
        filled(attn).save(tmp_path / "nowhere" / "state")


DIFFERENT = {
    "num_heads": {"num_heads": 2 * N, "num_kv_heads": N},
    "num_kv_heads": {"num_heads": 2 * N, "num_kv_heads": N},
    "num_value_heads": {"num_value_heads": 2 * N},
    "key_dim": {"key_dim": K + 1},
    "value_dim": {"value_dim": V + 1},
    "feature_map": {"feature_map": "relu"},
    "update_rule": {"update_rule": "gated"},
    "normalize": {"normalize": False},
    "scale": {"normalize": False, "scale": 0.25},
    "qk_norm": {"qk_norm": True},
    "eps": {"eps": 1e-10},
    "eps_mode": {"eps_mode": "add"},
    "decay": {"update_rule": "gated", "decay": [-1.0] * N},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_layer_that_does_not_fit_is_named(tmp_path, attn, name):
    state = filled(attn)
    state.save(tmp_path / "s")
    other = la.LinearAttention(**({"num_heads": N, "key_dim": K, "value_dim": V} | DIFFERENT[name]))
    with pytest.raises(StateMismatchError, match=name) as caught:
        la.State.load(tmp_path / "s", other)
    assert "\n" not in str(caught.value)
    with pytest.raises(StateMismatchError, match=r"^state: .*" + name):
        other.read(np.zeros((B, 1, other.layer.H, other.layer.K)), state)


def test_every_difference_is_named(tmp_path, attn):
    filled(attn).save(tmp_path / "s")
    changed = {"feature_map": "relu", "eps": 1e-5, "eps_mode": "add", "qk_norm": True, "value_dim": 9}
    other = la.LinearAttention(**({"num_heads": N, "key_dim": K} | changed))
    with pytest.raises(StateMismatchError) as caught:
        la.State.load(tmp_path / "s", other)
    assert all(name in str(caught.value) for name in changed)
    assert all(word in str(caught.value) for word in ("elu", "relu", "1e-30", "1e-05", "clamp", "add", "5", "9"))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"feature_map": la.Taylor(order=2)}, {"feature_map": la.Taylor(order=1), "normalize": True}),
        ({"feature_map": la.Polynomial(bias=1.0)}, {"feature_map": la.Polynomial(bias=0.5)}),
        ({"update_rule": "gated", "decay": [-1, -2]}, {"update_rule": "gated", "decay": [-1, -2.5]}),
        ({"update_rule": "gated", "decay": [-1, -1]}, {"update_rule": "gated", "decay": -np.ones((N, K))}),
    ],
)
def test_parameters_that_differ(tmp_path, mine, theirs):
    filled(la.LinearAttention(N, K, V, **mine)).save(tmp_path / "s")
    with pytest.raises(StateMismatchError, match="another layer"):
        la.State.load(tmp_path / "s", la.LinearAttention(N, K, V, **theirs))


def damaged(path, **changes):
    """Write the file again with tensors replaced, added or (None) left out, and metadata changed."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    metadata |= changes.pop("metadata", {})
    tensors |= changes
    save_file({n: a for n, a in tensors.items() if a is not None}, path, metadata)


S_ = (B, N, K, V)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"S": None}, "S"),
        ({"z": None}, "z"),
        ({"position": None}, "position"),
        ({"more": np.zeros(1)}, "more"),
        ({"S": np.zeros(S_, np.float16)}, "S: "),
        ({"S": np.zeros(S_, np.int32)}, "S: "),
        ({"S": np.zeros(S_, np.float64)}, "S: .*float64"),  # not what the metadata says
        ({"S": np.zeros((B, N, V, K), np.float32)}, r"S: .*\[3, 2, 4, 5\].*\[3, 2, 5, 4\]"),
        ({"S": np.zeros((B + 1, N, K, V), np.float32)}, "S: "),
        ({"z": np.zeros((B, N), np.float32)}, "z: "),
        ({"position": np.zeros(B, np.int32)}, "position: "),
        ({"position": np.zeros((B, 1), np.int64)}, "position: "),
        ({"position": np.array([0, -1, 0])}, "position: "),
        ({"position": np.arange(400) - 1}, "position: "),
        ({"metadata": {"format_version": "2"}}, "format_version '2'"),
        ({"metadata": {"layer": "{"}}, "JSON"),
        ({"metadata": {"layer": "[1]"}}, "layer"),
        ({"metadata": {"layer": "{}"}}, "num_heads"),
    ],
)
def test_files_changed_by_others(tmp_path, attn, changes, words):
    path = tmp_path / "s"
    filled(attn).save(path)
    damaged(path, **changes)
    with pytest.raises(StateMismatchError, match=words) as caught:
        la.State.load(path, attn)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["S", "z"])
def test_files_with_nan(tmp_path, attn, name, bad):
    path = tmp_path / "s"
    state = filled(attn)
    getattr(state, name)[1, 1, 2] = bad
    state.save(path)
    with pytest.raises(NotFiniteError, match=f"{name} holds") as caught:
        la.State.load(path, attn)
    assert "\n" not in str(caught.value)
    assert_same(la.State.load(path, la.LinearAttention(N, K, V, check_finite=False)), numbers(state))


def test_truncated_files(tmp_path, attn):
    path = tmp_path / "s"
    filled(attn).save(path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StateMismatchError) as caught:
            la.State.load(path, attn)
        assert "\n" not in str(caught.value)
        with pytest.raises(StateMismatchError):
            la.LinearAttention.load(path)


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60, b"\x08\0\0\0\0\0\0\0notjson!", b"hello" * 99]
)
def test_foreign_files(tmp_path, attn, data):
    path = tmp_path / "s"
    path.write_bytes(data)
    for load in (lambda: la.State.load(path, attn), lambda: la.LinearAttention.load(path)):
        with pytest.raises(StateMismatchError) as caught:
            load()
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_files_of_other_programs(tmp_path, attn):
    """A safetensors file without our metadata, also one whose dtypes NumPy has not."""
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(3)}, path)
    with pytest.raises(StateMismatchError, match="not a linattn_edge file"):
        la.State.load(path, attn)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(StateMismatchError):
        la.State.load(path, attn)
    with pytest.raises(StateMismatchError):
        la.LinearAttention.load(path)


def test_a_folder_is_no_file(tmp_path, attn):
    for load in (lambda: la.State.load(tmp_path, attn), lambda: la.LinearAttention.load(tmp_path)):
        with pytest.raises((OSError, StateMismatchError)):
            load()


def test_a_state_file_with_bfloat16_tensors(tmp_path, attn):
    path = tmp_path / "s"
    filled(attn).save(path)
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header["S"] |= {"dtype": "BF16", "shape": [B, N, K, 2 * V]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    with pytest.raises(StateMismatchError):
        la.State.load(path, attn)


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": None},
        {"decay": np.zeros(N)},
        {"decay": np.zeros((5, 5))},
        {"metadata": {"layer": "{}"}},
        {"metadata": {"layer": "null"}},
        {"metadata": {"format_version": "99"}},
    ],
)
def test_layer_files_changed_by_others(tmp_path, changes):
    path = tmp_path / "layer"
    layer("decay").save(path)
    damaged(path, **changes)
    with pytest.raises(StateMismatchError) as caught:
        la.LinearAttention.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"feature_map": {"name": "nonsense"}},
        {"feature_map": {"name": "taylor", "order": -1}},
        {"feature_map": {"name": "elu", "colour": 1}},
        {"feature_map": 3},
        {"update_rule": "nonsense"},
        {"num_heads": "two"},
        {"colour": 1},
        {"eps": "small"},
    ],
)
def test_layer_files_with_a_strange_configuration(tmp_path, change):
    path = tmp_path / "layer"
    attn = layer("elu")
    attn.save(path)
    damaged(path, metadata={"layer": json.dumps(attn.layer.config() | change)})
    with pytest.raises(StateMismatchError) as caught:
        la.LinearAttention.load(path)
    assert "\n" not in str(caught.value)


def test_only_regular_files_are_replaced(tmp_path):
    state = la.LinearAttention(1, 2).init_state()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe: not a regular file"):
        state.save(pipe)
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="not a regular file"):
        state.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"s\.safetensors: there is no folder .*nowhere$"):
        state.save(tmp_path / "nowhere" / "s.safetensors")
