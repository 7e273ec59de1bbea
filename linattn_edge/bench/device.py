"""How times are taken on a GPU: by events on a stream, by replaying captured graphs, and from Python by the wall clock.

All of it goes through a `Timer`, so that what is measured can be tested with one that needs no GPU.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from linattn_edge import gpu
from linattn_edge.bench.turns import Array, Run, timed
from linattn_edge.errors import DeviceError

Work = Callable[[Any], object]  # puts work on the stream that it is given

EVENTS = "CUDA events"  # a clock, beside those of `clock`
LAUNCHES = 20  # in one graph, or from Python before it waits for the GPU
COPIED = 256 << 20  # bytes of the copy that stands for the memory's speed: more than any cache holds


def why_not() -> str | None:
    """Why nothing can be timed on a GPU here, in one line, or None."""
    if gpu.simulated():
        return "Numba's simulator runs GPU kernels in Python (NUMBA_ENABLE_CUDASIM), and its times say nothing"
    return gpu.why_not()


class Timer:
    """The current GPU, with a stream of its own."""

    def __init__(self) -> None:
        self.cuda = gpu.require()
        with gpu.guard():
            self.stream = self.cuda.stream()

    def wait(self) -> None:
        """For all that was put on the stream."""
        self.stream.synchronize()

    def elapsed(self, call: Callable[[], object]) -> float:
        """µs between two events before and after a call's work.

        The same work goes ahead, so that the GPU is busy until the second lot has reached it: Python's own time is not
        in it.
        """
        start, end = self.cuda.event(), self.cuda.event()
        call()
        start.record(self.stream)
        call()
        end.record(self.stream)
        end.synchronize()
        return float(self.cuda.event_elapsed_time(start, end)) * 1e3

    def capture(self, work: Work, launches: int = 1) -> Callable[[], object]:
        """What `work` puts on the stream, that many times, as one CUDA graph: call what this returns to replay it."""
        work(self.stream)  # compiles
        self.wait()
        return Graph(self.stream, work, launches).replay


class Graph:
    """A captured CUDA graph, to be replayed on its stream."""

    def __init__(self, stream: Any, work: Work, launches: int) -> None:
        from cuda.bindings import driver  # type: ignore[import-not-found]  # comes with numba-cuda

        self._driver, self._work = driver, work  # the graph has the addresses of work's arrays
        self._stream = driver.CUstream(int(stream.handle))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _done(driver.cuStreamBeginCapture(self._stream, mode))
        try:
            for _ in range(launches):
                work(stream)
        except BaseException:
            driver.cuStreamEndCapture(self._stream)
            raise
        graph = _done(driver.cuStreamEndCapture(self._stream))
        self._graph = _done(driver.cuGraphInstantiate(graph, 0))
        _done(driver.cuGraphDestroy(graph))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False

    def replay(self) -> None:
        _done(self._driver.cuGraphLaunch(self._graph, self._stream))


def _done(result: tuple[Any, ...]) -> Any:
    """What a call of the driver gave; DeviceError where it failed."""
    if int(result[0]) != 0:
        raise DeviceError(f"the GPU refused: {result[0]!s}")
    return result[1] if len(result) > 1 else None


def by_events(timer: Timer, call: Callable[[], object], units: float = 1) -> Run:
    """A contestant: µs on the GPU of each call's work, each worth `units`."""

    def run(n: int) -> Array:
        return np.array([timer.elapsed(call) / units for _ in range(n)])

    return run


def from_python(timer: Timer, call: Callable[[], object], calls: int = 1, units: float = 1) -> Run:
    """A contestant: wall time of each call, where Python waits for the GPU after every `calls` of them."""

    def together() -> None:
        for _ in range(calls):
            call()
        timer.wait()

    return timed(together, units=calls * units)


def upload(x: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays on the GPU."""
    cuda = gpu.require()
    with gpu.guard():
        return {name: cuda.to_device(np.ascontiguousarray(a)) for name, a in x.items()}


def empty(shape: tuple[int, ...]) -> Any:
    """Memory on the GPU, float32."""
    with gpu.guard():
        return gpu.require().device_array(shape, np.float32)


def copy(nbytes: int) -> Work:
    """A copy of that many bytes from one place of the GPU's memory to another."""
    source, target = (empty((max(1, nbytes // 4),)) for _ in range(2))
    return lambda stream: target.copy_to_device(source, stream=stream)


def torch_step(step: Callable[[], object], launches: int = LAUNCHES) -> Run:
    """A contestant: µs of a torch step on the GPU, `launches` of them captured in one of torch's graphs."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            step()

    def run(n: int) -> Array:
        found = np.empty(n)
        for i in range(n):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[i] = start.elapsed_time(end) * 1e3 / launches
        return found

    return run


def has_torch() -> bool:
    """Whether torch is here and can use the GPU."""
    with contextlib.suppress(ImportError, OSError):
        import torch

        return bool(torch.cuda.is_available())
    return False
