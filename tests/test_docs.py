"""The pages in docs/: every ```python block runs, and prints what the ```text block after it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.nojit

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "state-equation.md"

FENCES = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:\s*?\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def failures(page: str, name: str = "page") -> list[str]:
    """Run the python blocks of a page in order, in one namespace; a line for each that prints something else.

    A block without a text block directly after it is to print nothing. Tracebacks have the line of the page.
    """
    namespace = {"__name__": name}
    found = []
    for example in EXAMPLE.finditer(page):
        code, expected = example[1], example[2] or ""
        line = page.count("\n", 0, example.start(1))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, name, "exec"), namespace)
        if printed.getvalue() != expected:
            found.append(f"{name}, block at line {line + 1}: expected\n{expected}printed\n{printed.getvalue()}")
    return found


def with_one_digit_changed(text: str) -> str:
    at = max(i for i, c in enumerate(text) if c.isdigit())
    return f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"


def altered(page: str) -> str:
    """The page with another last digit in each text block that has one."""

    def change(example: re.Match[str]) -> str:
        if example[2] is None or not re.search(r"\d", example[2]):
            return example[0]
        at = example.start(2) - example.start()
        return example[0][:at] + example[0][at:].replace(example[2], with_one_digit_changed(example[2]))

    return EXAMPLE.sub(change, page)


def test_the_page_prints_what_it_says():
    assert not failures(PAGE.read_text(encoding="utf-8"), PAGE.name)


def test_the_page_on_export_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "export.md"
    assert not failures(page.read_text(encoding="utf-8"), page.name)


def test_the_page_on_streams_prints_what_it_says():
    page = DOCS / "streams.md"
    assert not failures(page.read_text(encoding="utf-8"), page.name)


def test_an_altered_number_on_the_page_is_found():
    page = PAGE.read_text(encoding="utf-8")
    numbers = [e for e in EXAMPLE.finditer(page) if e[2] and re.search(r"\d", e[2])]
    assert len(numbers) >= 10
    assert len(failures(altered(page), PAGE.name)) == len(numbers)


SMALL = "```python\nx = 3\n```\n\n```python\nprint(x / 4, 'é')\n```\n\n```text\n0.75 é\n```\n"


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (SMALL, 0),
        (SMALL.replace("0.75", "0.76"), 1),
        (SMALL.replace("0.75", "0.750"), 1),
        (SMALL.replace("0.75 é\n", "0.75 é\n\n"), 1),
        (SMALL.replace("```text", "and so\n\n```text"), 1),  # not directly after it
        (SMALL.replace("x = 3", "print(3)\nx = 3"), 1),  # printed, but not on the page
        (SMALL.replace("```\n\n```text", "```\n```text"), 0),
        (altered(SMALL), 1),
    ],
)
def test_the_helper(page, wrong):
    assert len(failures(page)) == wrong


def test_a_block_that_raises_is_not_passed_over():
    with pytest.raises(ZeroDivisionError) as caught:
        failures(SMALL.replace("x / 4", "x / 0"))
    assert caught.traceback[-1].lineno == 5  # counted from 0: the line of the page


def test_every_text_block_belongs_to_a_python_block():
    page = PAGE.read_text(encoding="utf-8")
    kinds = [fence[0].split("\n", 1)[0] for fence in FENCES.finditer(page)]
    assert set(kinds) == {"```python", "```text"}
    assert kinds.count("```text") == sum(e[2] is not None for e in EXAMPLE.finditer(page))


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
