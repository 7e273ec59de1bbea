"""The same files in every runtime: Python's, node's by the driver in examples/, and the page in Chromium.

What is not installed is skipped, by its name.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import linattn_edge as la
import linattn_export as lx
from checkpoints import BASE, make_tensors, write
from chromium import Chromium

pytest.importorskip("onnxruntime")

EXAMPLES = Path(__file__).parents[1] / "examples"
NPM_SECONDS = 120
PROMPT = "In the beginning"
LAYERS = {  # layer options, export options
    "linear, fused": ({}, {}),
    "gated_delta, GVA, fused": (
        {"num_value_heads": 4, "feature_map": "identity", "update_rule": "gated_delta", "qk_norm": True},
        {},
    ),
    "cosformer with positions, fused": ({"feature_map": la.CosFormer(max_len=64)}, {}),
    "gated by channel, portable": (
        {"feature_map": "identity", "update_rule": "gated"},
        {"flavor": "portable", "decay": "channel"},
    ),
    "delta, portable step": (
        {"feature_map": "identity", "update_rule": "delta", "qk_norm": True},
        {"flavor": "portable", "batch_size": 1, "tokens": 1},
    ),
}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


driver = load(EXAMPLES / "onnx_stream.py")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """All layers as files, and a byte-level model with random weights."""
    folder = tmp_path_factory.mktemp("files")
    for name, (layer, options) in LAYERS.items():
        lx.export_layer(la.LinearAttention(num_heads=2, key_dim=8, **layer), folder / f"{name}.onnx", **options)
    config = BASE["gla"] | {"vocab_size": 256, "use_short_conv": True}
    lx.export_model(la.load_model(write(folder / "checkpoint", config, make_tensors(config))), folder / "model.onnx")
    return folder


@pytest.fixture(scope="session")
def modules(pytestconfig, tmp_path_factory):
    """node_modules as examples/package-lock.json has it, kept in pytest's cache."""
    runtimes = "onnxruntime-node and onnxruntime-web"
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip(f"{runtimes}: node and npm are not installed")
    wanted = [EXAMPLES / name for name in ("package.json", "package-lock.json", ".npmrc")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in wanted)).hexdigest()[:12]
    cache = getattr(pytestconfig, "cache", None)
    base = tmp_path_factory.mktemp("npm") if cache is None else cache.mkdir("npm")
    target = base / digest
    if not target.exists():
        fresh = base / f"{digest}.{os.getpid()}"
        fresh.mkdir()
        for path in wanted:
            shutil.copy(path, fresh)
        try:
            done = subprocess.run(
                ["npm", "ci", "--no-audit", "--no-fund"], cwd=fresh, capture_output=True, text=True, timeout=NPM_SECONDS
            )
            failed = done.stderr.strip().splitlines()[-1:] if done.returncode else None
        except subprocess.TimeoutExpired:
            failed = [f"npm took more than {NPM_SECONDS} s"]
        if failed is not None:
            shutil.rmtree(fresh, ignore_errors=True)
            pytest.skip(f"{runtimes}: can't be installed ({' '.join(failed)})")
        if not target.exists():
            fresh.rename(target)
    return target / "node_modules"


