"""Serve many streams over WebSockets: a token is stepped when it comes, with whatever else has come, without padding.

    pip install "linattn-edge[serve]"
    python examples/serve_streams.py --snapshot streams     # the bundled language model
    python examples/serve_streams.py --layer 8x64           # a layer: q, k, v, g and beta in, y out
    python examples/serve_streams_load.py                   # a client that loads it and checks every answer

SIGTERM or ctrl-c finishes the batch, writes a snapshot and closes; the next start goes on from there. docs/streams.md
has the protocol, the limits, and what happens when something fails.

One thread, the event loop, does the network and owns all names, positions and answers. Another does the arithmetic: a
batch takes the model a millisecond, without the GIL, and the loop reads and writes meanwhile.
"""

import argparse
import asyncio
import contextlib
import gc
import hashlib
import itertools
import json
import os
import re
import secrets
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn_edge as la
from linattn_edge.errors import PoolFullError, SnapshotError

try:
    import uvicorn
    import websockets  # noqa: F401  (uvicorn uses it)
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
except ImportError as error:
    raise SystemExit(f"this needs the extra serve ({error}): pip install 'linattn-edge[serve]'") from None

if sys.platform != "win32":
    import fcntl
    import resource

Array = NDArray[Any]

# A binary message is any number of records: a header, and a token or an answer as a NumPy record.
HEADER = struct.Struct("<IIQ")  # stream, status (of a token 0), sequence number
OK, REFUSED, OUT_OF_ORDER, NO_SUCH_STREAM = range(4)

MALFORMED, NO_SUCH_CLIENT, TAKEN_OVER, RESTART, TRY_LATER = 4400, 4401, 4409, 1012, 1013  # close codes
HELLO_SECONDS = 10.0  # for a connection to become a WebSocket, and then for a client to say who it is
READ_SECONDS = 20.0  # for a client to read what is sent
FLUSH_SECONDS = 1.0  # at the end, to hand out the last answers
CLOSE_SECONDS = 5  # at the end, for clients to close
MOST_WAITING = 256  # answers and notes that wait to be read, before the client's messages wait too
BACKLOG = 64  # connections that asyncio accepts at once, before it asks anyone


# What is served


class LanguageModel:
    """The bundled model: a token id in, the most likely next id and its logit out."""

    token = np.dtype([("id", "<i4")])
    answer = np.dtype([("next", "<i4"), ("logit", "<f4")])

    def __init__(self) -> None:
        self.served = la.load_model()

    def step(self, pool: la.StreamPool, ids: Array, tokens: Array) -> tuple[Array, list[int]]:
        """Answers to one token of each stream, and the ids of the streams whose token can't be taken."""
        logits, refused = pool.step(ids, tokens["id"], on_error="skip")
        return self.answers(logits), refused

    def answers(self, logits: Array) -> Array:
        """What logits [B, vocab] are answered with."""
        answers = np.empty(len(logits), self.answer)
        answers["next"], answers["logit"] = logits.argmax(1), logits.max(1)
        return answers

    def samples(self, count: int) -> Array:
        """Tokens to try it with."""
        tokens = np.empty(count, self.token)
        tokens["id"] = np.random.default_rng(0).integers(0, self.served.vocab_size, count)
        return tokens

    def alone(self, tokens: Array) -> Array:
        """The answers to the tokens of a stream that is the only one."""
        state = self.served.init_state(1)
        return np.concatenate([self.answers(self.served.step(id_, state)) for id_ in tokens["id"][:, None]])


