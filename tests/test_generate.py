"""`linattn-edge generate` and `demo`: what they print, in a pipe, on a terminal, and when they are stopped."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import linattn_edge as la
from checkpoints import BASE, make_tensors, write
from linattn_edge import cli, demo, generate
from linattn_edge.models import bundled
from linattn_edge.models.tokenizer import ByteTokenizer

COMMAND = [sys.executable, "-m", "linattn_edge"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small byte-level checkpoint with random weights."""
    config = BASE["gla"] | {"vocab_size": 256}
    return write(tmp_path_factory.mktemp("bytes"), config, make_tensors(config))


@pytest.fixture
def stdin(monkeypatch):
    """Put bytes on standard input."""

    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def generated(capsys, *arguments):
    assert cli.main(["generate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_text_is_what_the_model_generates(folder, capsys):
    model = la.load_model(folder)
    expected = bytes(model.generate(list(b"In the"), 50, temperature=0.8, seed=3)).decode("utf-8", "replace")
    found = generated(capsys, "--model", folder, "--prompt", "In the", "--tokens", 50, "--seed", 3)
    assert found["text"] == expected
    assert found["tokens"] == 50 and found["prompt_tokens"] == 6
    assert found["state_bytes"] == model.init_state().nbytes
    assert found["tokens_per_second"] > 0 and found["seconds_to_first_token"] > 0


@pytest.mark.parametrize("data", [b"one line", b"two\nlines\n", "wörds ✓\n".encode() * 9000, b"no line end " * 12000])
def test_standard_input_is_read_whole(data, folder, capsys, stdin):
    stdin(data)
    found = generated(capsys, "--model", folder, "--tokens", 20, "--seed", 0)
    model = la.load_model(folder)
    state = model.init_state()
    model.prefill([list(data[:-1])], state, logits="last")
    expected = bytes(model.generate([data[-1]], 20, temperature=0.8, seed=0, state=state)).decode("utf-8", "replace")
    assert found["prompt_tokens"] == len(data)
    assert found["text"] == expected


def test_a_character_cut_between_two_reads_is_whole(monkeypatch, stdin):
    monkeypatch.setattr(generate, "PIECE", 4)
    text = "äöü✓€ a\nlonger line without an end\n" * 3
    stdin(text.encode())
    pieces = list(generate.standard_input())
    assert "".join(pieces) == text
    assert len(pieces) > 3


def test_bytes_that_are_no_text_are_read_as_they_are(stdin, folder, capsys):
    raw = b"a\xff\xfeb\xc3" * 30_000
    stdin(raw)
    assert generated(capsys, "--model", folder, "--tokens", 1)["prompt_tokens"] == len(raw)
    stdin(raw)
    assert b"".join(bytes(ByteTokenizer().encode(piece)) for piece in generate.standard_input()) == raw
    prompt = b"x\xff".decode("utf-8", "surrogateescape")  # as Python gives arguments
    assert generated(capsys, "--model", folder, "--prompt", prompt, "--tokens", 1)["prompt_tokens"] == 2


def test_text_goes_to_standard_output_and_figures_to_the_other(folder, capsys):
    assert cli.main(["generate", "--model", str(folder), "--prompt", "x", "--tokens", "9", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    expected = bytes(la.load_model(folder).generate([ord("x")], 9, temperature=0.8, seed=1)).decode("utf-8", "replace")
    assert out == expected + "\n"
    assert re.fullmatch(r"9 tokens after 1 of the prompt: .* s, [\d,]+ tokens/s; state .* KiB, at any length\n", err)


@pytest.mark.parametrize("tokens", [0, 1])
def test_hardly_any_tokens(tokens, folder, capsys):
    found = generated(capsys, "--model", folder, "--prompt", "x", "--tokens", tokens)
    assert found["tokens"] == tokens and found["tokens_per_second"] is None
    assert found["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--temperature", "-1"], "temperature: expected a number from 0 to 1e6, got -1.0"),
        (["--prompt", "x", "--top-k", "0"], "top_k: expected a whole number .*, got 0"),
        (["--prompt", "x", "--top-p", "2"], "top_p: expected .*, got 2.0"),
        (["--prompt", "x", "--tokens", "-3"], "--tokens: expected a whole number .*, got -3"),
        (["--prompt", "x", "--seed", "-3"], "--seed: expected a whole number .*, got -3"),
        (["--prompt", "x", "--model", "/nowhere"], "/nowhere/config.json: there is no such file"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, folder, capsys):
    model = [] if "--model" in arguments else ["--model", str(folder)]
    assert cli.main(["generate", *model, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"linattn-edge: error: {message}.*\n", err)


def test_empty_standard_input_is_an_empty_prompt(folder, capsys, stdin):
    stdin(b"")
    assert cli.main(["generate", "--model", str(folder)]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_terminal_is_no_prompt(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate", "--model", str(folder)]) == 1
    assert "give --prompt TEXT, or text on standard input" in capsys.readouterr().err


def test_the_config_says_what_ends_a_text(tmp_path, capsys):
    config = BASE["gla"] | {"vocab_size": 256, "eos_token_id": [*range(256), 256, -1]}
    folder = write(tmp_path, config, make_tensors(config))
    assert la.load_model(folder).eos == tuple(range(256))
    assert generated(capsys, "--model", folder, "--prompt", "x")["tokens"] == 0
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": "end"}))
    assert cli.main(["generate", "--model", str(folder), "--prompt", "x"]) == 1
    assert "eos_token_id: expected int or list or null, got 'end'" in capsys.readouterr().err


def test_control_characters_do_not_reach_a_terminal(capsys, monkeypatch):
    from linattn_edge import terminal

    text = "a\x1b[31mb\n\tc\x07\x9b"
    assert terminal.readable(text) == text  # a pipe gets what there is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal.readable(text) == "a\ufffd[31mb\n\tc\ufffd\ufffd"


def test_what_the_terminal_cannot_show_is_no_error(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main(["compare", "--tokens", "8", "--maps", "elu", "--lengths", "8"]) == 0
    assert b"?s/token" in raw.getvalue()  # µs


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_outputs(closed, folder):
    code = (
        f"import sys; sys.{closed} = None\n"
        f"from linattn_edge import cli; sys.exit(cli.main(['generate', '--model', {str(folder)!r}, '--prompt', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    if closed == "stdout":
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr == b"linattn-edge: error: standard output is closed\n"
    else:
        assert done.returncode == 0 and done.stdout and not done.stderr


def test_marks_stand_at_the_ends_of_a_long_text(monkeypatch):
    read = []

    class Model:
        def prefill(self, ids, state, logits):
            read.extend(ids[0])
            state.position[0] += len(ids[0])

    class Tokenizer:
        def encode(self, text):
            return [ord(c) for c in text]

        def marks(self):
            return [1], [2, 3]

    state = SimpleNamespace(position=[0])
    last = generate.read(Model(), Tokenizer(), iter(["ab", "cd", "ef"]), state)
    assert read + last == [1, *map(ord, "abcdef"), 2, 3]


def test_status_is_for_terminals(capsys, monkeypatch):
    from linattn_edge import terminal

    terminal.status("busy")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    terminal.status("busy")
    terminal.status("")
    assert capsys.readouterr().err.endswith(" " * 60 + "\r")


def endless(folder):
    return [*COMMAND, "generate", "--model", str(folder), "--prompt", "x", "--tokens", "100000000"]


def test_a_closed_pipe_ends_it(folder):
    with subprocess.Popen(endless(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_ctrl_c_leaves_the_terminal_as_it_was(folder):
    import termios

    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(endless(folder), stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.read(ours, 1)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        end = time.monotonic() + 60
        shown = b""
        while process.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
        assert process.poll() == 130
    assert termios.tcgetattr(theirs) == before
    assert b"Traceback" not in shown and b"\x1b" not in shown
    os.close(ours)
    os.close(theirs)


def test_memory_stays_flat_on_a_long_prompt(folder):
    code = (
        "import resource, sys; from linattn_edge import cli\n"
        f"cli.main(['generate', '--model', {str(folder)!r}, '--tokens', '1'])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    if sys.platform == "win32":
        pytest.skip("needs getrusage")
    most = []
    for size in (1 << 14, 1 << 20):
        text = np.random.default_rng(0).integers(97, 123, size, np.uint8).tobytes()
        done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, check=True)
        most.append(int(done.stdout.split()[-1]))
    assert most[1] < most[0] + 20_000  # KiB; the text alone as a list of Python numbers would be 8 MiB, as logits 1 GiB


def test_demo_says_what_it_measures(capsys, monkeypatch, tmp_path):
    text = demo.sample_text()
    assert len(text) == 100_001
    monkeypatch.setattr(demo, "sample_text", lambda: text[-2001:])
    monkeypatch.setattr(demo, "POSITIONS", (100, 1000, 2000))
    monkeypatch.setattr(demo, "TURNS", 2)
    path = tmp_path / "demo.png"
    assert cli.main(["demo", "--plot", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out
    assert "It reads 2,001 bytes" in out and "bits a byte" in out
    assert re.search(r"^2,000 +\d+ +48.0 KiB +\d+ +8.8 MiB$", out, re.MULTILINE)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["position"] for row in found["rows"]] == [100, 1000, 2000]
    assert len(found["continuation"].encode()) >= 300 and found["continuation"] in out  # the seed is fixed
    model = la.load_model()
    ids = np.frombuffer(text[-2001:], np.uint8)
    logits = model.prefill([ids[:-1].tolist()], model.init_state())[0].astype(np.float64)
    logs = logits[np.arange(2000 - 1), ids[1:-1]] - np.log(np.exp(logits[:-1]).sum(axis=1))
    assert found["bits_per_byte"] == pytest.approx(-logs.mean() / np.log(2), rel=1e-6)


def test_demo_refuses_a_plot_it_cannot_make_before_it_starts(capsys):
    assert cli.main(["demo", "--plot", "x.gif"]) == 1
    assert capsys.readouterr() == (
        "",
        "linattn-edge: error: --plot: expected a file that ends in .png, .pdf or .svg, got x.gif\n",
    )


def bits_per_byte(model, text):
    ids = np.frombuffer(text, np.uint8)
    logits = model.prefill(ids[None, :-1].astype(np.int64), model.init_state())[0].astype(np.float64)
    logs = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1))
    return -logs.mean() / np.log(2)


def test_the_bundled_model_in_int8_is_nearly_as_good():
    text = demo.sample_text()[:20_000]
    exact = bits_per_byte(la.load_model(), text)
    assert exact < 2.1  # 1.99 over the whole of the sample
    assert bits_per_byte(la.load_model(weights="int8"), text) == pytest.approx(exact, rel=0.01)


def test_the_bundled_model_is_small():
    assert sum(path.stat().st_size for path in bundled().iterdir()) < 4_000_000


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_seed_gives_one_text_on_any_number_of_threads(threads):
    environment = os.environ | {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    arguments = ["generate", "--prompt", "And it came to pass", "--tokens", "300", "--seed", "7"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, check=True, env=environment)
    model = la.load_model()
    expected = bytes(model.generate(list(b"And it came to pass"), 300, temperature=0.8, seed=7))
    assert done.stdout == expected.decode("utf-8", "replace").encode() + b"\n"
