"""Compiled code: found again by the next process, never stale, made without a cache where none can be written."""

import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge.kernels import maths

JIT = os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
PACKAGE = Path(la.__file__).parent

# A small kernel by the library's policy that calls a helper in another file of the package.
PROBE = """
import sys
import time
import numba.core.event as event
import numpy as np
from linattn_edge.kernels import jit, maths
from numba import types

exp = maths.exp

def probe(x):
    return exp(x)

time.sleep(max(0, float(sys.argv[1]) - time.time()) if len(sys.argv) > 1 else 0)
record = event.RecordingListener()
with event.install_listener("numba:compile", record):
    y = jit.kernel(probe, "probe", (types.float32,))(np.float32(1))
print(float(y), len(record.buffer) // 2)
"""

# Both layers with their real kernels.
REAL = """
import numba.core.event as event
import numpy as np
import linattn_edge as la
record = event.RecordingListener()
with event.install_listener("numba:compile", record):
    one = np.ones((1, 1, 1, 4), np.float32)
    for attn in LAYERS:
        state = attn.init_state(1)
        attn.prefill(one, one, one, state)
        y = attn.step(one[0], one[0], one[0], state)
print(float(y[0, 0, 0]), len(record.buffer) // 2)
"""


def environment(**changes):
    """Variables for another Python, without Numba's settings of this one; None removes a variable."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(("NUMBA", "COV", "PYTHONDONT"))}
    return {n: str(v) for n, v in (env | changes).items() if v is not None}


def python(code, path=PACKAGE.parent, **changes):
    """What a fresh process prints that finds the package at `path`."""
    command = [sys.executable, "-W", "error", "-c", code]
    env = environment(PYTHONPATH=path, **changes)
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=path).stdout


def result(output):
    y, compiled = output.split()
    return float(y), int(compiled)


@pytest.fixture
def copied(tmp_path):
    """The package at another place with a script beside it, and a cache of its own: (folder, variables)."""
    folder = tmp_path / "lib"
    shutil.copytree(PACKAGE, folder / "linattn_edge", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "probe.py").write_text(PROBE)
    return folder, {"NUMBA_CACHE_DIR": tmp_path / "cache"}


def cache_files(tmp_path):
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*.nb[ic]")}


# the cache


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_the_next_process_compiles_nothing_and_never_runs_old_code(copied, tmp_path):
    """A helper edited in another file, its size and time kept, runs the new code; Numba alone would run the old."""
    folder, env = copied
    run = "import probe"
    y, compiled = result(python(run, folder, **env))
    np.testing.assert_allclose(y, math.e, rtol=2e-7)
    assert compiled >= 1
    before = cache_files(tmp_path)
    assert before

    assert result(python(run, folder, **env)) == (y, 0)
    assert cache_files(tmp_path) == before

    source = folder / "linattn_edge" / "kernels" / "maths.py"
    old = source.read_text()
    new = old.replace("1.44269504", "1.40000000").replace("5.0000001201e-1", "5.5000001201e-1")
    assert new != old
    assert len(new) == len(old)
    stat = source.stat()
    source.write_text(new)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.rmtree(source.parent / "__pycache__", ignore_errors=True)  # Python's own cache goes by time and size
    changed, compiled = result(python(run, folder, **env))
    assert compiled >= 1
    assert abs(changed - y) > 1e-3

    source.write_text(old)  # the old version again: right, whether it is found or compiled
    shutil.rmtree(source.parent / "__pycache__", ignore_errors=True)
    assert result(python(run, folder, **env))[0] == y


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_the_real_kernels_are_found_by_the_next_process():
    for attn in (la.LinearAttention(1, 4), la.SoftmaxAttention(1, 4)):
        la.warmup(attn)
    layers = "la.LinearAttention(1, 4), la.SoftmaxAttention(1, 4)"
    cache = os.environ.get("NUMBA_CACHE_DIR")
    assert result(python(REAL.replace("LAYERS", layers), NUMBA_CACHE_DIR=cache)) == (1.0, 0)


@pytest.mark.nojit
def test_every_source_that_is_compiled_is_in_the_stamp(copied, monkeypatch):
    from linattn_edge.kernels import jit

    package = copied[0] / "linattn_edge"
    monkeypatch.setattr(jit, "__file__", str(package / "kernels" / "jit.py"))
    seen = {jit._source_stamp()}
    assert seen == {jit.SOURCE_STAMP}  # the place does not matter, the text does
    names = [
        "maths",
        "lanes",
        "layout",
        "sweep",
        "columns",
        "advance",
        "phi",
        "cpu",
        "crew",
        "jit",
        "softmax",
        "program",
        "decoder",
    ]
    sources = [package / "kernels" / f"{name}.py" for name in names]
    for source in [*sources, package / "rules.py", package / "features.py"]:
        text = source.read_text()
        source.write_text(text + "\n# another version\n")
        seen.add(jit._source_stamp())
        source.write_text(text)
    assert len(seen) == 1 + len(names) + 2


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_processes_at_once_on_a_cold_cache(copied):
    folder, variables = copied
    start = time.time() + 2  # all have imported by then
    command = [sys.executable, "-W", "error", "-c", "import probe", str(start)]
    env = environment(PYTHONPATH=folder, **variables)
    running = [
        subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, outputs
    assert len({result(out)[0] for out, _ in outputs}) == 1
    assert result(python("import probe", folder, **variables)) == (result(outputs[0][0])[0], 0)


def small(offset):
    """Something to compile that takes no time."""

    def add(x):
        return x + offset

    return add


@pytest.fixture
def nowhere(monkeypatch):
    """What Numba sees when neither the package's folder nor the home can be written."""
    caching = pytest.importorskip("numba.core.caching")
    for cls in caching.CacheImpl._locator_classes:
        if hasattr(cls, "ensure_cache_path"):
            monkeypatch.setattr(cls, "ensure_cache_path", fail)