class Layer:
    """A `gated_delta` layer: q, k, v, g and beta of a token in, y out."""

    inputs = "q", "k", "v", "g", "beta"

    def __init__(self, heads: int, width: int) -> None:
        self.served = la.LinearAttention(heads, width, feature_map="identity", update_rule="gated_delta", qk_norm=True)
        shapes = [(heads, width)] * 3 + [(heads,)] * 2
        self.token = np.dtype([(name, "<f4", shape) for name, shape in zip(self.inputs, shapes, strict=True)])
        self.answer = np.dtype([("y", "<f4", (heads, width))])

    def step(self, pool: la.StreamPool, ids: Array, tokens: Array) -> tuple[Array, list[int]]:
        """Answers to one token of each stream, and the ids of the streams whose token can't be taken."""
        q, k, v, g, beta = (np.ascontiguousarray(tokens[name]) for name in self.inputs)
        y, refused = pool.step(ids, q, k, v, g, beta, on_error="skip")
        return self.answers(y), refused

    def answers(self, y: Array) -> Array:
        """What y [B, heads, width] is answered with."""
        answers = np.empty(len(y), self.answer)
        answers["y"] = y
        return answers

    def samples(self, count: int) -> Array:
        """Tokens to try it with."""
        random = np.random.default_rng(0)
        tokens = np.empty(count, self.token)
        for name in "q", "k", "v":
            tokens[name] = random.standard_normal(tokens[name].shape)
        tokens["g"], tokens["beta"] = -random.random(tokens["g"].shape), random.random(tokens["beta"].shape)
        return tokens

    def alone(self, tokens: Array) -> Array:
        """The answers to the tokens of a stream that is the only one."""
        state = self.served.init_state(1)
        q, k, v, g, beta = (np.ascontiguousarray(tokens[name])[:, None] for name in self.inputs)
        ys = [self.served.step(q[t], k[t], v[t], state, g[t], beta[t]) for t in range(len(tokens))]
        return self.answers(np.concatenate(ys))


Served = LanguageModel | Layer


def chosen(layer: str | None) -> Served:
    """What `--layer HEADSxWIDTH`, or its absence, stands for."""
    if layer is None:
        return LanguageModel()
    match = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})", layer)
    if match is None:
        raise ValueError(f"--layer: expected HEADSxWIDTH, for example 8x64, got {layer!r}")
    return Layer(int(match[1]), int(match[2]))


# Who is served


@dataclass(eq=False, slots=True)
class Stream:
    """A stream of a client."""

    id: int  # in the pool
    position: int = 0  # tokens taken: the sequence number of the next
    answer: bytes = b""  # to the last token taken, which is not taken again but answered again
    busy: bool = False  # its next token waits or is being stepped
    closed: bool = False  # while it was busy: the batcher gives it back to the pool


class Connection:
    """A WebSocket and what is to be sent on it. One task writes, so that nobody else waits for a slow reader."""

    def __init__(self, websocket: WebSocket) -> None:
        self.websocket = websocket
        self.waiting: list[Any] = []  # notes (str) and answers (bytes): nothing of a stream comes after its `closed`
        self.ending: tuple[int, str] | None = None  # code and reason
        self.over = False
        self._posted, self._sent = asyncio.Event(), asyncio.Event()

    def note(self, **what: Any) -> None:
        """Have JSON sent."""
        self.waiting.append(json.dumps(what))
        self._posted.set()

    def answer(self, number: int, status: int, sequence: int, answer: bytes) -> None:
        """Have an answer sent."""
        self.waiting.append(HEADER.pack(number, status, sequence) + answer)
        self._posted.set()

    def close(self, code: int, reason: str) -> None:
        """Have the connection closed, after what waits."""
        self.ending = code, reason
        self._posted.set()

    async def write(self) -> None:
        """Send what there is, answers in a row as one message, until a close or until the client is gone."""
        try:
            while True:
                await self._posted.wait()
                self._posted.clear()
                waiting, self.waiting = self.waiting, []
                for kind, some in itertools.groupby(waiting, type):
                    if kind is bytes:
                        await self.websocket.send_bytes(b"".join(some))
                        continue
                    for note in some:
                        await self.websocket.send_text(note)
                        await asyncio.sleep(0)  # a send may not wait: let the loop see a lost client
                self._sent.set()
                if self.ending is not None:
                    await self.websocket.close(*self.ending)
                    return
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client is gone, or was closed by uvicorn: the reader is told too
        finally:
            self.over = True
            self._sent.set()

    async def settled(self, most: int = MOST_WAITING) -> None:
        """Wait until no more than so many answers and notes wait."""
        while len(self.waiting) > most and not self.over:
            self._sent.clear()
            await self._sent.wait()


@dataclass(eq=False, slots=True)
class Client:
    """Who knows a key. Clients number their own streams: no message can name a stream of another."""

    name: str
    streams: dict[int, Stream] = field(default_factory=dict)
    connection: Connection | None = None
    leaving: asyncio.TimerHandle | None = None  # ends its streams, unless it comes back


