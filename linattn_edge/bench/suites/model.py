"""A whole model: reading a prompt, the time to the first token, writing on."""

from functools import partial

import numpy as np

from linattn_edge.bench.record import Group
from linattn_edge.bench.suites.base import Built, Job, Settings, measure
from linattn_edge.bench.turns import Array, Run, timed
from linattn_edge.bench.views import ABSENT, Table, figure, figures, memory, word
from linattn_edge.models import Model, load_model

DECODE = "decode"


def plan(settings: Settings) -> list[Job]:
    """One job: all of it takes turns."""
    name = "bundled" if settings.model is None else settings.model.name
    return [Job(f"the {name} model", partial(whole, settings, name))]


def whole(settings: Settings, name: str) -> Group:
    """Decoding from a short and from a long past, and prompts of several lengths."""
    model = load_model(settings.model)
    lengths = (16, 128) if settings.quick else (16, 128, 1024)
    case = {"model": name, "layers": len(model.layers), "hidden": model.hidden_size, "weights": model.weights}
    group = Group("model", f"the {name} model", case)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, lengths[-1])
    state = model.init_state()

    def build() -> Built:
        own = model.init_state()
        model.prefill(ids[None, : lengths[0]], own)
        prompts = {f"prompt of {T}": first_token(model, ids[None, :T]) for T in lengths}
        return {DECODE: timed(lambda: model.step([1], own)), **prompts}, {}

    measure(group, settings, build)
    for row, T in zip(group.rows[1:], lengths, strict=True):
        row.case["T"], row.unit = T, "ms"
    for row in group.rows:
        assert row.time is not None
        seconds = row.time["p50"] * (1e-3 if row.unit == "ms" else 1e-6)
        row.values["tokens/s"] = row.case.get("T", 1) / seconds
    group.values |= {"weights bytes": model.nbytes, "state bytes": state.nbytes}
    return group


def first_token(model: Model, prompt: Array) -> Run:
    """ms from a prompt and an empty state to the likeliest next token."""
    return timed(lambda: model.prefill(prompt, model.init_state(), logits="last").argmax(), units=1000)


def tables(groups: list[Group]) -> list[Table]:
    """A row for each thing that a model does."""
    found = []
    for group in groups:
        rows = []
        for row in group.rows:
            title = "write one token" if row.name == DECODE else f"read {row.case['T']:,} tokens, give the next"
            shown = figures(row.time, ("min", "p50", "p99"))
            rows.append([word(title), word(row.unit), *shown, figure(row.values["tokens/s"])])
        for title, key in (("the weights take", "weights bytes"), ("a stream's state takes", "state bytes")):
            rows.append([word(title), ABSENT, memory(group.values[key]), ABSENT, ABSENT, ABSENT])
        case = group.case
        found.append(
            Table(
                "A language model",
                f"{group.title[0].upper()}{group.title[1:]}: {case['layers']} layers, {case['hidden']} wide, "
                f"{case['weights']} weights, one stream, one thread. Reading ends with the first token that follows.",
                ["to …", "unit", "least", "median", "p99", "tokens/s"],
                rows,
                left=2,
            )
        )
    return found