def fail(self):
    raise PermissionError(13, "Permission denied")


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_no_folder_to_write_to_is_one_warning(nowhere):
    from numba import types

    from linattn_edge.kernels import jit

    assert jit.cache_folder() is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        functions = [jit.kernel(small(n), f"add {n}", (types.int64,)) for n in range(3)]
    assert [f(1) for f in functions] == [1, 2, 3]
    assert len(caught) == 1
    assert issubclass(caught[0].category, RuntimeWarning)
    assert "NUMBA_CACHE_DIR" in str(caught[0].message)
    assert "\n" not in str(caught[0].message)


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_unwritable_package_and_home(copied):
    """A fresh process, as in a container with a read-only file system: it works, and says once why it is slow."""
    folder, _ = copied
    code = REAL.replace("LAYERS", "[la.SoftmaxAttention(1, 4)]")
    code = f"""
import sys
import warnings
import numba.core.caching as caching
def fail(self):
    raise PermissionError(13, "Permission denied")
for cls in caching.CacheImpl._locator_classes:
    if hasattr(cls, "ensure_cache_path"):
        cls.ensure_cache_path = fail
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    exec({code!r})
print([str(w.message) for w in caught], file=sys.stderr)
assert len(caught) == 1 and "NUMBA_CACHE_DIR" in str(caught[0].message)
"""
    y, compiled = result(python(code, folder, HOME="/nonexistent", XDG_CACHE_HOME=None))
    assert compiled >= 1
    assert y == 1
    assert not list(folder.rglob("*.nb[ic]"))


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_cache_folder_is_where_the_files_are(tmp_path):
    code = "from linattn_edge.kernels.jit import cache_folder; print(cache_folder())"
    assert python(code, NUMBA_CACHE_DIR=tmp_path).strip().startswith(str(tmp_path))


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_a_kernel_takes_one_signature_only():
    from numba import types

    from linattn_edge.kernels import jit

    add = jit.kernel(small(1), "add 1", (types.int64,))
    assert add(2) == 3
    with pytest.raises(TypeError):
        add("text")


# what is compiled, and when


@pytest.mark.nojit
def test_imports_and_layers_do_not_load_numba():
    code = """
import sys
import numpy as np
import linattn_edge as la
attn = la.LinearAttention(2, 4, feature_map=la.Taylor())
state = attn.init_state(3)
state.select([1]).reset()
la.Elu()(np.ones(3))
softmax = la.SoftmaxAttention(2, 4)
softmax.init_state(2)
reference = la.LinearAttention(2, 4, backend="reference")
reference.step(*np.ones((3, 1, 2, 4)), reference.init_state(1))
la.warmup(reference)
print([name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite")])
"""
    assert python(code).strip() == "[]"