class Refusal(Exception):
    """Something that ends a connection, with a close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def name_of(key: str) -> str:
    """What the server calls who has this key. It doesn't keep the key, nor does a snapshot."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


# Batches


@dataclass(eq=False, slots=True)
class Token:
    """A token that waits for its turn."""

    client: Client
    number: int
    stream: Stream
    data: bytes


class Batcher:
    """Steps what is ready: waits for a token, then for others, until all streams have one or a time budget is spent."""

    def __init__(self, served: Served, pool: la.StreamPool, budget: float) -> None:
        self.served, self.pool, self.budget = served, pool, budget
        self.ready: list[Token] = []
        self.since = 0.0  # when the first of them came
        self.tokens = self.batches = 0
        self.stopping = False
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")

    def submit(self, token: Token) -> None:
        """Have a token stepped soon."""
        if not self.ready:
            self.since = asyncio.get_running_loop().time()
            self._some.set()
        token.stream.busy = True
        self.ready.append(token)

    def hurry(self) -> None:
        """Have what is ready stepped now: nothing more can come."""
        if self.ready:
            self._enough.set()

    def stop(self) -> None:
        """Have `run` step what is ready and return."""
        self.stopping = True
        self._some.set()
        self._enough.set()

    async def run(self) -> None:
        """Batch after batch."""
        try:
            while self.ready or not self.stopping:
                await self._some.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self.since + self.budget):
                        await self._enough.wait()
                batch, self.ready = self.ready, []
                if not self.stopping:
                    self._some.clear()
                    self._enough.clear()
                if batch:
                    await self._step(batch)
        finally:
            self.stopping = True  # also where it ends by an error
            self._arithmetic.shutdown()

    async def _step(self, batch: list[Token]) -> None:
        answers = await asyncio.get_running_loop().run_in_executor(self._arithmetic, self.answers, batch)
        self.batches += 1
        for token, answer in zip(batch, answers, strict=True):
            self._deliver(token, answer)

    def answers(self, batch: list[Token]) -> list[bytes | None]:
        """The answers, None to a token that can't be taken. Called in the other thread."""
        ids = np.array([token.stream.id for token in batch], np.int64)
        tokens = np.frombuffer(b"".join(token.data for token in batch), self.served.token)
        answers, refused = self.served.step(self.pool, ids, tokens)
        raw, size = answers.tobytes(), self.served.answer.itemsize
        return [
            None if token.stream.id in refused else raw[at : at + size]
            for token, at in zip(batch, range(0, len(raw), size), strict=True)
        ]

    def _deliver(self, token: Token, answer: bytes | None) -> None:
        stream, connection, sequence = token.stream, token.client.connection, token.stream.position
        stream.busy = False
        status = REFUSED
        if answer is not None:
            status, stream.answer = OK, answer
            stream.position += 1
            self.tokens += 1
        if stream.closed:
            self.pool.close(stream.id)
        elif connection is not None:
            connection.answer(token.number, status, sequence, answer or bytes(self.served.answer.itemsize))


# The service


@dataclass(frozen=True)
class Limits:
    """How much there may be of what."""

    streams: int = 1024
    streams_per_client: int = 64
    clients: int = 256
    message_bytes: int | None = None  # by default what a client needs for a token of each of its streams
    grace: float = 60.0  # seconds that streams are kept for a client that is gone


