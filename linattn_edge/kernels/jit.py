"""The one place with Numba options and the cache policy.

`device(fn)` marks a plain function as callable from any kernel, on any target. `kernel` compiles an entry
point for one signature, caches it, and refuses every other signature with a TypeError; `core` compiles what entries
share.

Numba's own cache only watches the file that holds the jitted function, and what its closure holds. Here what is looked
up is a name and a hash of every source file that can end up in a kernel: edit or upgrade one in place and the old
machine code is not found.
"""

import functools
import gc
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, NullCache
from numba.core.ccallback import CFunc
from numba.extending import intrinsic, overload, register_jitable
from numba.np.numpy_support import as_dtype

from linattn_edge.kernels import maths

DISABLED = bool(numba.config.DISABLE_JIT)  # NUMBA_DISABLE_JIT=1: the same loops, interpreted

# nnan and ninf stay off: NaN and inf mean what they say. reassoc lets sums vectorise.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": {"nsz", "contract", "reassoc"},  # a set: sort it where order shows
}
EXACT = OPTIONS | {"fastmath": {"nsz"}}


def _source_stamp() -> int:
    here = Path(__file__).parent
    digest = hashlib.sha256(repr(sorted(OPTIONS["fastmath"])).encode())
    for path in sorted([*here.glob("*.py"), here.parent / "rules.py", here.parent / "features.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return int.from_bytes(digest.digest()[:6], "little")


SOURCE_STAMP = _source_stamp()


def device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` itself, from now on callable from compiled code (CPU, CUDA and the CUDA simulator), and inlined there."""
    return register_jitable(forceinline=True, no_cfunc_wrapper=True)(fn)


def large(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function too large to inline, or that is called from many places."""
    return register_jitable(no_cfunc_wrapper=True)(fn)


def switch(functions: Sequence[Callable[..., Any]], arguments: str) -> Callable[..., Any]:
    """A function `choose(code, <arguments>)` that calls functions[code](<arguments>).

    It is written out as an if-chain, since Numba can't index a table of functions without an indirect call.
    """
    names = {f"function{code}": device(function) for code, function in enumerate(functions)}
    lines = [f"def choose(code, {arguments}):"]
    lines += [f"    if code == {code}: return {name}({arguments})" for code, name in enumerate(names)]
    exec("\n".join(lines), names)
    return device(names["choose"])


def kernel(function: Callable[..., int], name: str, signature: tuple[Any, ...]) -> Callable[..., int]:
    """`function`, compiled for exactly one signature; two that are called the same must do the same."""
    if DISABLED:
        return _interpreted(function, signature)
    entry = njit(**OPTIONS)(function)
    _compile(entry, function, name, lambda: entry.compile(signature))
    entry.disable_compile()
    return entry


def core(function: Callable[..., int], name: str | None, signature: tuple[Any, ...], exact: bool = False) -> int:
    """The same for a function that compiled code reaches by its address, which this returns: see `call`.

    Whatever calls it need not compile it again, as Numba does with all that is inlined or linked. Without a name it is
    not cached. `exact`: sums are made in the order in which they are written, lanes too; else a compensation is what
    the compiler takes for zero.
    """
    if DISABLED:
        _CORES.append(function)
        return len(_CORES) - 1
    made = CFunc(function, (signature, types.int64), locals={}, options=EXACT if exact else OPTIONS)
    _compile(made, function, name, made.compile)
    _CORES.append(made)
    address: Any = made.address
    return int(address)


_CORES: list[Any] = []  # lives as long as the process: addresses must stay good


def _call_interpreted(address: int, *args: Any) -> None:
    _CORES[address](*args)


@intrinsic
def _call(typing: Any, address: Any, *args: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.IntType(64), [value.type for value in given])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.StarArgTuple(args)), code


call = _call_interpreted if DISABLED else _call  # call(address, ...): run a core


def _compile(made: Any, function: Callable[..., int], name: str | None, compile_: Callable[[], Any]) -> None:
    """Compile, or load from the cache: from what was compiled under that name from the same sources."""
    collecting = gc.isenabled()
    gc.disable()  # a tenth of a compilation is Python looking for garbage among a million live objects
    try:
        if name is not None:
            try:
                # Files of its own: two processes that add to one index at once can file code under another's name.
                function.__qualname__ = name.replace(" ", "_")
                made.enable_caching()  # RuntimeError: "no locator available"
                made._cache._index_key = lambda signature, codegen: (
                    signature,
                    codegen.magic_tuple(),
                    name,
                    SOURCE_STAMP,
                )
                compile_()
                return
            except Exception:  # a full disk, or a file that was cut or is not one: unpickling that can raise anything
                _warn_uncached()
                made._cache = NullCache()
        compile_()
    finally:
        if collecting:
            gc.enable()


CUDA_OPTIONS: dict[str, Any] = {"fastmath": False}  # NaN and inf mean what they say; a·b + c is fused all the same


def cuda_simulated() -> bool:
    """Whether CUDA kernels run in Numba's simulator (NUMBA_ENABLE_CUDASIM=1): in Python, on the CPU."""
    return bool(numba.config.ENABLE_CUDASIM)


def cuda_device(function: Callable[..., Any]) -> Any:
    """`function` as one that CUDA kernels can call."""
    from numba import cuda

    return function if cuda_simulated() else cuda.jit(device=True, forceinline=True, **CUDA_OPTIONS)(function)


def cuda_kernel(function: Callable[..., Any], threads: int) -> Any:
    """`function` as a CUDA kernel, compiled for the GPU and the types that it is first launched with.

    threads: those of a block; the compiler keeps to the registers that there are for them.
    """
    from numba import cuda

    options = {} if cuda_simulated() else CUDA_OPTIONS | {"launch_bounds": threads}
    return cuda.jit(**options)(function)


@functools.cache
def _warn_uncached() -> None:
    """Once a process: functools.cache is the memory."""
    warnings.warn(
        "kernels are compiled in this process alone: no cache folder can be written, or what is in it is damaged; set "
        "NUMBA_CACHE_DIR to a good one",
        RuntimeWarning,
        stacklevel=2,
    )


def _interpreted(function: Callable[..., int], signature: tuple[Any, ...]) -> Callable[..., int]:
    """`function` itself, with a compiled one's manners: other types are refused, and overflow is silent."""

    def call(*args: Any) -> int:
        for value, kind in zip(args, signature, strict=True):
            if isinstance(kind, types.Array) and not (
                isinstance(value, np.ndarray)
                and value.ndim == kind.ndim
                and value.dtype == as_dtype(kind.dtype)
                and value.flags.c_contiguous
                and (value.flags.writeable or not kind.mutable)
            ):
                raise TypeError(f"expected {kind}, got {value!r}")
        with np.errstate(all="ignore"):
            return function(*args)

    return call


def cache_folder() -> str | None:
    """Where compiled kernels are kept, or None when no folder can be written."""

    def probe() -> None: ...

    probe.__code__ = probe.__code__.replace(co_filename=str(Path(__file__).with_name("cpu.py")))
    try:
        return str(CompileResultCacheImpl(probe).locator.get_cache_path())
    except RuntimeError:
        return None


@intrinsic
def _bitcast(typing, bits):
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic
def _bits(typing, x):
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@overload(maths.to_bits)
def _to_bits(x):
    return lambda x: _bits(x)


@overload(maths.from_bits)
def _from_bits(bits):
    return lambda bits: _bitcast(bits)


exp32 = device(maths.exp32)
cos, sin = device(maths.cos), device(maths.sin)


@overload(maths.exp)
def _exp(x):
    if x == types.float32:
        return lambda x: exp32(x)
    return lambda x: math.exp(x)