@pytest.mark.skipif(not JIT, reason="needs the compiler")
@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_warmup_leaves_nothing_to_compile(rule):
    """Whatever the input's dtype, layout and mutability: no new signature, nothing built or loaded later."""
    from numba.core import event

    from linattn_edge.kernels import cpu

    attn = la.LinearAttention(2, 4, 5, update_rule=rule)
    la.warmup(attn)
    kernels = [cpu.step("float32"), cpu.sequence("float32")]
    signatures = [list(kernel.signatures) for kernel in kernels]
    made = cpu.step.cache_info().misses, cpu.sequence.cache_info().misses
    assert [len(s) for s in signatures] == [1, 1]

    rng = np.random.default_rng(0)
    sizes = {"q": (2, 4), "k": (2, 4), "v": (2, 5)} | ({} if rule == "linear" else {"g": (2,), "beta": (2,)})
    given = {n: -rng.random((3, 7, *s)).astype(np.float32) / 4 for n, s in sizes.items()}
    frozen = {n: a.copy() for n, a in given.items()}
    for a in frozen.values():
        a.flags.writeable = False
    variants = [
        given,
        frozen,
        {n: a.astype(np.float16) for n, a in given.items()},
        {n: a.astype(np.float64) for n, a in given.items()},
        {n: a.astype(">f4") for n, a in given.items()},
        {n: np.asfortranarray(a) for n, a in given.items()},
        {n: np.repeat(a, 2, axis=-1)[..., ::2] for n, a in given.items()},
        {n: a[::-1, :, ::-1] for n, a in given.items()},
        {n: a.tolist() for n, a in given.items()},
    ]
    record = event.RecordingListener()
    with event.install_listener("numba:compile", record):
        for variant in variants:
            state = attn.init_state(3)
            attn.prefill(**variant, state=state)
            attn.prefill(**variant, state=state, lengths=[1, 2, 3])
            arrays = {n: np.asarray(a) for n, a in variant.items()}
            for _ in range(2):
                token = {n: a[:, 2] for n, a in arrays.items()}
                attn.step(**token, state=state)
                attn.step(**token, state=state, active=[True, False, True])
                attn.step(**token, state=state, out=attn.step(**token, state=state))
            more = {n: token[n] for n in ("g", "beta") if n in token}
            attn.write(token["k"], token["v"], state, **more)
            attn.read(token["q"], state)
    assert not record.buffer
    assert [list(kernel.signatures) for kernel in kernels] == signatures
    assert (cpu.step.cache_info().misses, cpu.sequence.cache_info().misses) == made


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_warmup_of_each_state_dtype():
    from numba.core import event

    from linattn_edge.kernels import cpu

    attn = la.LinearAttention(1, 2)
    la.warmup(attn, "float64")
    assert len(cpu.step("float64").signatures) == 1
    record = event.RecordingListener()
    with event.install_listener("numba:compile", record):
        state = attn.init_state(1, "float64")
        attn.step(*np.ones((3, 1, 1, 2)), state)
    assert not record.buffer