class Service:
    """Clients, their streams, and what they may do."""

    def __init__(self, served: Served, limits: Limits, budget: float) -> None:
        self.served, self.limits = served, limits
        self.pool = la.StreamPool(served.served, limits.streams)
        self.batcher = Batcher(served, self.pool, budget)
        self.clients: dict[str, Client] = {}  # by name
        self.strangers = 0  # connections that have not said who they are
        self.record = HEADER.size + served.token.itemsize
        self.message_bytes = limits.message_bytes or max(4096, self.record * limits.streams_per_client)
        if self.message_bytes < (least := max(1024, self.record)):
            raise ValueError(f"--message-bytes: expected {least} or more, got {self.message_bytes}")
        self.app = Starlette(routes=[WebSocketRoute("/streams", self.converse), Route("/status", self.status)])

    def warm_up(self) -> None:
        """Compile the kernels, or load what an earlier run compiled, before anyone waits for them."""
        stream = Stream(self.pool.open())
        self.batcher.answers([Token(Client(""), 0, stream, self.served.samples(1).tobytes())])
        self.pool.close(stream.id)

    async def status(self, request: Request) -> JSONResponse:
        """GET /status: for people and monitors."""
        return JSONResponse(
            {
                "clients": len(self.clients),
                "connected": sum(client.connection is not None for client in self.clients.values()),
                "streams": len(self.pool),
                "tokens": self.batcher.tokens,
                "batches": self.batcher.batches,
                "cpu_seconds": time.process_time(),
            }
        )

    async def converse(self, websocket: WebSocket) -> None:
        """All that happens on a connection."""
        if self.strangers >= self.limits.clients:
            await websocket.close()  # not even accepted: status 403
            return
        connection, client = Connection(websocket), None
        writer = asyncio.create_task(connection.write())
        try:
            client = await self._greet(connection)
            while client.connection is connection:
                await self._hear(client, connection, await self._message(websocket))
                await connection.settled()
            await asyncio.wait([writer])  # which tells that another connection has taken over
        except Refusal as refusal:
            connection.close(refusal.code, str(refusal))
            await asyncio.wait([writer])
        except WebSocketDisconnect:
            pass
        finally:
            writer.cancel()
            if client is not None and client.connection is connection:
                client.connection = None
                self.expect(client)

    async def _message(self, websocket: WebSocket) -> str | bytes:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        text: str | None = message.get("text")
        return message["bytes"] if text is None else text

    async def _greet(self, connection: Connection) -> Client:
        """The client that a connection belongs to: its first message says so, or asks for a new key."""
        self.strangers += 1
        try:
            await connection.websocket.accept()
            async with asyncio.timeout(HELLO_SECONDS):
                message = await self._message(connection.websocket)
        except TimeoutError:
            raise Refusal(MALFORMED, "no hello") from None
        finally:
            self.strangers -= 1
        match parsed(message):
            case {"hello": None, **rest} if not rest:
                key, client = self._new_client()
            case {"hello": str(key), **rest} if not rest and name_of(key) in self.clients:
                client = self.clients[name_of(key)]
            case {"hello": str(), **rest} if not rest:
                raise Refusal(NO_SUCH_CLIENT, "no client has this key, or its time is over")
            case _:
                raise Refusal(MALFORMED, 'expected {"hello": null} or {"hello": key}')
        if self.batcher.stopping:
            raise Refusal(RESTART, "the server is stopping")
        if client.connection is not None:
            client.connection.close(TAKEN_OVER, "the client is connected anew")
        if client.leaving is not None:
            client.leaving.cancel()
        client.connection, client.leaving = connection, None
        connection.note(
            hello=key,
            positions={number: stream.position for number, stream in client.streams.items()},
            token_bytes=self.served.token.itemsize,
            answer_bytes=self.served.answer.itemsize,
            message_bytes=self.message_bytes,
            streams=self.limits.streams_per_client,
        )
        return client

    def _new_client(self) -> tuple[str, Client]:
        if len(self.clients) >= self.limits.clients:
            raise Refusal(TRY_LATER, f"there are {self.limits.clients} clients already")
        key = secrets.token_urlsafe(24)
        client = self.clients[name_of(key)] = Client(name_of(key))
        return key, client

    async def _hear(self, client: Client, connection: Connection, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._take(client, connection, message)
            return
        match parsed(message):
            case {"open": numbers, **rest} if not rest:
                self._open(client, connection, stream_numbers(numbers))
            case {"close": numbers, **rest} if not rest:
                await self._close(client, connection, stream_numbers(numbers))
            case _:
                raise Refusal(MALFORMED, 'expected {"open": [numbers]} or {"close": [numbers]}')

    def _take(self, client: Client, connection: Connection, message: bytes) -> None:
        """A message of tokens."""
        if len(message) % self.record:
            raise Refusal(MALFORMED, f"expected records of {self.record} bytes, got {len(message)} bytes")
        if self.batcher.stopping:
            return  # not taken: the client finds out when it comes back
        nothing = bytes(self.served.answer.itemsize)
        for at in range(0, len(message), self.record):
            number, _, sequence = HEADER.unpack_from(message, at)
            stream = client.streams.get(number)
            if stream is None:
                connection.answer(number, NO_SUCH_STREAM, sequence, nothing)
            elif sequence == stream.position:
                if not stream.busy:  # else it came twice, and is answered once
                    data = message[at + HEADER.size : at + self.record]
                    self.batcher.submit(Token(client, number, stream, data))
            elif sequence == stream.position - 1:
                connection.answer(number, OK, sequence, stream.answer)
            else:
                connection.answer(number, OUT_OF_ORDER, stream.position, nothing)
        live = sum(len(other.streams) for other in self.clients.values() if other.connection is not None)
        if len(self.batcher.ready) >= live:
            self.batcher.hurry()

    def _open(self, client: Client, connection: Connection, numbers: list[int]) -> None:
        """All of these or none."""
        if any(number in client.streams for number in numbers):
            connection.note(error="one of these streams is open already", open=numbers)
        elif len(client.streams) + len(numbers) > self.limits.streams_per_client:
            connection.note(error=f"a client may have {self.limits.streams_per_client} streams", open=numbers)
        else:
            ids: list[int] = []
            try:
                while len(ids) < len(numbers):
                    ids.append(self.pool.open())
            except PoolFullError:
                for id_ in ids:
                    self.pool.close(id_)
                connection.note(error="the server has as many streams as it can", open=numbers)
                return
            client.streams.update({number: Stream(id_) for number, id_ in zip(numbers, ids, strict=True)})
            connection.note(opened=numbers)

    async def _close(self, client: Client, connection: Connection, numbers: list[int]) -> None:
        """All of these or none. Says so when their places are free, which takes as long as a batch."""
        if not all(number in client.streams for number in numbers):
            connection.note(error="one of these streams is not open", close=numbers)
            return
        ended = [client.streams.pop(number) for number in numbers]
        for stream in ended:
            self._end(stream)
        while any(stream.busy for stream in ended) and not self.batcher.stopping:
            await asyncio.sleep(0.001)
        connection.note(closed=numbers)

    def _end(self, stream: Stream) -> None:
        stream.closed = True
        if not stream.busy:
            self.pool.close(stream.id)

    def expect(self, client: Client) -> None:
        """Keep the streams of a client that is gone, for a while."""
        grace = self.limits.grace if client.streams else 0
        client.leaving = asyncio.get_running_loop().call_later(grace, self._forget, client)

    def _forget(self, client: Client) -> None:
        for stream in client.streams.values():
            self._end(stream)
        del self.clients[client.name]

    async def hand_out(self) -> None:
        """Wait until the answers are sent, for a moment: who comes back can have the last one again."""
        connections = [client.connection for client in self.clients.values() if client.connection is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                for connection in connections:
                    await connection.settled(0)


def parsed(message: str | bytes) -> dict[str, Any]:
    """A message of JSON."""
    try:
        what = json.loads(message) if isinstance(message, str) else None
    except (ValueError, RecursionError):
        what = None
    if not isinstance(what, dict):
        raise Refusal(MALFORMED, "expected a JSON object")
    return what


def stream_numbers(numbers: Any) -> list[int]:
    """Stream numbers in a message, each once."""
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**32 for n in numbers):
        raise Refusal(MALFORMED, "expected a list of stream numbers from 0 to 2**32 - 1")
    if len(set(numbers)) < len(numbers):
        raise Refusal(MALFORMED, "a stream number is there twice")
    return numbers


# Snapshots: a file of the pool, and clients.json, which names it and comes last, by a rename: one act for both

POOL_FILE = re.compile(r"streams-[0-9a-f]{16}\.safetensors")


def claim(folder: Path) -> None:
    """Make a folder this process's own until it ends: of two servers, each would delete what the other has saved."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)  # closed, and so unlocked, when the process ends
    if sys.platform == "win32":
        print(f"{folder}: can't be locked on this system: see to it that no other server has it", file=sys.stderr)
    else:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"{folder}: another server has this folder") from None


def save(service: Service, folder: Path) -> None:
    """Write all clients and streams, while nothing is being stepped. Where that fails, the old snapshot stays."""
    pool, temporary = folder / f"streams-{secrets.token_hex(8)}.safetensors", folder / f".{secrets.token_hex(8)}.tmp"
    clients = {
        client.name: {number: [s.id, s.position, s.answer.hex()] for number, s in client.streams.items()}
        for client in service.clients.values()
        if client.streams
    }
    text = json.dumps({"pool": pool.name, "clients": clients})
    try:
        service.pool.save(pool)
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / "clients.json")
    except BaseException:
        for new in pool, temporary:
            new.unlink(missing_ok=True)
        raise
    for old in folder.iterdir():
        if POOL_FILE.fullmatch(old.name) and old != pool:
            old.unlink()


def load(service: Service, folder: Path) -> None:
    """Go on from a snapshot. SnapshotError where it is damaged or belongs to something else; it stays as it is."""
    path = folder / "clients.json"
    if not path.exists():
        return
    digest, _, text = path.read_bytes().partition(b"\n")
    if digest.decode("ascii", "replace") != hashlib.sha256(text).hexdigest():
        raise SnapshotError(f"{path}: its checksum is not that of its text")
    try:
        pool, clients = saved(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SnapshotError(f"{path}: not clients of this server") from None
    now = service.pool.load(folder / pool)
    streams = [stream for client in clients for stream in client.streams.values()]
    if sorted(stream.id for stream in streams) != sorted(now):
        raise SnapshotError(f"{path}: its streams are not those in {pool}")
    for stream in streams:
        stream.id = now[stream.id]
        size = service.served.answer.itemsize if stream.position else 0
        if service.pool.position(stream.id) != stream.position or len(stream.answer) != size:
            raise SnapshotError(f"{path}: its positions or answers are not those of {pool}")
    service.clients = {client.name: client for client in clients}


def saved(what: Any) -> tuple[str, list[Client]]:
    """The name of the file of the pool, and clients whose streams have ids of that file. Raises where it is neither."""
    pool, clients = what["pool"], []
    if not POOL_FILE.fullmatch(pool):
        raise ValueError(pool)
    for name, streams in what["clients"].items():
        client = Client(name)
        for number, (id_, position, answer) in streams.items():
            if type(id_) is not int or type(position) is not int:
                raise TypeError(number)
            if str(int(number)) != number or not 0 <= int(number) < 2**32:
                raise ValueError(number)
            client.streams[int(number)] = Stream(id_, position, bytes.fromhex(answer))
        clients.append(client)
    return pool, clients


# Connections: uvicorn waits for clients without end, and takes any number of them


class Http(H11Protocol):
    """A connection that has to become a WebSocket soon. There are fewer than `limit_concurrency` connections at all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) >= (self.limit_concurrency or 0):
            transport.abort()
        else:
            self.loop.call_later(HELLO_SECONDS, self._too_late)

    def _too_late(self) -> None:
        if self.transport.get_protocol() is self:  # not a WebSocket's
            self.transport.abort()


