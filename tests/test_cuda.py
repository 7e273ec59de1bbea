"""The GPU backend, without a GPU: its kernels in Numba's simulator, and compiled to PTX where the toolchain is there.

The simulator runs the kernels' Python source, one thread at a time: with NUMBA_ENABLE_CUDASIM=1 only those tests run,
with few columns, rows and tokens to a block, so that every block, part and piece has neighbours.
"""

import copy
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import linattn_edge as la
import linattn_export as lx
from cases import SAMPLES, VARIANTS, make
from linattn_edge import gpu
from linattn_edge.errors import DeviceError, DtypeError, NotFiniteError, ShapeError, StateMismatchError
from test_cuda_bench import Timer, made_up

SINGLE = 1e-5
simulated = pytest.mark.cudasim
overflows = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


@pytest.fixture
def small(monkeypatch):
    """Blocks of 4 columns and 2 parts, pieces of 4 tokens; inf − inf is meant to be NaN."""
    from linattn_edge.kernels import cuda

    for name, value in (("COLUMNS", 4), ("ROWS", 2), ("PARTS", 2), ("PIECE", 4)):
        monkeypatch.setattr(cuda, name, value)
    return cuda


def case(*args, **more):
    return make(*args, **({"T": 6, "K": 3, "V": 5, "backend": "cuda"} | more))


def check(c, y, state, what=""):
    c.check(np.asarray(y), state.to("cpu"), SINGLE, what)


def device(*arrays):
    from numba import cuda

    return [None if a is None else cuda.to_device(np.ascontiguousarray(a)) for a in arrays]


# the correctness grid


@simulated
@pytest.mark.parametrize("layout", ["mha", "gqa", "gva"])
@pytest.mark.parametrize(("rule", "gate"), VARIANTS)
def test_rules_and_layouts(small, rule, gate, layout):
    phi = "identity" if rule in ("delta", "gated_delta") else "elu"
    c = case(rule, gate, layout, phi, normalize=rule in ("linear", "gated"), start=True)
    state = c.start()
    check(c, c.prefill(state), state, "prefill")


@simulated
@pytest.mark.parametrize(("rule", "gate"), [("linear", None), ("gated", "channel"), ("gated_delta", "head")])
def test_steps_equal_a_prefill(small, rule, gate):
    c = case(rule, gate, "gqa", normalize=rule == "linear", T=5)
    state = c.start()
    y = c.steps(state)
    check(c, y, state, "steps")
    other = c.start()
    np.testing.assert_allclose(c.prefill(other), y, rtol=1e-6, atol=1e-6)
    state = c.start()
    y = [c.prefill(state, part) for part in (slice(0, 1), slice(1, 3), slice(3, 5))]
    check(c, np.concatenate(y, axis=1), state, "split in three")


@simulated
@pytest.mark.parametrize("name", SAMPLES)
def test_maps(small, name):
    c = case("linear", None, "mha", name, B=1, T=2, K=3, V=2, position=3)
    state = c.start()
    check(c, c.prefill(state), state)


@simulated
@pytest.mark.parametrize("name", ["hedgehog heads", "function loop"])
def test_maps_of_heads_and_of_callers(small, name):
    c = case("gated", "head", "gqa", name, B=1, T=2, V=2)
    state = c.start()
    check(c, c.steps(state), state)


@simulated
@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_ragged(small, rule):
    c = case(rule, "head", "gva", "cosformer", B=3, normalize=rule == "linear", position=np.array([7, 0, 2]))
    c = c.with_(lengths=np.array([5, 0, 2]))
    want = c.oracle()
    for row, n in enumerate(c.lengths):
        for x in (c.q, c.k, c.v):
            x[row, n:] = np.nan
    c.expected = want
    state = c.start()
    check(c, c.prefill(state, lengths=c.lengths), state)
    before = state.to("cpu")
    (q, k, v), rest = c.tokens(0)
    k[1] = np.nan
    y = c.attn.step(q, k, v, state, active=np.array([True, False, True]), **rest)
    assert not y[1].any()
    assert y[0].any()
    after = state.to("cpu")
    np.testing.assert_array_equal(after.S[1], before.S[1])
    np.testing.assert_array_equal(after.position - before.position, [1, 0, 1])


@simulated
@pytest.mark.parametrize(("rule", "normalize"), [("gated", True), ("delta", False)])
def test_write_and_read(small, rule, normalize):
    c = case(rule, "head", "gqa", "cosformer", T=3, normalize=normalize)
    state, y = c.start(), []
    for t in range(3):
        (q, k, v), rest = c.tokens(t)
        c.attn.write(k, v, state, **rest)
        y.append(c.attn.read(q, state))
    check(c, np.stack(y, axis=1), state)
    twice = c.attn.read(c.q[:, [2, 2]], state)
    np.testing.assert_array_equal(twice[:, 0], y[2])
    np.testing.assert_array_equal(twice[:, 1], y[2])


@simulated
@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("gated_delta", "channel", "gqa", "identity"), {"qk_norm": True}),
        (("linear", None, "mha", "elu"), {"normalize": True, "eps": 1e-2, "eps_mode": "add"}),
        (("linear", None, "mha", "identity"), {"scale": 0.3}),
        (("linear", None, "gva", "elu"), {"normalize": True, "V": 2}),
        (("gated", "channel", "gqa", "relu"), {"normalize": True, "K": 4, "V": 8}),  # no thread without a row
        (("gated_delta", "head", "mha", "identity"), {"K": 4, "V": 4}),
    ],
)
def test_options(small, args, options):
    c = case(*args, **options)
    state = c.start()
    check(c, c.prefill(state), state)


@simulated
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_rows_that_do_not_fit_into_registers(small, monkeypatch, rule):
    monkeypatch.setattr(small, "RESIDENT", 0)
    c = case(rule, "channel", "gqa", "dpfp", normalize=rule == "gated", start=True, T=3)
    state = c.start()
    check(c, c.prefill(state), state)


@simulated
@pytest.mark.parametrize("decay", [np.array([-0.5, -0.25]), -np.arange(6.0).reshape(2, 3) / 8])
def test_a_decay_of_the_layer(small, decay):
    c = case("gated", "head", "mha", "relu", T=3)
    c = c.with_(g=np.broadcast_to(decay.astype(np.float32), (2, 3, *decay.shape)))
    attn = c.layer(decay=decay)
    state = attn.init_state(2)
    check(c, attn.prefill(c.q, c.k, c.v, state), state)