@pytest.fixture(scope="module")
def stage(modules, tmp_path_factory):
    """The examples as they are after `npm ci`."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("onnx_stream.mjs", "package.json"):
        shutil.copy(EXAMPLES / name, folder)
    kept_out = shutil.ignore_patterns("vendor", "model.onnx", "__pycache__")
    shutil.copytree(EXAMPLES / "browser", folder / "browser", ignore=kept_out)
    (folder / "node_modules").symlink_to(modules)
    return folder


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnx-reference", "openvino", "tract"])
@pytest.mark.parametrize("name", [*LAYERS, "model"])
def test_python_runtimes_give_the_same_numbers(files, runtime, name):
    if importlib.util.find_spec({"onnx-reference": "onnx"}.get(runtime, runtime)) is None:
        pytest.skip(f"{runtime}: not installed")
    if name == "model":
        of = la.load_model(files / "checkpoint")
    else:
        of = la.LinearAttention(num_heads=2, key_dim=8, backend="reference", **LAYERS[name][0])
    assert lx.verify(files / f"{name}.onnx", of, (runtime,)).passed


def run(*command, **options):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, **options)


def heads(name, array, layer):
    """A packed token as the Python runtime takes it."""
    count = {"query": layer.H, "key": layer.HK, "value": layer.N}.get(name, layer.N)
    packed = array.reshape(*array.shape[:2], count, -1)[:, 0]
    return packed[..., 0] if name in ("decay", "beta") and packed.shape[-1] == 1 else packed


@pytest.mark.parametrize("name", LAYERS)
def test_the_python_driver_gives_the_runtimes_numbers(files, name):
    attn = la.LinearAttention(num_heads=2, key_dim=8, backend="reference", **LAYERS[name][0])
    stream = driver.Stream(driver.open_session(files / f"{name}.onnx"))
    times, found = driver.run_layer(stream, 40)
    assert len(times) == 40 and len(found["outputs"]) == 32
    state, call = attn.init_state(), stream.call(1)
    named = {"query": "q", "key": "k", "value": "v", "decay": "g", "beta": "beta"}
    for t, output in enumerate(found["outputs"]):
        driver.fill_wave(stream.contract, call.inputs, t)
        token = {named[n]: heads(n, array, attn.layer) for n, array in call.inputs.items()}
        y = attn.step(token.pop("q"), token.pop("k"), token.pop("v"), state, **token)
        np.testing.assert_allclose(output, y.ravel(), rtol=0, atol=2e-5)


def test_the_python_driver_begins_anew(files):
    stream = driver.Stream(driver.open_session(files / "cosformer with positions, fused.onnx"))
    first = driver.run_layer(stream, 7)[1]
    assert driver.run_layer(stream, 7)[1] != first
    stream.reset()
    assert driver.run_layer(stream, 7)[1] == first


def test_the_python_driver_allocates_nothing(files):
    stream = driver.Stream(driver.open_session(files / "linear, fused.onnx"))
    call = stream.call(1)
    driver.fill_wave(stream.contract, call.inputs, 1)
    for _ in range(10):
        stream.run(call)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(200):
            stream.run(call)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now - before < 1000 and peak - before < 4000  # the state alone has 2 × 8 × 9 × 4 = 576 bytes, twice


def test_the_python_driver_feeds_prompts_in_blocks(files):
    stream = driver.Stream(driver.open_session(files / "gated by channel, portable.onnx"))
    assert stream.lengths(300) == [128, 128, 44]
    stream = driver.Stream(driver.open_session(files / "delta, portable step.onnx"))
    assert stream.lengths(3) == [1, 1, 1]


def test_the_python_driver_as_a_script(files, tmp_path):
    script = EXAMPLES / "onnx_stream.py"
    done = run(sys.executable, script, "--tokens", 50)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^onnxruntime [\d.]+: [\d.]+ µs a token \(median of 50\)", done.stdout, re.MULTILINE)
    report = tmp_path / "report.json"
    done = run(sys.executable, script, files / "model.onnx", "--tokens", 20, "--json", report)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(report.read_text())["ids"]) == 20


def test_the_python_driver_refuses_other_files(tmp_path):
    onnx = pytest.importorskip("onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Abs", ["x"], ["y"])], "other", [x], [y])
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=[opset]), tmp_path / "other.onnx")
    done = run(sys.executable, EXAMPLES / "onnx_stream.py", tmp_path / "other.onnx")
    assert done.returncode == 1 and "no contract in its metadata" in done.stderr


@pytest.mark.parametrize("runtime", ["onnxruntime-node", "onnxruntime-web"])
@pytest.mark.parametrize("name", [*LAYERS, "model"])
def test_node_gives_the_same_numbers(files, stage, tmp_path, runtime, name):
    file, report = files / f"{name}.onnx", tmp_path / "report.json"
    script = ("node", "onnx_stream.mjs", file, "--runtime", runtime, "--json", report)
    done = run(*script, "--tokens", 40, "--temperature", 0, cwd=stage)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{runtime} [\d.]+: [\d.]+ µs a token \(median of 40\)", done.stdout, re.MULTILINE)
    got = json.loads(report.read_text())
    stream = driver.Stream(driver.open_session(file))
    if name == "model":
        want = driver.run_model(stream, list(PROMPT.encode()), 40, 0, 0, show=False)[1]
        assert got["ids"] == want["ids"]
        np.testing.assert_allclose(got["logits"], want["logits"], rtol=0, atol=1e-4)
    else:
        np.testing.assert_allclose(got["outputs"], driver.run_layer(stream, 40)[1]["outputs"], rtol=0, atol=1e-4)


def test_the_contract_in_javascript(files, stage, tmp_path):
    """The reader of metadata needs no package, agrees with Python's, and refuses what is not such a file."""
    whole = (files / "model.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.onnx").write_bytes(b"no such thing" * 9)
    (tmp_path / "empty.onnx").write_bytes(b"")
    code = (
        "import { readFileSync } from 'node:fs'; import { readContract } from './browser/contract.mjs';"
        "for (const file of process.argv.slice(1))"
        "  try { console.log(JSON.stringify(readContract(readFileSync(file)))); } catch (e) { console.log(e.message); }"
    )
    paths = [files / "model.onnx", *(tmp_path / f"{name}.onnx" for name in ("cut", "text", "empty"))]
    done = run("node", "--input-type=module", "-e", code, "--", *paths, cwd=stage)
    assert done.returncode == 0, done.stderr
    read, *refused = done.stdout.splitlines()
    contract = lx.read_contract(files / "model.onnx")
    assert json.loads(read) == json.loads(contract.metadata()["linattn_edge"])
    assert refused[:2] == ["not an ONNX file"] * 2 and "no contract" in refused[2]