class Talk(WebSocketsSansIOProtocol):
    """A WebSocket that is cut off where its client doesn't read: closing it would wait for what is still to be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it has not read answers to what it asked before
        self.transport.set_write_buffer_limits(high=0)  # so writing is paused whenever the client takes no more

    def pause_writing(self) -> None:
        super().pause_writing()
        self._patience = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._patience.cancel()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.get_write_buffer_size():  # it had FLUSH_SECONDS
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """A message is complete. Text that isn't UTF-8 is left to the service to refuse: uvicorn logs a traceback."""
        if self.curr_msg_data_type == "text":
            self.frames = [b"".join(self.frames).decode(errors="replace").encode()]
        super().send_receive_event_to_app()


def allow_files(count: int) -> None:
    """Have this process allowed so many open files. Where they run out, it can't accept a client, nor save."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < count:
            if hard != resource.RLIM_INFINITY and hard < count:
                raise ValueError(f"--clients: so many need {count} open files, and {hard} are allowed (ulimit -n)")
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


# The process


class Unsaved(Exception):
    """The snapshot could not be written."""


class Server(uvicorn.Server):
    """uvicorn, which on SIGTERM first finishes the work, and only then closes the connections (code 1012)."""

    def __init__(self, config: uvicorn.Config, service: Service, folder: Path | None) -> None:
        super().__init__(config)
        self.service, self.folder = service, folder

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal comes."""
        self.batches = asyncio.create_task(self.service.batcher.run())
        self.batches.add_done_callback(self._no_more_batches)
        for client in self.service.clients.values():
            self.service.expect(client)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """From here on there are connections, and a signal ends the server in good order."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(1024)  # those wait in the system until asyncio, which asked for BACKLOG, takes them
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        print(f"serving {len(self.service.pool)} streams at ws://{host}:{port}/streams", flush=True)

    def _no_more_batches(self, batches: "asyncio.Task[None]") -> None:
        self.should_exit = True  # also where they ended by an error, which `shutdown` then raises

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more tokens, step those taken, save, and say goodbye."""
        try:
            self.service.batcher.stop()
            await self.batches
            await self.service.hand_out()
            if self.folder is not None:
                try:
                    save(self.service, self.folder)
                except OSError as error:
                    what = f"{len(self.service.pool)} streams in {self.folder}"
                    raise Unsaved(f"could not save {what}: {error}") from None
        finally:
            await super().shutdown(sockets)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve many streams over WebSockets.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765, help="0: one that is free (default: 8765)")
    parser.add_argument("--layer", metavar="HEADSxWIDTH", help="serve a layer instead of the bundled language model")
    parser.add_argument("--snapshot", metavar="FOLDER", help="save streams at the end, go on from there")
    parser.add_argument("--budget", type=float, default=2.0, help="ms that a token may wait for others (default: 2)")
    parser.add_argument("--streams", type=int, default=Limits.streams, help="of all clients")
    parser.add_argument("--streams-per-client", type=int, default=Limits.streams_per_client)
    parser.add_argument("--clients", type=int, default=Limits.clients)
    parser.add_argument("--message-bytes", type=int, help="default: for a token of each stream of a client")
    parser.add_argument("--grace", type=float, default=Limits.grace, help="s to keep a client's streams (default: 60)")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """ValueError where an option makes no sense."""
    ranges = {
        "port": (0, 65535),
        "budget": (0, 60_000),
        "streams": (1, 2**31),
        "streams-per-client": (1, 2**31),
        "clients": (1, 2**20),
        "message-bytes": (1, 2**31),
        "grace": (0, 1e9),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name.replace("-", "_"))
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name}: expected {low} to {high:.0f}, got {value}")
    if args.snapshot == "":
        raise ValueError("--snapshot: expected a folder, got nothing")


