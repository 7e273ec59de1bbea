"""Load a server of examples/serve_streams.py, and check every answer.

    python examples/serve_streams_load.py --streams 500 --rate 20 --seconds 60

Tokens are due at fixed times, spread evenly over the streams, however slow the answers are. Latency is counted from
when a token was due: one that could not be sent in time, because an answer was late, counts as late too. When the
server goes away, clients come back with their keys and send again what was not answered. At the end each stream is
computed alone, in this process: every answer must be the same to the bit, once, and in order.
"""

import argparse
import asyncio
import json
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from serve_streams import HEADER, OK, Served, chosen
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

Array = NDArray[Any]

BANK = 4093  # different tokens
STRIDE = 31  # stream i begins at number 31·i of them: no two streams have the same token at the same time


@dataclass(frozen=True)
class Load:
    """What is to be done."""

    streams: int = 500
    rate: float = 20.0  # tokens a second for each stream
    seconds: float = 60.0
    clients: int = 10
    patience: float = 30.0  # seconds to wait for a server that went away

    @property
    def tokens(self) -> int:
        """For each stream."""
        return round(self.rate * self.seconds)


@dataclass(eq=False)
class Stream:
    """What a stream has sent and got."""

    index: int
    start: float  # when its first token is due
    due: int = 0  # tokens whose time has come
    sent: int = 0
    again: int = -1  # the token that was sent again, on a new connection
    answers: bytearray = field(default_factory=bytearray)
    latencies: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Answers so far: the sequence number of the next one."""
        return len(self.latencies)


class Bank:
    """The tokens, the same in every run."""

    def __init__(self, served: Served) -> None:
        self.tokens = served.samples(BANK)
        self.raw = [token.tobytes() for token in self.tokens]

    def record(self, stream: Stream, t: int) -> bytes:
        """Token t of a stream, as it is sent."""
        return HEADER.pack(stream.index, 0, t) + self.raw[(STRIDE * stream.index + t) % BANK]

    def first(self, stream: Stream, count: int) -> Array:
        """The first tokens of a stream."""
        places = (STRIDE * stream.index + np.arange(count)) % BANK
        tokens: Array = self.tokens[places]
        return tokens


class Client:
    """A connection, made anew when it breaks, and its streams."""

    def __init__(self, url: str, load: Load, bank: Bank, answer_bytes: int, streams: list[Stream]) -> None:
        self.url, self.load, self.bank, self.answer_bytes = url, load, bank, answer_bytes
        self.streams = {stream.index: stream for stream in streams}
        self.key: str | None = None
        self.missing = load.tokens * len(streams)
        self.faults: list[str] = []
        self.connections = 0
        self._due = self._in_order(streams)
        self._next_due = next(self._due)

    def _in_order(self, streams: list[Stream]) -> Any:
        """(when, stream) of all tokens. They have one rate, so streams take turns in the order of their beginnings."""
        for t in range(self.load.tokens):
            for stream in streams:
                yield stream.start + t / self.load.rate, stream
        while True:
            yield float("inf"), streams[0]

    async def run(self) -> None:
        """Until all tokens are answered or it is hopeless."""
        last = time.perf_counter()
        while self.missing:
            try:
                async with connect(self.url, compression=None, max_size=None, ping_interval=None) as socket:
                    await self._greet(socket)
                    await self._exchange(socket)
                    await socket.send(json.dumps({"close": list(self.streams)}))
                    await socket.recv()
            except ConnectionClosed as closed:
                last = time.perf_counter()
                if closed.rcvd is not None and closed.rcvd.code != 1012:
                    self.faults.append(f"closed with {closed.rcvd.code} {closed.rcvd.reason}")
                    return
            except (OSError, InvalidHandshake) as error:
                if time.perf_counter() - last > self.load.patience:
                    self.faults.append(f"no server: {error}")
                    return
                await asyncio.sleep(0.1)

    async def _greet(self, socket: ClientConnection) -> None:
        """The first time, open the streams. Later, see where they are, and send again what was not answered."""
        self.connections += 1
        await socket.send(json.dumps({"hello": self.key}))
        hello = json.loads(await socket.recv())
        if self.key is None:
            self.key = hello["hello"]
            await socket.send(json.dumps({"open": list(self.streams)}))
            if "opened" not in (reply := json.loads(await socket.recv())):
                raise SystemExit(f"streams can't be opened: {reply}")
            return
        records = []
        for stream in self.streams.values():
            position = hello["positions"].get(str(stream.index))
            if position not in (stream.answered, stream.sent):
                self._fault(stream, f"at {position}, after {stream.answered} answers to {stream.sent} tokens")
            if stream.sent > stream.answered:
                stream.again = stream.answered
                records.append(self.bank.record(stream, stream.answered))
        await socket.send(b"".join(records))

    async def _exchange(self, socket: ClientConnection) -> None:
        sender = asyncio.create_task(self._send_what_is_due(socket))
        try:
            while self.missing:
                message = await socket.recv()
                assert isinstance(message, bytes)
                records = self._receive(message)
                if records:
                    await socket.send(b"".join(records))
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _send_what_is_due(self, socket: ClientConnection) -> None:
        while True:
            now = time.perf_counter()
            records: list[bytes] = []
            while self._next_due[0] <= now:
                self._next_due[1].due += 1
                records += self._ready(self._next_due[1])
                self._next_due = next(self._due)
            if records:
                await socket.send(b"".join(records))
            await asyncio.sleep(min(1.0, self._next_due[0] - time.perf_counter()))

    def _ready(self, stream: Stream) -> list[bytes]:
        """A stream's next token, where it is due and the one before it has been answered."""
        if stream.sent == stream.due or stream.sent > stream.answered:
            return []
        stream.sent += 1
        return [self.bank.record(stream, stream.sent - 1)]

    def _receive(self, message: bytes) -> list[bytes]:
        """Take answers; the tokens that were waiting for them."""
        now, size = time.perf_counter(), HEADER.size + self.answer_bytes
        records = []
        for at in range(0, len(message), size):
            number, status, sequence = HEADER.unpack_from(message, at)
            answer = message[at + HEADER.size : at + size]
            stream = self.streams.get(number)
            if stream is None:
                self.faults.append(f"an answer to stream {number}, of another client")
            elif status == OK and sequence == stream.answered < stream.sent:
                stream.answers += answer
                stream.latencies.append(now - stream.start - sequence / self.load.rate)
                self.missing -= 1
                records += self._ready(stream)
            elif status != OK or sequence != stream.again or stream.answered != sequence + 1:
                got = f"status {status}, sequence {sequence}"
                self._fault(stream, f"{got} after {stream.answered} answers to {stream.sent} tokens")
            elif not stream.answers.endswith(answer):  # the token was sent again, and may be answered again
                self._fault(stream, f"another answer to token {sequence} when it was sent again")
        return records

    def _fault(self, stream: Stream, what: str) -> None:
        self.faults.append(f"stream {stream.index}: {what}")


