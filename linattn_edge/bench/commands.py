"""`linattn-edge bench`: options, the run, and what is made of it."""

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from linattn_edge import plots
from linattn_edge.terminal import progress, write

SUITES = ("step", "context", "prefill", "streams", "model", "startup")
PEERS = ("numpy", "torch", "onnxruntime", "softmax")
GPU_PEERS = ("torch",)
DEVICES: dict[str, tuple[str, ...]] = {"cpu": SUITES, "cuda": ("step", "prefill")}  # suites of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `linattn-edge bench`."""
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few turns: to see that it runs, not to quote"
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help=f"where to run (default: cpu); on cuda there are {' and '.join(DEVICES['cuda'])}",
    )
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help=f"of {', '.join(PEERS)}, with commas between; or none (default: what is installed)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a checkpoint for the suite model (default: bundled)"
    )
    parser.add_argument(
        "--pin", default="auto", metavar="CORE", help="core to stay on: a number, auto (the quickest now) or none"
    )
    parser.add_argument("--csv", action="store_true", help="print CSV instead of tables")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write all figures to FILE, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with tables and charts")
    plots.add_plot_option(parser)
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show a saved run; measure nothing")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show what changed since a saved run")
    parser.add_argument(
        "--fail-above", type=float, metavar="PERCENT", help="with --compare: exit 1 where more than that got slower"
    )


def run(args: argparse.Namespace) -> None:
    """The command."""
    from linattn_edge.bench import files

    check(args)
    old = None if args.compare is None else files.from_json(args.compare)
    report = files.from_json(args.source) if args.source else measure(args, show=not (args.json or args.csv))
    try:
        present(args, report, old)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        saved = [str(path) for path in (args.source, args.compare) if path is not None]
        if not saved:
            raise
        raise ValueError(f"{' or '.join(saved)}: a damaged report ({type(error).__name__}: {error})") from error


def present(args: argparse.Namespace, report: Any, old: Any) -> None:
    """All that is made of a run: tables, the comparison with an older one, files."""
    from linattn_edge.bench import comparison, files, tables
    from linattn_edge.bench.page import page

    text = not (args.json or args.csv)
    if args.source and text:
        show(report)
    if old is not None:
        report.comparison = comparison.compare(old, report, args.fail_above)
        if text:
            tables.show(comparison.table(report.comparison))
    if args.json:
        write(files.to_json(report) + "\n")
    elif args.csv:
        write(files.to_csv(report))
    if args.save is not None:
        files.save(args.save, files.to_json(report) + "\n")
    if args.html is not None:
        files.save(args.html, page(report))
    if args.plot is not None:
        from linattn_edge.bench.figure import plot

        plot(report, args.plot)
    if report.comparison and (slower := comparison.failures(report.comparison)):
        raise comparison.Regression(
            f"{slower} of the measurements are more than {args.fail_above:g} % slower than before"
        )


def check(args: argparse.Namespace) -> None:
    """Refuse what can't be done, before any work."""
    for name in args.suites:
        if name not in SUITES:
            raise ValueError(f"SUITE: expected of {', '.join(SUITES)}; got {name!r}")
        if name not in DEVICES[args.device] and not args.source:
            there = " and ".join(DEVICES[args.device])
            raise ValueError(f"SUITE: on {args.device} there are {there}; got {name!r}")
    if args.json and args.csv:
        raise ValueError("give --json or --csv, not both")
    if args.fail_above is not None:
        if args.compare is None:
            raise ValueError("--fail-above needs --compare FILE")
        if not args.fail_above >= 0:
            raise ValueError(f"--fail-above: expected a percentage of at least 0, got {args.fail_above}")
    chosen_peers(args.peers, args.device)
    plots.check_plot(args.plot)
    for name, path in (("--save", args.save), ("--html", args.html)):
        if path is not None and not path.resolve().parent.is_dir():
            raise OSError(f"{name}: {path.resolve().parent} is no folder")
    if args.device == "cuda" and not args.source:
        check_gpu(args)


def check_gpu(args: argparse.Namespace) -> None:
    """Refuse what can't be timed on a GPU, or that there is none."""
    from linattn_edge.bench import device
    from linattn_edge.errors import DeviceError

    if args.plot is not None:
        raise ValueError("--plot: draws what was measured on a CPU; --html has charts of --device cuda")
    reason = device.why_not()
    if reason is not None:
        raise DeviceError(f"--device cuda: {reason}")


