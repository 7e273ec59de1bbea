"""GPU kernels compiled to PTX and assembled, where numba-cuda is installed: that needs no GPU.

No number is float64, S stays in registers, nothing is called, and no register is spilled.
"""

import importlib.util
import re
from itertools import product

import pytest

import linattn_edge as la
from cases import OF_HEADS, SAMPLES, VARIANTS, make
from linattn_edge.kernels.layout import READ, STEP, WRITE

CARDS = ((7, 5), (8, 0), (9, 0))


def toolchain():
    """Why nothing can be compiled to PTX here, or None."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    try:
        from numba import cuda
        from numba.cuda import types

        f = types.float32[::1]
        cuda.compile_ptx(lambda x: None, (f,), cc=(7, 5))
    except Exception as error:
        return f"nothing compiles to PTX: {' '.join(str(error).split())[:200]}"
    return None


@pytest.fixture(scope="module")
def compiler():
    """numba-cuda's, asked as its `compile_ptx` asks it; skips without one.

    It asks the current device how to compile device functions: this one is made up.
    """
    reason = toolchain()
    if reason:
        pytest.skip(reason)
    import numba.cuda.dispatcher
    from numba.cuda.compiler import _compile_pyfunc_with_fixup

    class Device:
        compute_capability = CARDS[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: Device)
        yield _compile_pyfunc_with_fixup


def ptx(compiler, attn, mode, width, many, ragged):
    """A kernel as PTX for each card, and the threads of its blocks. What Numba makes of it is the same for all."""
    from numba.cuda import types

    from linattn_edge.kernels.cuda import build

    f, n = types.float32[::1], types.int64[::1]
    kernel, shape = build(attn.layer, mode, width, many, ragged, True)
    signature = (f, f, f, f, f, n, f, f, f, n, f, types.int32[::1], types.int64)
    threads = shape.columns * shape.threads
    library, _ = compiler(
        kernel, signature, device=False, fastmath=False, cc=CARDS[0], abi="numba", launch_bounds=threads
    )
    return {cc: library.get_asm_str(cc=cc) for cc in CARDS}, threads


def assemble(code, cc):
    """Registers of a thread, and bytes of them that had no room; None where there is no assembler."""
    try:
        from cuda.bindings import nvjitlink

        link = nvjitlink.create(2, [f"-arch=sm_{cc[0]}{cc[1]}", "-Xptxas=-v"])
    except Exception:
        return None
    nvjitlink.add_data(link, nvjitlink.InputType.PTX, code.encode(), len(code.encode()), "kernel")
    nvjitlink.complete(link)
    log = bytearray(nvjitlink.get_info_log_size(link))
    nvjitlink.get_info_log(link, log)
    nvjitlink.destroy(link)
    registers = re.search(r"Used (\d+) registers", log.decode())
    spilled = re.search(r"(\d+) bytes spill stores", log.decode())
    return int(registers[1]), int(spilled[1])


def check(compiler, attn, mode, many, width=None):
    """Compile a kernel for each card and look at it. Returns {card: what `assemble` says}."""
    if width is None:
        width = 1 if mode != READ and attn.layer.rule.decay else 0
    codes, threads = ptx(compiler, attn, mode, width, many, many)
    found = {}
    for cc, code in codes.items():
        assert f".target sm_{cc[0]}{cc[1]}" in code
        assert not re.findall(r"^.*\.f64\b.*$", code, re.MULTILINE)
        if attn.layer.F <= 64:
            assert ".local" not in code  # S stays in registers
        assert not re.findall(r"^\s*call", code, re.MULTILINE)
        found[cc] = made = assemble(code, cc)
        if made is not None:
            registers, spilled = made
            assert registers * threads <= 65536  # all that a block can have
            assert spilled == 0
    return found


LAYERS = {
    "linear": {"num_kv_heads": 1},
    "gated": {"feature_map": "identity", "normalize": True},
    "delta": {"feature_map": "identity", "qk_norm": True, "num_value_heads": 4},
    "gated_delta": {"feature_map": "elu"},
}
COMPILED = [
    *[(rule, LAYERS[rule], mode, many) for rule in LAYERS for mode, many in ((STEP, False), (STEP, True))],
    *[(rule, LAYERS[rule], mode, True) for rule in ("linear", "gated_delta") for mode in (WRITE, READ)],
    *[("linear", {"feature_map": name}, STEP, False) for name in SAMPLES],
    ("gated_delta", {"feature_map": la.Taylor(order=2), "key_dim": 48}, STEP, True),
    ("gated_delta", {"feature_map": la.Dpfp(nu=4), "key_dim": 64}, STEP, True),
]


@pytest.mark.parametrize(("rule", "options", "mode", "many"), COMPILED)
def test_ptx_without_float64(compiler, rule, options, mode, many):
    name, K = options.get("feature_map", "elu"), options.get("key_dim", 16)
    phi = make(phi=name, K=K).maps[0] if isinstance(name, str) else name
    attn = la.LinearAttention(2, **({"key_dim": K, "update_rule": rule} | options | {"feature_map": phi}))
    width = 0 if mode == READ or not attn.layer.rule.decay else attn.layer.F if many else 1
    check(compiler, attn, mode, many, width)


def everything():
    """A step of every rule, gate, normaliser, layout and map of the library."""
    for rule, gate in VARIANTS:
        for normalize, layout in product((False,) if "delta" in rule else (False, True), ("mha", "gqa", "gva")):
            for name in (*SAMPLES, *OF_HEADS):
                yield rule, gate, normalize, layout, name


@pytest.mark.slow
@pytest.mark.parametrize("case", list(everything()), ids=str)
def test_ptx_of_everything(compiler, case):
    rule, gate, normalize, layout, name = case
    attn = make(rule, gate and "head", layout, name, B=1, T=1, K=16, V=32, normalize=normalize).attn
    check(compiler, attn, STEP, False, {None: 0, "head": 1, "channel": attn.layer.F}[gate])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [STEP, WRITE, READ])
@pytest.mark.parametrize("name", [*SAMPLES, *OF_HEADS])
def test_ptx_of_sequences(compiler, name, mode):
    attn = make("gated", "head", "gqa", name, B=1, T=1, K=16, V=32, normalize=True).attn
    check(compiler, attn, mode, True)