@pytest.fixture
def page(stage, monkeypatch):
    """A function that runs prepare.py with some arguments and opens the page in Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium: not installed")
    prepare = load(stage / "browser" / "prepare.py")

    class Quiet(prepare.Handler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server, Chromium(program) as browser:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def opened(*what):
            monkeypatch.setattr(sys, "argv", ["prepare.py", "--modules", str(stage / "node_modules"), *map(str, what)])
            prepare.main()
            browser.open(f"http://127.0.0.1:{server.server_port}/")
            browser.wait("document.body.dataset.status !== 'loading'")
            return browser

        try:
            yield opened
        finally:
            server.shutdown()
            thread.join()


def text(browser, selector):
    return browser.value(f"document.querySelector({selector!r}).textContent")


def test_the_page_writes(files, page):
    browser = page(files / "model.onnx")
    assert browser.value("document.body.dataset.status") == "ready", text(browser, "#problem")
    browser.value("document.querySelector('#prompt').select()")
    browser.type("Let there be")
    assert browser.value("document.querySelector('#prompt').value") == "Let there be"
    browser.value("document.querySelector('#length').value = '300'")
    browser.value(
        "document.querySelector('#temperature').value = 0;"
        "document.querySelector('#temperature').dispatchEvent(new Event('input'))"
    )
    browser.click("#go")
    browser.wait("document.querySelector('#made').textContent.length > 20")
    browser.wait("document.body.dataset.status === 'done'")
    stream = driver.Stream(driver.open_session(files / "model.onnx"))
    ids = driver.run_model(stream, list(b"Let there be"), 300, 0, 0, show=False)[1]["ids"]
    assert text(browser, "#given") == "Let there be"
    assert text(browser, "#made") == bytes(ids).decode(errors="replace")
    assert re.fullmatch(r"[\d.,]+ (µs|ms)", text(browser, "#latency"))
    assert text(browser, "#position") == "312"
    assert int(text(browser, "#rate").replace(",", "")) > 0

    browser.click("#go")  # the stream goes on
    browser.wait("document.querySelector('#position').textContent === '612'")
    picture = browser.screenshot()
    browser.prefer("dark")
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and browser.screenshot() != picture
    assert not browser.problems


def test_the_page_runs_the_model_that_comes_along(page):
    browser = page()
    browser.click("#go")
    browser.wait("document.querySelector('#made').textContent.length > 200")
    browser.click("#go")
    browser.wait("document.body.dataset.status === 'done'")
    words = text(browser, "#made").split()
    assert len(words) > 20 and {"the", "of", "and", "to"} & set(words)
    assert not browser.problems


def test_the_page_runs_a_layer(page):
    browser = page("--layer")
    browser.click("#go")  # until stopped
    browser.wait("document.querySelector('#latency').textContent !== '–'")
    browser.wait("Number(document.querySelector('#position').textContent.replace(',', '')) > 200")
    browser.click("#go")
    browser.wait("document.body.dataset.status === 'done'")
    browser.click("#again")
    browser.wait("document.body.dataset.status === 'running'")
    assert not browser.problems


def test_the_page_says_what_is_wrong(page, tmp_path):
    (tmp_path / "text.onnx").write_text("no such thing" * 9)
    browser = page(tmp_path / "text.onnx")
    assert browser.value("document.body.dataset.status") == "failed"
    assert text(browser, "#problem") == "not an ONNX file"


def test_the_page_needs_npm_first(tmp_path, monkeypatch):
    prepare = load(EXAMPLES / "browser" / "prepare.py")
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--modules", str(tmp_path)])
    with pytest.raises(SystemExit, match="npm ci --prefix examples"):
        prepare.main()