def chosen_peers(text: str | None, device: str = "cpu") -> tuple[str, ...]:
    """The packages that were asked for; by default those that are installed."""
    known = PEERS if device == "cpu" else GPU_PEERS
    if text is None:
        return tuple(name for name in known if name == "softmax" or find_spec(name) is not None)
    names = [] if text.strip() in ("", "none") else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            expected = f"expected of {', '.join(known)} with commas between, or none"
            if device != "cpu":
                expected = f"on {device} there is {', '.join(known)}, or none"
            raise ValueError(f"--peers: {expected}; got {name!r}")
        if name != "softmax" and find_spec(name) is None:
            raise ValueError(f"--peers: {name} is not installed")
    return tuple(names)


def measure(args: argparse.Namespace, show: bool) -> Any:
    """Run the suites; show the tables of each when it is done."""
    from linattn_edge.bench import clock, machine, tables
    from linattn_edge.bench.record import Report
    from linattn_edge.bench.suites import BY_DEVICE, Settings

    peers, table = chosen_peers(args.peers, args.device), BY_DEVICE[args.device]
    make = Settings.short if args.quick else Settings
    settings = make(peers=peers, model=args.model)
    names = args.suites or list(table)
    start = time.perf_counter()
    about, blas = machine.machine(args.device), machine.one_blas_thread()
    with machine.Pin(args.pin) as pin:
        method = {
            "clocks": {name: clock.describe(name) for name in clock.CLOCKS},
            "garbage_collector": machine.collector(),
            "pinned_to_cores": pin.cores,
            "numpy_held_to_one_thread": blas,
            "rounds": settings.rounds,
            "seconds_of_a_turn": settings.turn,
            "seconds_of_a_slow_contestant": settings.budget,
            "builds": settings.builds,
            "peers": list(peers),
            "device": args.device,
        }
        report = Report(command(args), args.quick, about, method)
        if show:
            write("\n".join(tables.heading(report)) + "\n\n")
        for number, name in enumerate(names, 1):
            suite = table[name]
            label = f"{name} ({number} of {len(names)})"
            done = []
            for job in progress(suite.plan(settings), label, describe=lambda job: job.title):
                pin.renew()
                done.append(job.run())
            report.groups += done
            if show and done:
                show_suite(report, done[0].suite)
    report.seconds = time.perf_counter() - start
    report.load_after = machine.load()
    if show:
        write(f"{tables.wrapped(closing(report))}\n\n")
    return report


def show(report: Any) -> None:
    """All tables of a run."""
    from linattn_edge.bench import tables

    write("\n".join(tables.heading(report)) + "\n\n")
    for name in dict.fromkeys(group.suite for group in report.groups):
        show_suite(report, name)
    write(f"{tables.wrapped(closing(report))}\n\n")


def show_suite(report: Any, name: str) -> None:
    """The tables of one suite, and who was not timed."""
    from linattn_edge.bench import tables
    from linattn_edge.bench.suites import REPORTED

    groups = report.of(name)
    for table in REPORTED[name].tables(groups):
        tables.show(table)
    for line in untimed(groups):
        write(f"{line}\n")
    sys.stdout.flush()


def untimed(groups: Any) -> list[str]:
    """A line for each reason why a peer has no times."""
    where: dict[str, list[str]] = {}
    for group in groups:
        for row in group.rows:
            if row.note:
                where.setdefault(f"{row.name}: {row.note}", []).append(group.title)
    return [
        f"{reason} ({titles[0]}{f' and {len(titles) - 1} more' if titles[1:] else ''})"
        for reason, titles in where.items()
    ]


def closing(report: Any) -> str:
    """How long it took, and how far to trust it."""
    clock = report.method["clocks"]["wall clock"]
    trust = "A quick run: too short to quote. " if report.quick else ""
    loads = [load[0] for load in (report.machine["load"], report.load_after) if load]
    if loads and max(loads) > report.machine["cores"] + 1:
        trust += "Other programs were running: medians and what lies above them are partly theirs. "
    return (
        f"{trust}This took {report.seconds:.0f} s. Each time has the {clock['overhead_ns']:.0f} ns in it that a "
        "reading of the clock takes. "
        "Compare figures of one run; between runs, use --compare. Method: docs/benchmarking.md."
    )


def command(args: argparse.Namespace) -> str:
    """How to make these figures again, without this machine's folders."""
    words = ["linattn-edge bench", *args.suites]
    words += ["--quick"] if args.quick else []
    words += [f"--device {args.device}"] if args.device != "cpu" else []
    words += [f"--peers {args.peers}"] if args.peers is not None else []
    words += [f"--model {args.model.name}"] if args.model else []
    words += [f"--pin {args.pin}"] if args.pin != "auto" else []
    words += [f"--save {args.save.name}"] if args.save else []
    return " ".join(words)