@pytest.mark.skipif(not JIT, reason="needs the compiler")
def test_memory_mapped_inputs_need_no_new_kernel(tmp_path):
    from numba.core import event

    attn = la.LinearAttention(1, 4)
    la.warmup(attn)
    a = np.random.default_rng(0).standard_normal((3, 2, 5, 1, 4)).astype(np.float32)
    np.save(tmp_path / "a.npy", a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    record = event.RecordingListener()
    with event.install_listener("numba:compile", record):
        y = attn.prefill(*mapped, attn.init_state(2))
        state = attn.init_state(2)
        steps = np.stack([attn.step(*mapped[:, :, t], state) for t in range(5)], 1)
    assert not record.buffer
    np.testing.assert_array_equal(y, attn.prefill(*a, attn.init_state(2)))
    np.testing.assert_array_equal(steps, y)


@pytest.mark.skipif(not JIT, reason="compares with the compiler")
def test_interpreted_kernels_give_the_same_numbers(tmp_path):
    code = """
import sys
import numpy as np
import linattn_edge as la
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 9, 2, 4)).astype(np.float32)
v = np.concatenate([v, v], -1)[..., :5]
g, beta = -rng.random((2, 2, 9, 2)).astype(np.float32) / 4
out = {}
for rule, phi in [("linear", "elu"), ("gated", la.Taylor(2)), ("delta", "dpfp"), ("gated_delta", "polynomial")]:
    takes_g, takes_beta = rule.startswith("gated"), rule.endswith("delta")
    for dtype in ("float32", "float64"):
        y, state = la.linear_attention(
            q, k, v, g if takes_g else None, -g / 20 if takes_beta else None,
            update_rule=rule, feature_map=phi, dtype=dtype, lengths=[9, 4],
        )
        out[f"{rule} {dtype} y"], out[f"{rule} {dtype} S"] = y, state.S
softmax = la.SoftmaxAttention(2, 4, 5)
for dtype in ("float32", "float64"):
    out[f"softmax {dtype}"] = softmax.prefill(q, k, v, softmax.init_state(2, dtype))
np.savez(sys.argv[1], **out)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script)]
    for name, disabled in (("plain", "1"), ("compiled", "0")):
        cache = os.environ.get("NUMBA_CACHE_DIR")
        env = environment(PYTHONPATH=PACKAGE.parent, NUMBA_DISABLE_JIT=disabled, NUMBA_CACHE_DIR=cache)
        subprocess.run([*command, str(tmp_path / f"{name}.npz")], env=env, check=True)
    plain, compiled = np.load(tmp_path / "plain.npz"), np.load(tmp_path / "compiled.npz")
    assert set(plain) == set(compiled)
    for name in plain:
        rtol = 1e-13 if "float64 S" in name else 2e-6
        size = np.sqrt(np.mean(plain[name] ** 2))
        np.testing.assert_allclose(compiled[name], plain[name], rtol=rtol, atol=rtol * size, err_msg=name)


# exp


def exp32(x):
    """The library's exp of each number, by the loops that the kernels run."""
    if not JIT:
        return plain_exp32(x)
    from numba import njit

    from linattn_edge.kernels import jit

    @njit(**jit.OPTIONS)  # reassociation too: it may multiply the powers of 2 first
    def loop(x, y):
        for i in range(x.size):
            y[i] = jit.exp32(x[i])

    y = np.empty_like(x)
    loop(x, y)
    return y


def plain_exp32(x):
    return np.array([maths.exp32(each) for each in x], np.float32)


@pytest.mark.nojit
@pytest.mark.parametrize(("exp", "count"), [(exp32, 200_001 if JIT else 2001), (plain_exp32, 2001)])
def test_exp32_over_its_range(exp, count):
    x = np.linspace(-87, 88, count).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    y = exp(x)
    assert y.dtype == np.float32
    assert (np.abs(y - exact) / exact).max() < 4e-7
    close = np.concatenate([np.linspace(-1, 1, count), [0.0, -0.0, 1e-30, -1e-30]]).astype(np.float32)
    exact = np.exp(close.astype(np.float64))
    assert (np.abs(exp(close) - exact) / exact).max() < 2e-7


@pytest.mark.nojit
@pytest.mark.parametrize("exp", [exp32, plain_exp32])
def test_exp32_at_its_ends(exp):
    """Subnormal results to one unit, 0 below, inf above, NaN for NaN; exp(0) is 1 exactly."""
    x = np.linspace(-104, -87, 500).astype(np.float32)
    y = exp(x)
    assert (np.abs(y - np.exp(x.astype(np.float64))) <= 2**-149 + 4e-7 * y).all()
    assert y[0] == 0
    assert (np.diff(y) >= 0).all()
    special = np.array([0.0, -0.0, -np.inf, np.inf, -1e30, -104.5, -200, 88.8, 1e30, 3.4e38, np.nan], np.float32)
    expected = [1, 1, 0, np.inf, 0, 0, 0, np.inf, np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(exp(special), expected)
    top = np.array([88.7, 88.72, 88.722], np.float32)
    np.testing.assert_allclose(exp(top), np.exp(top.astype(np.float64)), rtol=4e-7)


@pytest.mark.nojit
def test_exp_keeps_the_precision_of_its_argument():
    assert maths.exp(np.float32(-0.5)).dtype == np.float32
    assert maths.exp(np.float64(-0.5)) == math.exp(-0.5)


def test_nan_checks_survive_the_compiler():
    """With all of fastmath on, LLVM takes isnan for false and comparisons for granted."""
    attn = la.LinearAttention(1, 4)
    state = attn.init_state(1)
    bad = np.full((1, 1, 4), np.nan, np.float32)
    good = np.ones((1, 1, 4), np.float32)
    attn.step(good, good, good, state)
    for i in range(3):
        given = [good.copy() for _ in range(3)]
        given[i][...] = bad
        with pytest.raises(ValueError, match=f"^{'qkv'[i]}: "):
            attn.step(*given, state)
    assert state.position.tolist() == [1]


def test_sums_are_accumulated_as_written():
    """A long prefill of ones counts exactly up to 2^24: no lane is dropped and none is added twice."""
    attn = la.LinearAttention(1, 8, feature_map="relu", normalize=True)
    state = attn.init_state(1)
    T = 4099
    one = np.ones((1, T, 1, 8), np.float32)
    y = attn.prefill(one, one, one, state)
    np.testing.assert_array_equal(state.S, np.full((1, 1, 8, 8), T))
    np.testing.assert_array_equal(state.z, np.full((1, 1, 8), T))
    np.testing.assert_allclose(y, 1, rtol=3e-7)


UNMAPPED = """
import numpy as np, linattn_edge as la
rng = np.random.default_rng(0)
for threads in (1, 2):
    for options in ({}, {"update_rule": "gated_delta", "feature_map": "identity"}):
        attn = la.LinearAttention(32, 64, num_threads=threads, **options)
        q, k, v = rng.standard_normal((3, 1, 70, 32, 64), dtype=np.float32) * 0.1
        gates = {"g": np.full((1, 70, 32), -0.1, "f"), "beta": np.full((1, 70, 32), 0.5, "f")} if options else {}
        for mode in range(20):
            state = attn.init_state()
            y = attn.prefill(q, k, v, state, **gates)
            attn.write(k, v, state, **gates)
            attn.read(q, state)
            attn.step(q[:, 0].astype("d"), k[:, 0], v[:, 0], state, **{n: x[:, 0] for n, x in gates.items()})
print(np.isfinite(y).all())
"""


@pytest.mark.skipif(not JIT or sys.platform != "linux", reason="needs the compiler, and glibc")
def test_scratch_lives_as_long_as_the_kernel_that_uses_it():
    """With every block of memory unmapped as soon as it is freed, using one after that is a crash."""
    cache = os.environ.get("NUMBA_CACHE_DIR")
    assert python(UNMAPPED, NUMBA_CACHE_DIR=cache, MALLOC_MMAP_THRESHOLD_=4096).strip() == "True"


def test_two_threads_may_make_the_first_call():
    """The plan holds the address of φ's numbers: neither thread may free what the other computes with."""
    code = """
import sys, threading
import numpy as np, linattn_edge as la
sys.setswitchinterval(1e-5)
x = np.random.default_rng(0).standard_normal((3, 1, 1, 40)).astype("f")
la.warmup(la.LinearAttention(1, 40, feature_map=la.Taylor(2)))
wrong = []
def first(attn, barrier, right):
    barrier.wait()
    for _ in range(3):
        y = attn.step(*x, attn.init_state())
        wrong.extend([] if np.array_equal(y, right) else [y])
for _ in range(40):
    attn = la.LinearAttention(1, 40, feature_map=la.Taylor(2))
    right = la.LinearAttention(1, 40, feature_map=la.Taylor(2))
    right = right.step(*x, right.init_state())
    barrier = threading.Barrier(4)
    crowd = [threading.Thread(target=first, args=(attn, barrier, right)) for _ in range(4)]
    [t.start() for t in crowd]
    [t.join() for t in crowd]
print(len(wrong))
"""
    cache = os.environ.get("NUMBA_CACHE_DIR")
    assert python(code, NUMBA_CACHE_DIR=cache, MALLOC_MMAP_THRESHOLD_=4096, MALLOC_PERTURB_=85).strip() == "0"
