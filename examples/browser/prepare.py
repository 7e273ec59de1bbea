"""Put what the page needs beside it: onnxruntime-web, and the file to run as model.onnx.

    npm ci --prefix examples
    python examples/browser/prepare.py
    python -m http.server --directory examples/browser --bind 127.0.0.1

Without a file, the small language model that comes along is exported, or a layer with `--layer`. `--serve` serves the
page itself, with two headers that let browsers give a finer clock (0.005 instead of 0.1 ms).
"""

import argparse
import shutil
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")


class Handler(SimpleHTTPRequestHandler):
    """The page's folder, cross-origin isolated."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, directory=str(HERE), **named)

    def end_headers(self):
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


def copy_runtime(modules):
    """onnxruntime-web's WebAssembly build, out of node_modules."""
    source = Path(modules, "onnxruntime-web", "dist")
    if not source.is_dir():
        raise SystemExit(f"{source}: not there. First: npm ci --prefix examples")
    target = HERE / "vendor"
    target.mkdir(exist_ok=True)
    for name in RUNTIME:
        shutil.copy2(source / name, target / name)


def put_file(file, layer):
    """The file to run: an exported one, or one made here."""
    target = HERE / "model.onnx"
    if file is not None:
        shutil.copyfile(file, target)
        return str(file)
    import linattn_edge as la
    import linattn_export as lx

    if layer:
        attn = la.LinearAttention(num_heads=8, key_dim=64, feature_map="identity", update_rule="gated")
        lx.export_layer(attn, target)
        return "a gated layer, 8 heads of 64"
    lx.export_model(la.load_model(), target)  # float32: int8 is several times slower in WebAssembly
    return "the language model that comes along"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", nargs="?", help="an exported .onnx file")
    parser.add_argument("--layer", action="store_true", help="without a file: a layer instead of the language model")
    parser.add_argument("--modules", default=HERE.parent / "node_modules", help="where npm put onnxruntime-web")
    parser.add_argument("--serve", action="store_true", help="then serve the page on this machine")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if not 0 <= options.port < 65536:
        parser.error("--port must be from 0 to 65535")
    copy_runtime(options.modules)
    print(f"model.onnx: {put_file(options.file, options.layer)}")
    if not options.serve:
        print(f"next: python -m http.server --directory {HERE} --bind 127.0.0.1")
        return
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