def main() -> None:
    args = arguments()
    try:
        check(args)
        limits = Limits(args.streams, args.streams_per_client, args.clients, args.message_bytes, args.grace)
        connections = 2 * limits.clients + 32  # clients, as many that haven't said who they are, and some for /status
        allow_files(connections + 4 * BACKLOG + 64)  # what is accepted is counted, and refused, three turns later
        service = Service(chosen(args.layer), limits, args.budget / 1000)
        service.warm_up()
        folder = None if args.snapshot is None else Path(args.snapshot)
        if folder is not None:
            claim(folder)
            load(service, folder)
        listener = socket.create_server((args.host, args.port), backlog=BACKLOG)
    except (ValueError, OSError, MemoryError) as error:
        raise SystemExit(f"can't serve: {error}") from None
    config = uvicorn.Config(
        service.app,
        http=Http,
        ws=Talk,
        backlog=BACKLOG,
        limit_concurrency=connections,
        ws_max_size=service.message_bytes,
        ws_per_message_deflate=False,  # costs more than it saves on messages this small
        ws_ping_interval=10,  # finds clients that have gone without a word
        ws_ping_timeout=10,
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    sys.setswitchinterval(5e-4)  # the arithmetic's thread waits for the GIL no longer than this
    gc.collect()
    gc.freeze()  # what is there now stays: not to be looked through again while clients wait
    try:
        with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises anew at the end
            asyncio.run(Server(config, service, folder).serve([listener]))
    except Unsaved as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