@dataclass
class Report:
    """How it went."""

    load: Load
    seconds: float
    latencies: Array  # of all tokens, in seconds
    server_cpu: float  # seconds
    client_cpu: float
    batches: int
    connections: int
    faults: list[str]

    def lines(self) -> list[str]:
        """It, for people."""
        p50, p99, p999 = np.percentile(self.latencies, [50, 99, 99.9]) * 1e3 if self.latencies.size else [np.nan] * 3
        worst = self.latencies.max(initial=0) * 1e3
        tokens = self.latencies.size
        return [
            f"{self.load.streams} streams of {self.load.clients} clients, {self.load.rate:g} tokens/s each, for "
            f"{self.seconds:.1f} s: {tokens:,} tokens answered, {tokens / self.seconds:,.0f} a second",
            f"latency from when a token was due: p50 {p50:.2f} ms, p99 {p99:.2f} ms, p99.9 {p999:.2f} ms, "
            f"largest {worst:.1f} ms",
            f"{tokens / max(1, self.batches):.1f} tokens a batch; CPU: server {self.server_cpu / self.seconds:.0%}, "
            f"this client {self.client_cpu / self.seconds:.0%} of a core; {self.connections} connections",
        ]


async def run(host: str, port: int, served: Served, load: Load) -> tuple[Report, list[Stream]]:
    """Load the server."""
    url = f"{host}:{port}"
    before = await asyncio.to_thread(status, url)
    start, cpu = time.perf_counter() + 0.5, time.process_time()
    streams = [Stream(i, start + i / load.streams / load.rate) for i in range(load.streams)]
    bank, size = Bank(served), served.answer.itemsize
    parts = [streams[i :: load.clients] for i in range(load.clients)]
    clients = [Client(f"ws://{url}/streams", load, bank, size, part) for part in parts if part]
    await asyncio.gather(*(client.run() for client in clients))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = await asyncio.to_thread(status, url)
    faults = [fault for client in clients for fault in client.faults]
    report = Report(
        load,
        seconds,
        np.concatenate([stream.latencies for stream in streams]),
        after["cpu_seconds"] - before["cpu_seconds"],
        cpu,
        after["batches"] - before["batches"],
        sum(client.connections for client in clients),
        faults,
    )
    return report, streams


def status(url: str) -> dict[str, Any]:
    """What the server says of itself."""
    with urllib.request.urlopen(f"http://{url}/status", timeout=10) as reply:
        what: dict[str, Any] = json.load(reply)
    return what


def check(served: Served, load: Load, streams: list[Stream]) -> list[str]:
    """What is wrong with the answers: each stream is computed anew, alone."""
    bank = Bank(served)

    def wrong(stream: Stream) -> str | None:
        want = served.alone(bank.first(stream, load.tokens)).tobytes()
        if stream.answers == want:
            return None
        got, size = bytes(stream.answers), served.answer.itemsize
        t = next(t for t in range(load.tokens) if got[t * size :][:size] != want[t * size :][:size])
        return f"stream {stream.index}: {stream.answered} answers of {load.tokens}, the first wrong one is number {t}"

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [fault for fault in threads.map(wrong, streams) if fault is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a server of serve_streams.py and check every answer.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--layer", metavar="HEADSxWIDTH", help="what the server was started with")
    parser.add_argument("--streams", type=int, default=Load.streams)
    parser.add_argument("--rate", type=float, default=Load.rate, help="tokens a second for each stream")
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--clients", type=int, default=Load.clients, help="connections that share the streams")
    args = parser.parse_args()
    load = Load(args.streams, args.rate, args.seconds, args.clients)
    try:
        served = chosen(args.layer)
        report, streams = asyncio.run(run(args.host, args.port, served, load))
    except (ValueError, OSError) as error:
        raise SystemExit(f"can't load the server: {error}") from None
    print("\n".join(report.lines()), flush=True)
    faults = report.faults + check(served, load, streams)
    if faults:
        raise SystemExit("\n".join([f"{len(faults)} faults:", *faults[:10]]))
    print(f"every answer is that of a stream alone, to the bit: {load.streams * load.tokens:,} tokens")


if __name__ == "__main__":
    main()