@simulated
def test_the_function(small):
    c = case("gated", "head", "gqa", "elu", start=True, T=3)
    options = {"feature_map": "elu", "update_rule": "gated", "backend": "cuda"}
    for start in (c.S0, la.State.from_arrays(c.layer(backend="cpu"), c.S0)):
        y, state = la.linear_attention(c.q, c.k, c.v, c.g, initial_state=start, **options)
        check(c, y, state)


@simulated
def test_nothing_to_do(small):
    attn = la.LinearAttention(2, 3, backend="cuda")
    for B, T in ((0, 2), (2, 0)):
        state = attn.init_state(B)
        x = np.zeros((B, T, 2, 3), np.float32)
        assert attn.prefill(x, x, x, state).shape == (B, T, 2, 3)
        attn.write(x, x, state)
        assert state.copy().position.tolist() == [0] * B
        assert state.select([]).batch_size == 0
    x = np.zeros((2, 2, 3), np.float32)
    state = attn.init_state(2)
    (d,) = device(np.zeros((2, 0, 2, 3), np.float32))
    assert attn.prefill(d, d, d, state).shape == (2, 0, 2, 3)


# states


@simulated
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_states(small, rule, tmp_path):
    c = case(rule, None, "mha", "relu", B=3, T=4, normalize=rule == "linear", start=True, position=np.array([4, 0, 9]))
    cpu, on_cpu = c.layer(backend="cpu"), c.start(c.layer(backend="cpu"))
    c.prefill(on_cpu, slice(0, 2), attn=cpu)
    state = on_cpu.to("cuda")
    assert state.to("cuda") is state
    assert on_cpu.to("cpu") is on_cpu
    assert repr(state).startswith("CudaState(B=3, N=2, F=3, V=5, float32, ")
    assert state.nbytes >= on_cpu.nbytes
    assert state.dtype == np.float32
    for same in (state, state.copy(), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.select([0, 1, 2])):
        back = same.to("cpu")
        np.testing.assert_array_equal(back.S, on_cpu.S)
        np.testing.assert_array_equal(back.position, on_cpu.position)
        if rule == "linear":
            np.testing.assert_array_equal(back.z, on_cpu.z)
            assert same.z.shape == (3, 2, 3)
        else:
            assert same.z is None
    # what was written on one side is read on the other
    y = c.prefill(state, slice(2, 4))
    np.testing.assert_allclose(y, c.prefill(on_cpu, slice(2, 4), attn=cpu), rtol=1e-5, atol=1e-6)
    state.save(tmp_path / "gpu")
    on_cpu.save(tmp_path / "cpu")
    both = [la.State.load(tmp_path / "gpu", cpu), la.State.load(tmp_path / "cpu", c.attn).to("cpu")]
    np.testing.assert_allclose(both[0].S, both[1].S, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(both[0].position, both[1].position)
    # rows
    picked = state.select([2, 2, 0])
    np.testing.assert_array_equal(picked.position, [13, 13, 8])
    np.testing.assert_array_equal(picked.to("cpu").S, state.to("cpu").S[[2, 2, 0]])
    state.reset([1])
    assert state.position.tolist() == [8, 0, 13]
    assert not state.to("cpu").S[1].any()
    assert state.to("cpu").S[0].any()
    for part in ([0], [1, 2]):
        (q, k, v), rest = c.tokens(0)
        one = state.select(part)
        given = {name: a[part] for name, a in rest.items()}
        y = c.attn.step(q[part], k[part], v[part], one, **given)
        want = cpu.step(q[part], k[part], v[part], state.select(part).to("cpu"), **given)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    state.reset()
    assert not np.asarray(state.to("cpu").S).any()
    # assigning
    state.S, state.position = c.S0, [1, 2, 3]
    np.testing.assert_array_equal(state.S.copy_to_host(), c.S0)
    assert state.position.tolist() == [1, 2, 3]
    state.S = device(2 * c.S0)[0]
    np.testing.assert_array_equal(state.S.copy_to_host(), 2 * c.S0)
    if rule == "linear":
        state.z = c.z0
        np.testing.assert_array_equal(state._zs.copy_to_host(), np.stack([c.z0] * 2))
    else:
        with pytest.raises(StateMismatchError, match=r"^z: "):
            state.z = 0


@simulated
def test_states_that_do_not_fit(small):
    attn, cpu = la.LinearAttention(2, 3, backend="cuda"), la.LinearAttention(2, 3)
    x = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(StateMismatchError, match="lies on the CPU"):
        attn.step(x, x, x, cpu.init_state())
    with pytest.raises(StateMismatchError, match="lies on the GPU"):
        cpu.step(x, x, x, attn.init_state())
    with pytest.raises(StateMismatchError, match="belongs to another layer"):
        attn.step(x, x, x, la.LinearAttention(2, 3, 4, backend="cuda").init_state())
    with pytest.raises(StateMismatchError, match="expected a State"):
        attn.step(x, x, x, None)
    with pytest.raises(DtypeError, match="on the GPU is float32"):
        attn.init_state(1, "float64")
    with pytest.raises(DtypeError, match="on the GPU is float32"):
        la.linear_attention(*[x[:, None]] * 3, initial_state=attn.init_state(), dtype="float64", backend="cuda")
    with pytest.raises(ValueError, match=r"^device: "):
        attn.init_state().to("gpu")
    with pytest.raises(ValueError, match=r"^device: "):
        cpu.init_state().to("gpu")
    with pytest.raises(ValueError, match=r"^position: "):
        attn.init_state().position = -1
    with pytest.raises(ShapeError, match=r"^S: "):
        attn.init_state().S = np.zeros((1, 2, 3))


@simulated
def test_layers_that_do_not_fit(small):
    with pytest.raises(ValueError, match="has no loop"):
        la.LinearAttention(2, 3, feature_map=la.FunctionMap(np.cos, 3), backend="cuda")
    with pytest.raises(ValueError, match=r"^feature_map: Taylor.* has F = \d+ features, more than fit"):
        la.LinearAttention(1, 64, feature_map=la.Taylor(order=3), backend="cuda")


@simulated
def test_what_shares_a_state_head_has_to_fit():
    with pytest.raises(ValueError, match=r"^num_heads, num_kv_heads: 32 query heads share a state head of F = 128"):
        la.LinearAttention(32, 128, num_kv_heads=1, backend="cuda")


def test_a_file_of_a_layer_that_does_not_fit_is_good(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "require", lambda: None)
    pytest.importorskip("numba.cuda")
    la.LinearAttention(32, 128, num_kv_heads=1).save(tmp_path / "layer")
    with pytest.raises(DeviceError, match=r"^num_heads, num_kv_heads: .* there is room for"):
        la.LinearAttention.load(tmp_path / "layer", backend="cuda")


def test_the_limits_that_the_page_states():
    """The largest F, for each rule, with K = 64 and so many query heads to a state head."""
    pytest.importorskip("numba.cuda")
    from linattn_edge.kernels.cuda import shape_of
    from linattn_edge.kernels.layout import STEP

    page = (Path(__file__).parents[1] / "docs" / "cuda.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert len(found) == 6
    for row in found:
        r, *limits = (int(cell.replace(",", "")) for cell in row)
        for limit, (rule, normalize) in zip(
            limits, (("linear", True), ("linear", False), ("delta", False)), strict=True
        ):
            for F, fits in ((limit, True), (limit + 16, False)):
                phi = la.T2R(np.zeros((F, 64)))
                attn = la.LinearAttention(r, 64, num_kv_heads=1, feature_map=phi, update_rule=rule, normalize=normalize)
                assert (shape_of(attn.layer, STEP, False) is not None) == fits, (r, rule, F)


# arrays on the device


@simulated
@pytest.mark.parametrize(("rule", "gate"), [("linear", None), ("gated", "channel"), ("gated_delta", "head")])
def test_device_arrays(small, rule, gate):
    """They stay where they are, and so does the result."""
    from numba import cuda

    c = case(rule, gate, "gqa", "relu", T=3, normalize=rule == "linear")
    state, y = c.start(), []
    for t in range(3):
        (q, k, v), rest = c.tokens(t)
        given = dict(zip(rest, device(*rest.values()), strict=True))
        out = None if t == 0 else cuda.device_array((2, 4, 5), np.float32)
        got = c.attn.step(*device(q, k, v), state, out=out, stream=cuda.stream() if t == 1 else None, **given)
        assert out is None or got is out
        y.append(got.copy_to_host())
    check(c, np.stack(y, axis=1), state, "steps")
    state.check()
    c = c.with_(lengths=np.array([1, 3]))
    for lengths in (c.lengths, *device(c.lengths, c.lengths.astype(np.int32))):
        state = c.start()
        given = dict(zip(("g", "beta"), device(c.g, c.beta), strict=True))
        got = c.attn.prefill(*device(c.q, c.k, c.v), state, lengths=lengths, **given)
        check(c, got.copy_to_host(), state, "prefill")
    active = np.array([False, True])
    for mask in (active, *device(active)):
        before = state.position
        (q, k, v), rest = c.tokens(0)
        given = dict(zip(rest, device(*rest.values()), strict=True))
        c.attn.step(*device(q, k, v), state, active=mask, **given)
        assert (state.position - before).tolist() == [0, 1]
    state = c.start()
    c.attn.write(*device(c.k, c.v), state, *device(c.g, c.beta), lengths=c.lengths)
    assert c.attn.read(*device(c.q), state).shape == (2, 3, 4, 5)
    assert state.position.tolist() == [1, 3]


@simulated
def test_wrong_device_arrays(small):
    """One clear error, and the state as it was."""
    from numba import cuda

    attn = la.LinearAttention(2, 3, update_rule="gated_delta", backend="cuda")
    state = attn.init_state(2)
    x, g = np.ones((2, 2, 3), np.float32), np.zeros((2, 2), np.float32)
    state.S = np.ones((2, 2, 3, 3))
    before = state.S.copy_to_host()
    q, gate = device(x, g)

    def refused(error, match, *arrays, **more):
        with pytest.raises(error, match=match):
            attn.step(*arrays, state, **({"g": gate, "beta": gate} | more))
        np.testing.assert_array_equal(state.S.copy_to_host(), before)
        assert state.position.tolist() == [0, 0]

    refused(DtypeError, "^k: expected an array on the GPU", q, x, q)
    refused(DtypeError, "^g: expected an array on the GPU", q, q, q, g=g)
    refused(DtypeError, "^v: expected float32 on the GPU, got float64", q, q, *device(x.astype(np.float64)))
    refused(ShapeError, r"^k: expected shape \[B, Hk, K\] = \[2, 2, 3\], got \[2, 2, 2\]", q, *device(x[:, :, :2]), q)
    refused(ShapeError, "^q: expected shape", *device(x[:1]), q, q)
    refused(ShapeError, "^beta: expected shape", q, q, q, beta=q)
    refused(ValueError, "^beta: the rule", q, q, q, beta=None)
    refused(ValueError, "^g: the rule", q, q, q, g=None)
    refused(
        ShapeError,
        "^v: expected a C-contiguous array",
        q,
        q,
        device(np.ones((2, 3, 2), np.float32))[0].transpose((0, 2, 1)),
    )
    refused(DtypeError, "^out: expected an array on the GPU", q, q, q, out=x)
    refused(ShapeError, "^out: expected shape", q, q, q, out=gate)
    refused(ValueError, "^out: overlaps q", q, *device(x, x), out=q)
    refused(ValueError, "^out: overlaps the state", q, q, q, out=state.S.reshape(36)[:12].reshape(2, 2, 3))
    refused(DtypeError, "^active: expected", q, q, q, active=np.zeros(2))
    refused(DtypeError, "^active: expected bool on the GPU, got float32", q, q, q, active=gate)
    refused(DtypeError, "^active: expected bool on the GPU, got int32", q, q, q, active=device(np.ones(2, np.int32))[0])
    refused(ShapeError, r"^active: expected shape \[B\]", q, q, q, active=device(np.ones((2, 2), bool))[0])
    refused(ValueError, "^stream: expected", q, q, q, stream=-1)
    refused(ValueError, "^stream: expected", q, q, q, stream="main")
    for stream in (0, 5, cuda.stream()):
        attn.step(q, q, q, state, g=gate, beta=gate, stream=stream)
    with pytest.raises(ValueError, match=r"^stream: the backend 'cpu' has none"):
        la.LinearAttention(2, 3).step(x, x, x, la.LinearAttention(2, 3).init_state(2), stream=cuda.stream())


@simulated
def test_arrays_that_share_memory_with_the_state(small):
    """Blocks of threads would read them while others write."""
    attn = la.LinearAttention(2, 3, backend="cuda")
    state = attn.init_state(2)
    (x,) = device(np.ones((2, 2, 3), np.float32))
    inside = state.S.reshape(36)[:12].reshape(2, 2, 3)
    with pytest.raises(ValueError, match=r"^v: overlaps the state"):
        attn.step(x, x, inside, state)
    with pytest.raises(ValueError, match=r"^k: overlaps the state"):
        attn.write(state.z, x, state)
    assert attn.read(inside, state).shape == (2, 2, 3)
    assert state.position.tolist() == [0, 0]


class ReadOnly:
    """An array on the GPU that may not be written to."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__array_interface__ | {"data": (self.array.ctypes.data, True)}


@simulated
def test_out_that_is_read_only(small):
    attn = la.LinearAttention(2, 3, backend="cuda")
    state = attn.init_state(1)
    x = np.ones((1, 2, 3), np.float32)
    (d,) = device(x)
    with pytest.raises(DtypeError, match=r"^out: .*read-only"):
        attn.step(d, d, d, state, out=ReadOnly(np.zeros((1, 2, 3), np.float32)))
    assert state.position.tolist() == [0]


class Named:
    """An array on the GPU whose interface says what it is told to."""

    def __init__(self, array, device=None, **changes):
        self.array, self.changes = array, changes
        if device is not None:
            self.device = device

    @property
    def __cuda_array_interface__(self):
        known = {"shape": self.array.shape, "strides": None, "version": 3, "typestr": "<f4"}
        whole = known | {"data": (self.array.ctypes.data, False)} | self.changes
        return {name: value for name, value in whole.items() if value != "none"}


class NumberedDevice:
    def __init__(self, **number):
        self.__dict__.update(number)


@simulated
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"shape": "none"}, DtypeError, "KeyError"),
        ({"typestr": "none"}, DtypeError, "KeyError"),
        ({"data": "none"}, DtypeError, "KeyError"),
        ({"data": (1,)}, DtypeError, "data: expected an address"),
        ({"data": (None, False)}, DtypeError, "data: expected an address"),
        ({"shape": (1, 2, "x")}, DtypeError, ""),
        ({"typestr": ">f4"}, DtypeError, "expected float32 on the GPU, got >f4"),
        ({"version": 9}, DtypeError, "version 9"),
        ({"data": (0, False)}, DtypeError, "expected the address of a float32 on the GPU, got 0x0"),
        ({"offset": 1}, DtypeError, "expected the address of a float32"),
        ({"device": NumberedDevice(index=1)}, DeviceError, "lies on GPU 1, the current one is 0"),
        ({"device": NumberedDevice(id=2)}, DeviceError, "lies on GPU 2"),
    ],
)
def test_arrays_that_are_not_what_they_say(small, monkeypatch, changes, error, words):
    """Of any library: one line that names the argument."""
    from numba import cuda

    buffer = np.zeros(100, np.uint8)
    monkeypatch.setattr(cuda, "from_cuda_array_interface", taken, raising=False)
    attn = la.LinearAttention(2, 3, backend="cuda")
    state, x = attn.init_state(1), np.ones((1, 2, 3), np.float32)
    if "offset" in changes:
        at = buffer.ctypes.data + 1 + -buffer.ctypes.data % 4
        changes = {"data": (at, False)}
    for name in ("q", "v", "out"):
        arrays = dict.fromkeys("qkv", device(x)[0]) | {name: Named(x, **changes)}
        with pytest.raises(error, match=f"^{name}: .*{words}"):
            attn.step(state=state, **arrays)
    assert state.position.tolist() == [0]
    good = device(x)[0]
    assert attn.step(Named(x), good, good, state, out=Named(x.copy(), NumberedDevice(index=0))) is not None


def taken(interface, owner=None, sync=True):
    """As numba-cuda does, which trusts it."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))

    class Memory:
        def __init__(self):
            known = {"typestr": dtype.str, "data": interface["data"], "version": 3}
            self.__array_interface__ = {"shape": shape} | known

    if interface["data"][0] != 0:
        return FakeCUDAArray(np.asarray(Memory()))

    class Nowhere(FakeCUDAArray):
        """NumPy has no array at address 0."""

        class _ary:
            class ctypes:
                data = 0

        def __init__(self):
            self.dtype, self.size = dtype, 6

        def is_c_contiguous(self):
            return True

    return Nowhere()


@simulated
def test_another_gpu(small, monkeypatch):
    """A state and a layer's kernels are of the one that was current; the state says so, the kernels are made anew."""
    attn = la.LinearAttention(2, 3, backend="cuda")
    state, x = attn.init_state(1), np.ones((1, 2, 3), np.float32)
    (d,) = device(x)
    engine = attn._engine()
    monkeypatch.setattr(gpu, "current_device", lambda: 1)
    calls = (
        lambda: attn.step(x, x, x, state), lambda: attn.step(d, d, d, state), state.check, state.copy,
        lambda: state.to("cpu"), state.reset, lambda: state.position,
    )  # fmt: skip
    for call in calls:
        with pytest.raises(DeviceError, match=r"^state: lies on GPU 0, the current one is 1"):
            call()
    assert attn._engine() is not engine
    attn.step(d, d, d, attn.init_state(1))


@simulated
def test_lengths_share_memory_with_nothing_that_is_written(small):
    attn = la.LinearAttention(2, 3, backend="cuda")
    state = attn.init_state(2)
    (x, buffer) = device(np.ones((2, 2, 3), np.float32), np.zeros(12, np.float32))
    inside = state.S.reshape(36)
    for flat, other in ((buffer, "out"), (inside, "active")):
        mask = flat.view(np.bool_)[:2]
        with pytest.raises(ValueError, match=f"^{other}: overlaps (active|the state)"):
            attn.step(x, x, x, state, active=mask, out=buffer.reshape(2, 2, 3))
    assert state.position.tolist() == [0, 0]


@simulated
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_lengths_out_of_range_are_flagged(small, dtype):
    attn = la.LinearAttention(2, 3, backend="cuda")
    for length, seen in ((4, 3), (-1, 0), (3, None), (0, None)):
        state = attn.init_state(2)
        (x, n) = device(np.ones((2, 3, 2, 3), np.float32), np.array([3, length], dtype))
        attn.prefill(x, x, x, state, lengths=n)
        if seen is None:
            state.check()
            continue
        assert state.position.tolist() == [3, seen]
        for same in (state, state.copy()):
            with pytest.raises(ValueError, match=r"^state: a length was not from 0 to T"):
                same.check()
        state.reset()
        state.check()
    with pytest.raises(DtypeError, match=r"^lengths: expected int64 or int32 on the GPU, got bool"):
        attn.prefill(x, x, x, state, lengths=device(np.ones(2, bool))[0])


@simulated
def test_no_result_is_read_before_the_stream_is_done(small, monkeypatch):
    """A copy on a stream may come back at once."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    late, straight = [], FakeCUDAArray.copy_to_host

    class Stream:
        def synchronize(self):
            for call in late:
                call()
            late.clear()

    def copy_to_host(self, ary=None, stream=0):
        there = straight(self)
        if not stream:
            return there
        here = np.full_like(there, np.nan)
        late.append(lambda: here.__setitem__(..., there))
        return here

    monkeypatch.setattr(FakeCUDAArray, "copy_to_host", copy_to_host)
    c = case("linear", None, "mha", "relu", T=3)
    np.testing.assert_array_equal(c.prefill(c.start(), stream=Stream()), c.prefill(c.start()))


@simulated
def test_nothing_is_left_under_way(small, monkeypatch):
    """A call on any stream may come next: whatever copies to the GPU waits after its last copy."""
    from numba import cuda
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    log, straight, to_device = [], FakeCUDAArray.copy_to_device, cuda.to_device

    def copy_to_device(self, ary, stream=0):
        log.append(stream or "copy")
        straight(self, ary)

    class Stream:
        def synchronize(self):
            log.append("wait")

    monkeypatch.setattr(FakeCUDAArray, "copy_to_device", copy_to_device)
    monkeypatch.setattr(cuda, "to_device", lambda *a, **more: log.append("copy") or to_device(*a, **more))
    monkeypatch.setattr(cuda, "synchronize", lambda: log.append("wait"))
    attn = la.LinearAttention(2, 3, backend="cuda")
    cpu, state = la.LinearAttention(2, 3).init_state(2), attn.init_state(2)
    for call in (
        lambda: attn.init_state(2), state.reset, lambda: state.reset([1]), state.clear, state.copy,
        lambda: state.select([1]), lambda: setattr(state, "position", [1, 2]), lambda: setattr(state, "S", cpu.S),
        lambda: setattr(state, "z", cpu.z), lambda: cpu.to("cuda"), lambda: gpu.Engine(attn.layer, True),
    ):  # fmt: skip
        log.clear()
        call()
        assert log[-1] == "wait" and "copy" in log
    (x,) = device(np.ones((2, 3, 2, 3), np.float32))
    stream = Stream()
    attn.prefill(x, x, x, state)
    log.clear()
    attn.prefill(x, x, x, state, lengths=np.array([1, 3]), stream=stream)
    assert log == [stream, "wait"]


@simulated
def test_a_spoilt_state_does_not_leave_the_gpu(small, tmp_path):
    attn = la.LinearAttention(1, 2, backend="cuda")
    state = attn.init_state(1)
    (x, bad) = device(np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), np.nan, np.float32))
    attn.step(x, bad, x, state)
    for call in (lambda: state.to("cpu"), lambda: state.save(tmp_path / "state"), lambda: pickle.dumps(state)):
        with pytest.raises(NotFiniteError, match=r"^state: "):
            call()
    assert not (tmp_path / "state").exists()
    assert state.to("cuda") is state
    state.clear()
    assert np.isnan(state.to("cpu").S).all()


@simulated
def test_arrays_on_both_sides(small):
    """What comes with NumPy arrays is NumPy too."""
    attn = la.LinearAttention(2, 3, update_rule="gated_delta", backend="cuda")
    state, x, g = attn.init_state(1), np.ones((1, 2, 3), np.float32), np.zeros((1, 2), np.float32)
    d, gate, active = device(x, g, np.array([True]))
    given = {"g": g, "beta": g}
    for name, more in (
        ("g", {"g": gate}),
        ("beta", {"beta": gate}),
        ("active", {"active": active}),
        ("out", {"out": d}),
    ):
        with pytest.raises(DtypeError, match=f"^{name}: lies on the GPU, q on the CPU"):
            attn.step(x, x, x, state, **(given | more))
    assert state.position.tolist() == [0]
    y, final = la.linear_attention(*device(*[x[:, None]] * 3), backend="cuda")
    assert type(y) is type(d) and final.position.tolist() == [1]


class CudaAPIError(Exception):
    """As numba-cuda calls its own."""


class NvvmSupportError(ImportError):
    """Likewise."""


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


@simulated
def test_what_the_driver_refuses(small, monkeypatch):
    """One line, and the state as it was."""
    from numba import cuda

    attn = la.LinearAttention(2, 3, backend="cuda")
    state, x = attn.init_state(1), np.ones((1, 2, 3), np.float32)
    (d,) = device(x)
    attn.step(d, d, d, state)
    S, seen = state.S.copy_to_host(), state.position
    on_cpu = state.to("cpu")

    def fails(error):
        def call(*args, **more):
            raise error

        return call

    no_memory = CudaAPIError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")
    calls = {
        "device_array": [
            lambda: attn.step(x, x, x, state),
            lambda: attn.step(d, d, d, state),
            lambda: attn.init_state(3),
            state.copy,
            lambda: state.select([0, 0]),
            lambda: on_cpu.to("cuda"),
        ],
        "to_device": [
            lambda: attn.step(x, x, x, state),
            lambda: la.LinearAttention(2, 3, backend="cuda").step(d, d, d, state),
        ],
    }
    for name, refused in calls.items():
        for error in (no_memory, MemoryError(), OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")):
            with monkeypatch.context() as patch:
                patch.setattr(cuda, name, fails(error))
                for call in refused:
                    with pytest.raises(DeviceError, match=r"^the GPU refused: out of GPU memory \(.+\)$"):
                        call()
    for error, words in (
        (
            CudaAPIError("[400] cuLaunchKernel:\n CUDA_ERROR_INVALID_HANDLE"),
            "the GPU refused: .400. cuLaunchKernel: CUDA",
        ),
        (NvvmSupportError("libNVVM cannot be found"), "no kernel can be compiled: libNVVM"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gpu.Engine, "_launcher", fails(error))
            for call in (lambda: attn.step(x, x, x, state), lambda: attn.step(d, d, d, state)):
                with pytest.raises(DeviceError, match=f"^{words}"):
                    call()
    with monkeypatch.context() as patch:
        patch.setattr(gpu.Engine, "_launcher", fails(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):  # not the driver's: it stays what it is
            attn.step(x, x, x, state)
    np.testing.assert_array_equal(state.S.copy_to_host(), S)
    np.testing.assert_array_equal(state.position, seen)
    attn.step(x, x, x, state)


@simulated
def test_what_the_cpu_alone_can_do(small, tmp_path):
    """Named, in one line."""
    attn, cpu = la.LinearAttention(2, 3, backend="cuda"), la.LinearAttention(2, 3)
    state, x = attn.init_state(1), np.ones((1, 600, 2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^remove: the backend 'cuda' has none"):
        attn.remove(x[:, 0], x[:, 0], state)
    with pytest.raises(ValueError, match=r"with the backend 'cuda' use attn.prefill"):
        la.parallel_prefill(attn, x, x, x, state)
    with pytest.raises(ValueError, match="not the backend 'cuda'"):
        la.StreamPool(attn, 2)
    for a, b, name in ((state, state, "a"), (cpu.init_state(1), state, "b")):
        with pytest.raises(StateMismatchError, match=f'^{name}: lies on the GPU; use state.to."cpu"'):
            la.merge(a, b)
    path = tmp_path / "layer.onnx"
    lx.export_layer(attn, path)  # the file is of the configuration, whatever the backend
    with pytest.raises(StateMismatchError, match=r"^state: lies on the GPU"):
        lx.state_feeds(state, path)
    assert lx.state_feeds(state.to("cpu"), path)
    gated = la.LinearAttention(2, 3, update_rule="gated")
    for counted in (gated.init_state(1, track_decay=True), cpu.init_state(1, compensated=True)):
        with pytest.raises(StateMismatchError, match=r"^state: it counts its decays"):
            counted.to("cuda")
    gated.init_state(1, track_decay=True).save(tmp_path / "counted")
    with pytest.raises(StateMismatchError, match=r"^state: it counts its decays"):
        la.State.load(tmp_path / "counted", la.LinearAttention(2, 3, update_rule="gated", backend="cuda"))
    for name in ("track_decay", "compensated"):
        with pytest.raises(ValueError, match=r"^track_decay, compensated: "):
            attn.init_state(1, **{name: True})


@simulated
def test_a_state_knows_where_it_began_on_either_side(small, tmp_path):
    """What `merge` asks of the later part."""
    attn, cpu = la.LinearAttention(2, 3, backend="cuda"), la.LinearAttention(2, 3)
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 3), np.float32)
    whole, early, late = cpu.init_state(2), cpu.init_state(2), attn.init_state(2, position=[0, 1])
    cpu.prefill(x, x, x, whole)
    cpu.prefill(x[:, :2], x[:, :2], x[:, :2], early)
    attn.prefill(x[:, 2:], x[:, 2:], x[:, 2:], late)
    late.save(tmp_path / "late")
    moved = late.to("cpu").to("cuda")
    for state in (late, late.copy(), moved, pickle.loads(pickle.dumps(late)), late.select([0, 1])):
        merged = la.merge(early, state.to("cpu"))
        np.testing.assert_allclose(merged.S, whole.S, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(merged.position, [3, 3])
    np.testing.assert_array_equal(la.merge(early, la.State.load(tmp_path / "late", cpu)).S, merged.S)
    late.reset([1])
    assert la.merge(early, late.to("cpu")).position.tolist() == [3, 2]
    for name, value in (("S", 0 * whole.S), ("z", 0 * whole.z), ("position", 0)):
        state = attn.init_state(2)
        setattr(state, name, np.asarray(value))
        with pytest.raises(StateMismatchError, match="may have begun with something in it"):
            la.merge(early, state.to("cpu"))
    for position in ([0, 0, 0], [0.0, 0.0], -1):
        with pytest.raises((ValueError, TypeError), match=r"^position: "):
            attn.init_state(2, position=position)


@simulated
def test_warmup_stays_within_a_horizon(small):
    for horizon in (1, 2, 3):
        la.warmup(la.LinearAttention(1, 2, feature_map=la.CosFormer(max_len=horizon), backend="cuda"))


@simulated
def test_numpy_arrays_are_checked_before_the_launch(small):
    c = case("gated", "head", "mha", "cosformer", T=3)
    state = c.start()
    for name, value in (("q", np.nan), ("v", np.inf), ("g", np.inf)):
        bad = getattr(c, name).copy()
        bad[1, 2, 0] = value
        with pytest.raises(NotFiniteError, match=f"^{name}: "):
            c.with_(**{name: bad}).prefill(state)
    state.position = [88, 89]
    with pytest.raises(ValueError, match="max_len"):
        c.prefill(state)
    assert state.position.tolist() == [88, 89]
    out = np.empty((2, 3, 2, 5), np.float32)
    assert c.prefill(c.start(), out=out) is out
    assert c.with_(q=c.q.astype(np.float16)).prefill(c.start()).dtype == np.float16


@simulated
@overflows
def test_what_is_not_finite_is_flagged(small):
    """Nothing waits for the GPU to say so: `check` does."""
    c = case("gated_delta", "head", "mha", "identity", T=3)
    for name, value, found in (
        *((name, np.nan, True) for name in ("q", "k", "v", "g", "beta")),
        ("g", -np.inf, False),
        ("g", np.inf, True),
        ("v", -np.inf, True),
    ):
        bad = getattr(c, name).copy()
        bad[1, 1, 0] = value
        d = c.with_(**{name: bad})
        for check_finite in (True, False):
            attn = d.layer(check_finite=check_finite)
            state = attn.init_state(2)
            attn.prefill(*device(d.q, d.k, d.v), state, *device(d.g, d.beta))
            if not found or not check_finite:
                state.check()
                continue
            for same in (state, state.copy(), state.select([0])):
                with pytest.raises(NotFiniteError, match=r"^state: "):
                    same.check()
            state.clear()
            state.check()


@simulated
@overflows
def test_what_phi_does_not_take_is_flagged(small):
    attn = la.LinearAttention(1, 2, feature_map=la.CosFormer(max_len=3), backend="cuda")
    state = attn.init_state(1)
    x = device(np.ones((1, 2, 1, 2), np.float32))[0]
    attn.prefill(x, x, x, state)
    state.check()
    attn.read(x, state)
    state.check()
    attn.prefill(x, x, x, state)
    with pytest.raises(ValueError, match="max_len = 3"):
        state.check()
    state.reset()
    state.check()
    attn = la.LinearAttention(1, 2, feature_map="relu2", backend="cuda")
    state = attn.init_state(1)
    attn.prefill(*device(*[np.full((1, 1, 1, 2), 1e30, np.float32)] * 3), state)
    with pytest.raises(ValueError, match="beyond the range of Relu2"):
        state.check()


@simulated
def test_the_rest(small):
    attn = la.LinearAttention(1, 2, update_rule="gated_delta", backend="cuda")
    la.warmup(attn)
    assert len(attn._engine()._kernels) == 6
    assert pickle.loads(pickle.dumps(attn)).backend == "cuda"
    assert gpu.card() == "Numba's simulator"
    state = la.LinearAttention(1, 2).init_state()
    state.check()
    state.clear()
    for decay in (None, np.array([-0.5])):
        layers = [la.LinearAttention(1, 2, update_rule="gated", decay=decay, backend=b) for b in ("cpu", "cuda")]
        cpu, cuda = (attn.init_state(2, position=[0, 3]) for attn in layers)
        x, g = np.ones((2, 4, 1, 2), np.float32), None if decay is not None else np.zeros((2, 4, 1), np.float32)
        for attn, state in zip(layers, (cpu, cuda), strict=True):
            attn.prefill(x, x, x, state, g)
        np.testing.assert_array_equal(cuda.log_decay, cpu.log_decay)


def checker(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("cuda_check")


@simulated
def test_the_check(small, monkeypatch, tmp_path, capsys):
    """Its grid runs in the simulator; the times need a GPU."""
    check = checker(monkeypatch)
    monkeypatch.setattr(check, "SAMPLES", ["elu", "rff"])
    assert check.main(["--quick", "--json", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out
    assert "Correctness: 13 of 13 cases within 1e-05" in out
    assert re.search(r"^Versions: system .+, Python 3.+, numba .+, numpy .+\.$", out, re.MULTILINE)
    report = json.loads((tmp_path / "report").read_text())
    assert report["card"] == "Numba's simulator"
    assert report["groups"] == []
    assert len(report["correctness"]["errors"]) == 13
    monkeypatch.setattr(check, "BOUND", 0)
    monkeypatch.setattr(check, "cases", lambda quick, all=check.cases: all(quick)[6:7])
    assert check.main(["--quick"]) == 1
    assert "FAILED map elu: relative RMS error" in capsys.readouterr().out


@simulated
def test_a_replay_that_does_nothing_is_wrong(monkeypatch):
    check = checker(monkeypatch)
    monkeypatch.setattr(check.device, "Timer", Timer)
    with pytest.raises(ValueError, match=r"the position is \[0, 0, 0\] after four replays"):
        check.graph_is_right()


def grid_of(check, monkeypatch, **calls):
    monkeypatch.setattr(check, "cases", lambda quick: list(calls.items()))


@simulated
@pytest.mark.parametrize("error", [np.inf, np.nan, 1e-3])
def test_the_check_fails_where_a_case_is_wrong(monkeypatch, tmp_path, capsys, error):
    """The replay of a graph is a case like the others."""
    check = checker(monkeypatch)
    grid_of(check, monkeypatch, good=lambda: 0.0, graph=lambda: error, other=lambda: 0.0)
    path = tmp_path / "report"
    assert check.main(["--quick", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "Correctness: 2 of 3 cases" in out and f"- FAILED graph: relative RMS error {error:.1e}" in out
    report = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert report["correctness"]["errors"]["graph"] == (error if np.isfinite(error) else None)


@simulated
def test_the_check_stops_where_the_gpu_has_had_enough(monkeypatch, capsys):
    check, run = checker(monkeypatch), []
    grid_of(check, monkeypatch, first=lambda: 1 / 0, second=lambda: run.append(1) or 0.0)
    assert check.main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "Correctness: 1 of 2 cases" in out and "- FAILED first: ZeroDivisionError" in out and "STOPPED" not in out
    monkeypatch.setattr(check, "upload", lambda *arrays: 1 / 0)
    assert check.main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "Correctness: 0 of 2 cases" in out
    assert "- STOPPED: after 'first' the GPU does not even copy a number (ZeroDivisionError: " in out
    assert "; 1 of the cases and all times were not run." in out
    assert len(run) == 1
    report = {"stopped": None, "failures": {}}
    assert check.attempt(report, "a", lambda: 1 / 0) is check.attempt(report, "b", lambda: run.append(2)) is None
    assert list(report["failures"]) == ["a"] and report["stopped"].startswith("after 'a'") and len(run) == 1


# without the simulator


def test_the_text_of_the_check(monkeypatch):
    """Of figures that are made up."""
    check = checker(monkeypatch)
    report = {
        "date": "2026-01-01", "card": "a card", "version": "1", "versions": {"driver": "2"}, "command": "this",
        "seconds": 1.0, "stopped": None,
        "correctness": {"cases": 3, "run": 3, "worst": 1e-7, "failed": {"one": "why"}, "stopped": None},
        "empty_replay_us": 1.5, "groups": [asdict(group) for group in made_up()],
        "failures": {"that": "out of memory"},
    }  # fmt: skip
    text = check.text(report)
    assert "Versions: driver 2." in text
    assert "Correctness: 2 of 3 cases" in text
    assert "- FAILED one: why" in text
    assert "A kernel that does nothing, in a graph: 1.5 µs." in text
    assert re.search(r"^gated +16 +8 × 64 +2.00 +", text, re.MULTILINE)
    assert re.search(r"^linear, elu +8 +64 +", text, re.MULTILINE)
    assert "- not timed: another: linattn_edge: left out, out of GPU memory" in text
    assert "- FAILED, not measured: that: out of memory" in text
    assert not check.is_good(report)
    good = report | {"failures": {}, "correctness": report["correctness"] | {"failed": {}}}
    assert check.is_good(good)
    assert not check.is_good(good | {"stopped": "why"})


def test_the_check_says_beforehand_what_it_does(monkeypatch, capsys, tmp_path):
    check = checker(monkeypatch)
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(check, "measure", lambda *_: pytest.fail("measured"))
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        assert check.main(["--json", str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(r"cuda_check: --json: .+ is (a|no) folder\n", err)
    with pytest.raises(SystemExit):
        check.main(["--help"])
    out = capsys.readouterr().out
    assert "FAILED" in out and "Exit status: 0" in out


def test_the_check_without_a_gpu(monkeypatch, capsys):
    check = checker(monkeypatch)
    monkeypatch.setattr(gpu, "why_not", lambda: "no card")
    assert check.main([]) == 1
    assert capsys.readouterr().err == "cuda_check: no card\n"


def test_the_simulator_runs_in_a_process_of_its_own():
    """One of the tests above; all of them: NUMBA_ENABLE_CUDASIM=1 pytest tests/test_cuda.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "decay_of_the_layer"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        command, env=environment | {"NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_without_the_package(monkeypatch):
    """One line: what is missing, and how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gpu.why_not.cache_clear()
    try:
        with pytest.raises(DeviceError) as error:
            la.LinearAttention(2, 4, backend="cuda")
        with pytest.raises(DeviceError, match="numba-cuda is missing"):
            la.LinearAttention(2, 4).init_state().to("cuda")
    finally:
        gpu.why_not.cache_clear()
    assert str(error.value) == (
        "backend: 'cuda' is not available: the package numba-cuda is missing: pip install \"linattn-edge[cuda]\""
    )


def test_a_saved_layer_without_a_gpu(monkeypatch, tmp_path):
    """The file is good: what is missing is said, not that it can't be read."""
    la.LinearAttention(2, 4).save(tmp_path / "layer")
    monkeypatch.setattr(gpu, "why_not", lambda: "no card")
    with pytest.raises(DeviceError, match="'cuda' is not available: no card"):
        la.LinearAttention.load(tmp_path / "layer", backend="cuda")


def test_without_a_gpu_the_reason_is_one_line():
    reason = gpu.why_not()
    assert reason is None or ("\n" not in reason and len(reason) > 10)
    code = "from linattn_edge.info import collect_info; import json; print(json.dumps(collect_info()))"
    info = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert info["backends"]["cuda"]["reason"] == reason
    assert (info["gpu"] is None) == (reason is not None)


class Elsewhere:
    """A NumPy array that says that it lies on a GPU, by DLPack or by the CUDA array interface."""

    def __init__(self, array, error=None):
        self.array, self.error = array, error

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **options):
        self.options = options
        return self.array.__dlpack__()


class Interface(Elsewhere):
    @property
    def __cuda_array_interface__(self):
        if self.error:
            raise self.error
        return self.array.__array_interface__ | {"stream": 7}


def test_what_lies_on_a_gpu():
    x = np.zeros((2, 3), np.float32)
    assert gpu.is_device_array(Elsewhere(x))
    assert gpu.is_device_array(Interface(x))
    assert gpu.is_device_array(Interface(x, RuntimeError("requires grad")))
    for value in (x, [1.0], 1.0, None):
        assert not gpu.is_device_array(value)
    assert gpu._interface(Interface(x))[0]["data"][0] == x.ctypes.data


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, KeyError])
def test_what_does_not_say_where_it_lies(kind):
    class Liar:
        def __dlpack_device__(self):
            raise kind("no")

        def __dlpack__(self, **options):
            raise kind("no")

    assert not gpu.is_device_array(Liar())
    if kind is not KeyError:
        with pytest.raises(DtypeError, match=r"^q: .*Liar \(no\)"):
            la.LinearAttention(1, 2).read(Liar(), la.LinearAttention(1, 2).init_state())


