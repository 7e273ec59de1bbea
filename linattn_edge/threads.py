"""Helper threads for `num_threads`: started when first needed, asleep when idle, gone in a forked child.

`kernels/crew.py` says how a call is shared, `layout.WORTH_SHARING` from which size.
"""

import os
import threading

import numpy as np

from linattn_edge.kernels import crew


class Crew:
    """Threads that help with calls. A call that finds the crew busy with another one runs alone."""

    def __init__(self, helpers: int) -> None:
        from linattn_edge.kernels import cpu

        memory = np.zeros(crew.SIZE + 8, np.int64)
        self.control = memory[-memory.ctypes.data % 64 // 8 :][: crew.SIZE]  # on a cache line of its own
        self.address = self.control.ctypes.data
        self.control[crew.LIMIT] = helpers
        self._bell = threading.Semaphore(0)
        self._asleep = 0
        self._lock = threading.Lock()
        self._loop = cpu.helper()
        for number in range(helpers):
            thread = threading.Thread(target=self._help, name=f"linattn_edge helper {number}", daemon=True)
            thread.start()

    def _help(self) -> None:
        while True:
            self._loop(self.control)
            with self._lock:
                self._asleep += 1
            self._bell.acquire()

    def wake(self) -> None:
        """Have those who sleep look for work."""
        if self._asleep:
            with self._lock:
                asleep, self._asleep = self._asleep, 0
            if asleep:
                self._bell.release(asleep)


_crews: dict[int, Crew] = {}
_lock = threading.Lock()


def get_crew(num_threads: int) -> Crew:
    """The crew of num_threads − 1 helpers."""
    helpers = num_threads - 1
    if helpers not in _crews:
        with _lock:
            if helpers not in _crews:
                _crews[helpers] = Crew(helpers)
    return _crews[helpers]


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _crews.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a child has the memory of its parent's threads, but not the threads
