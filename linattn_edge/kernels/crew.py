"""How threads share one call: a control block of int64 that the caller and its helpers touch with atomics only.

The caller opens a job (the address of a state, see layout.py), and everybody, caller included,
takes chunks of heads from one counter until none is left. So a helper that is asleep, late or descheduled costs nothing
but its help. The caller then closes the job and waits until no helper is inside; only then may the next job be
written.

A helper announces itself (INSIDE) before it looks at TICKET, and the caller closes TICKET before it looks at INSIDE:
with sequentially consistent atomics no helper can be working on a job that the caller believes finished.
"""

import sys
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from linattn_edge.kernels.jit import DISABLED, device

# Fields, a cache line (8 int64) apart where several threads write.
BUSY = 0  # 1 while a caller owns the block
TICKET = 8  # odd while a job is open
NEXT = 16  # the next head to take
INSIDE = 24  # helpers that may be looking at the job
LIMIT = 40  # helpers that this job may have
CHUNK = 48  # state heads that are taken at once
JOB = 56  # the address of the state whose header holds the job
SIZE = 64

CHUNKS = 4  # chunks for each thread: the last one to finish is not late by much
SPINS = 20_000  # looks at TICKET before a helper goes to sleep: some 0.2 ms
PATIENCE = 2_000  # looks at INSIDE before the caller gives its core away between looks


def _ordered(kind: str) -> Any:
    """An atomic read-modify-write of control[at]: returns the value before."""

    @intrinsic
    def operation(typing: Any, control: Any, at: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.atomic_rmw(kind, builder.gep(data, [args[1]]), args[2], "seq_cst")

        return types.int64(control, types.intp, types.int64), code

    return operation


add = _ordered("add")  # add(control, at, n)
swap = _ordered("xchg")  # swap(control, at, n)


@intrinsic
def change(typing: Any, control: Any, at: Any, old: Any, new: Any) -> Any:
    """control[at] = new if it is old: returns what it was."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        found = builder.cmpxchg(builder.gep(data, [args[1]]), args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(found, 0)

    return types.int64(control, types.intp, types.int64, types.int64), code


@intrinsic
def get(typing: Any, control: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(control, types.intp), code


@intrinsic
def relax(typing: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if llvmlite.binding.get_process_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), code


if sys.platform == "win32":
    give_way = relax
else:
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @device
    def give_way():
        _sched_yield()


@device
def open_job(control, total):
    """Let helpers in. The caller owns the block (BUSY) and has written the job."""
    chunk = total // (CHUNKS * (control[LIMIT] + 1))
    control[CHUNK] = chunk if chunk > 0 else 1
    swap(control, NEXT, 0)
    add(control, TICKET, 1)


@device
def close_job(control):
    """Let nobody in any more, and wait for those who are."""
    add(control, TICKET, 1)
    looks = 0
    while get(control, INSIDE) > 0:
        looks += 1
        if looks < PATIENCE:
            relax()
        else:
            give_way()
    swap(control, BUSY, 0)


@device
def enter(control, ticket):
    """Whether a helper may take chunks of the job with that ticket; if so it must `leave`."""
    inside = add(control, INSIDE, 1)
    if get(control, TICKET) == ticket and inside < get(control, LIMIT):
        return True
    add(control, INSIDE, -1)
    return False


@device
def leave(control):
    add(control, INSIDE, -1)


def _change(control: Any, at: int, old: int, new: int) -> int:
    was = control[at]
    if was == old:
        control[at] = new
    return int(was)


def _swap(control: Any, at: int, new: int) -> int:
    was = control[at]
    control[at] = new
    return int(was)


if DISABLED:  # interpreted loops are serial: nobody opens a job
    add = get = relax = None
    change, swap = _change, _swap
