"""The command line: what it prints, and how it fails."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import linattn_edge as la
from linattn_edge import cli
from linattn_edge import info as info_
from linattn_edge.features import MAPS
from linattn_edge.rules import RULES

COMMAND = [sys.executable, "-m", "linattn_edge"]


@pytest.fixture
def failing(monkeypatch):
    """`linattn-edge info`, made to raise the given error."""

    def fail_with(error: BaseException) -> None:
        def run(args):
            raise error

        (info,) = (command for command in cli.COMMANDS if command.name == "info")
        monkeypatch.setattr(cli, "COMMANDS", (replace(info, run=run),))

    return fail_with


def test_info_prints_what_there_is(capsys):
    assert cli.main(["info"]) == 0
    out, err = capsys.readouterr()
    rows = {label: value.strip() for label, value in (line.split("  ", 1) for line in out.splitlines())}
    assert err == ""
    assert rows["linattn-edge"] == la.__version__
    assert rows["update rules"].split() == list(RULES)
    assert rows["feature maps"].split() == list(MAPS)
    for label in ("Python", "numpy", "numba", "llvmlite", "CPU", "SIMD", "cores", "kernel cache"):
        assert rows[label]
    assert rows["backend reference"] == "yes"
    assert rows["backend cpu"] == "yes"
    assert rows["backend cuda"] == "yes" or rows["backend cuda"].startswith("no: ")


def test_info_json_says_the_same(capsys):
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == la.__version__
    assert info["update_rules"] == list(RULES)
    assert list(info["feature_maps"]) == list(MAPS)
    assert info["backends"]["cpu"] == {"available": True, "reason": None}
    assert info["cpu"]["usable_cores"] >= 1
    assert info["cpu"]["name"]
    assert info["kernel_cache"]["writable"] == (info["kernel_cache"]["folder"] is not None)
    assert info["packages"].keys() == {"numpy", "numba", "llvmlite", "safetensors"}
    assert set(info["optional_packages"]) == set(info_.OPTIONAL_PACKAGES)


def test_info_without_a_writable_cache_folder(capsys, monkeypatch):
    from linattn_edge.kernels import jit

    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    assert cli.main(["info"]) == 0
    assert "NUMBA_CACHE_DIR" in capsys.readouterr().out


def test_info_says_when_kernels_are_interpreted(capsys, monkeypatch):
    from linattn_edge.kernels import jit

    monkeypatch.setattr(jit, "DISABLED", True)
    assert cli.main(["info"]) == 0
    assert "NUMBA_DISABLE_JIT" in capsys.readouterr().out


def test_info_says_why_a_backend_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "linattn_edge.kernels.cpu", None)  # its import fails
    assert cli.main(["info", "--json"]) == 0
    cpu = json.loads(capsys.readouterr().out)["backends"]["cpu"]
    assert cpu["available"] is False
    assert "linattn_edge.kernels.cpu" in cpu["reason"]


def test_info_of_a_bare_system(capsys, monkeypatch):
    """No /proc, no affinity, no optional package, an unknown processor: still an answer."""
    import llvmlite.binding

    def refuse(*args, **kwargs):
        raise OSError

    def not_found(name):
        raise info_.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(info_, "open", refuse, raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(info_.importlib.metadata, "version", not_found)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", dict)
    assert cli.main(["info"]) == 0
    assert "none known" in capsys.readouterr().out


def test_version_and_help_do_not_load_numba():
    for option in ("--version", "--help"):
        code = (
            "import sys\nfrom linattn_edge import cli\n"
            f"try: cli.main([{option!r}])\nexcept SystemExit as end: assert end.code == 0\n"
            "sys.exit('numba' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        if option == "--version":
            assert done.stdout == f"linattn-edge {la.__version__}\n"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(command.name in out and command.help in out for command in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["info", "--nonsense"]])
def test_wrong_usage_is_one_line_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("linattn-edge: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("q: expected\n  [B,H,K]"), "q: expected [B,H,K]"),
        (FileNotFoundError(2, "No such file", "x.npy"), "[Errno 2] No such file: 'x.npy'"),
        (KeyError("a"), "KeyError: 'a'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_errors_are_one_line_without_traceback(error, line, failing, capsys):
    failing(error)
    assert cli.main(["info"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"linattn-edge: error: {line}\n"


@pytest.mark.parametrize("arguments", [["--debug", "info"], ["info", "--debug"]])
def test_debug_shows_the_traceback(arguments, failing, capsys):
    failing(ValueError("no"))
    assert cli.main(arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ValueError: no" in err


def test_interrupt_is_status_130(failing, capsys):
    failing(KeyboardInterrupt())
    assert cli.main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


def test_installed_command_runs():
    done = subprocess.run([*COMMAND, "info"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("linattn-edge")
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "pipe2"), reason="needs POSIX pipes")
@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--help"]])
def test_closed_pipe_is_silent(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered, check=False
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_closed_pipe_in_process(monkeypatch):
    """The same inside this process, where its lines can be traced."""
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb"), encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["info"]) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("linattn-edge: error: ")
    assert done.stderr.count("\n") == 1
