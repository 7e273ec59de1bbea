"""The suites: one module and one entry of SUITES each."""

from linattn_edge.bench.suites import context, cuda, model, prefill, startup, step, streams
from linattn_edge.bench.suites.base import Job, Settings, Suite

SUITES = {
    "step": Suite("one token, by rule, heads, widths and streams; peers; the memory's share", step.plan, step.tables),
    "context": Suite("a token at every position of a long stream, and softmax", context.plan, context.tables),
    "prefill": Suite("a prompt in one call, by its length", prefill.plan, prefill.tables),
    "streams": Suite("many streams at once", streams.plan, streams.tables),
    "model": Suite("a whole language model: reading, first token, writing", model.plan, model.tables),
    "startup": Suite("imports, and the first call cold and warm", startup.plan, startup.tables),
}

ON_CUDA = {
    "step": Suite("one token, by rule, heads, widths and streams; torch; the memory's share", cuda.plan, cuda.tables),
    "prefill": Suite("a prompt in one call, by its length", cuda.plan_prefill, cuda.prefill_tables),
}
BY_DEVICE = {"cpu": SUITES, "cuda": ON_CUDA}
REPORTED = SUITES | {cuda.STEP: ON_CUDA["step"], cuda.PREFILL: ON_CUDA["prefill"]}  # by the name in a report

__all__ = ["BY_DEVICE", "ON_CUDA", "REPORTED", "SUITES", "Job", "Settings", "Suite"]