def test_the_cpu_copies_nothing_from_a_gpu():
    """Numba's arrays would let it."""

    class There:
        __cuda_ndarray__ = True

        def __array__(self, *args, **options):
            return np.zeros((1, 1, 2), np.float32)

    x, there = np.zeros((1, 1, 2), np.float32), There()
    for backend in ("cpu", "reference"):
        attn = la.LinearAttention(1, 2, backend=backend)
        state = attn.init_state()
        for name in "qkv":
            given = {"q": x, "k": x, "v": x} | {name: there}
            with pytest.raises(DtypeError, match=f"^{name}: expected an array on the CPU, .*it lies on a GPU"):
                attn.step(**given, state=state)
        with pytest.raises(DtypeError, match=r"^active: .*it lies on a GPU"):
            attn.step(x, x, x, state, active=there)
        with pytest.raises(DtypeError, match=r"^S: .*it lies on a GPU"):
            state.S = there
    attn = la.LinearAttention(1, 2)
    pool = la.StreamPool(attn, 1)
    with pytest.raises(DtypeError, match=r"^k: .*it lies on a GPU"):
        pool.step([pool.open()], x, there, x)


def test_dlpack():
    pytest.importorskip("cuda.core")
    x = np.zeros((4, 6), np.float32)
    for array in (x, x[:, ::2]):
        there = Elsewhere(array)
        interface, owner = gpu._interface(there, 7)
        assert owner[0] is there and there.options["stream"] == 7
        assert interface["shape"] == array.shape
        assert interface["strides"] in (None, array.strides)
        assert (interface["typestr"], interface["data"][0]) == ("<f4", array.ctypes.data)


def test_the_cpu_never_loads_it():
    code = """
import sys, numpy as np, linattn_edge as la
attn = la.LinearAttention(1, 2)
attn.step(*np.zeros((3, 1, 1, 2), np.float32), attn.init_state())
print({"linattn_edge.gpu", "linattn_edge.kernels.cuda", "numba.cuda"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "set()"


def test_the_page_names_what_there_is():
    page = (Path(__file__).parents[1] / "docs" / "cuda.md").read_text(encoding="utf-8")
    assert 'pip install -e ".[cuda]"' in page
    for name in ("state.check()", 'state.to("cuda")', "stream=", "benchmarks/cuda_check.py"):
        assert name in page
