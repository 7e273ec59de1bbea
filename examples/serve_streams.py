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
except ImportError as error:
    raise SystemExit(f"this needs the extra serve ({error}): pip install 'linattn-edge[serve]'") from None

Array = NDArray[Any]

# A binary message is any number of records: a header, and a token or an answer as a NumPy record.
HEADER = struct.Struct("<IIQ")  # stream, status (of a token 0), sequence number
OK, REFUSED, OUT_OF_ORDER, NO_SUCH_STREAM = range(4)

MALFORMED, NO_SUCH_CLIENT, TAKEN_OVER, RESTART, TRY_LATER = 4400, 4401, 4409, 1012, 1013  # close codes
HELLO_SECONDS = 10.0  # for a client to say who it is
FLUSH_SECONDS = 1.0  # at the end, to hand out the last answers
CLOSE_SECONDS = 5  # at the end, for clients to close
MOST_WAITING = 256  # answers and notes that wait to be read, before the client's messages wait too


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
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", layer)
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
        self.notes: list[str] = []
        self.answers: list[bytes] = []
        self.ending: tuple[int, str] | None = None  # code and reason
        self.over = False
        self._posted, self._sent = asyncio.Event(), asyncio.Event()

    def note(self, **what: Any) -> None:
        """Have JSON sent."""
        self.notes.append(json.dumps(what))
        self._posted.set()

    def answer(self, number: int, status: int, sequence: int, answer: bytes) -> None:
        """Have an answer sent."""
        self.answers.append(HEADER.pack(number, status, sequence) + answer)
        self._posted.set()

    def close(self, code: int, reason: str) -> None:
        """Have the connection closed, after what waits."""
        self.ending = code, reason
        self._posted.set()

    async def write(self) -> None:
        """Send what there is, answers together in one message, until a close or until the client is gone."""
        try:
            while True:
                await self._posted.wait()
                self._posted.clear()
                notes, self.notes = self.notes, []
                answers, self.answers = self.answers, []
                for note in notes:
                    await self.websocket.send_text(note)
                    await asyncio.sleep(0)  # a send doesn't wait while there is room: let the loop see a lost client
                if answers:
                    await self.websocket.send_bytes(b"".join(answers))
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
        while len(self.answers) + len(self.notes) > most and not self.over:
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
                self._hear(client, connection, await self._message(websocket))
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
            case {"hello": None}:
                key, client = self._new_client()
            case {"hello": str(key)} if name_of(key) in self.clients:
                client = self.clients[name_of(key)]
            case {"hello": str()}:
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

    def _hear(self, client: Client, connection: Connection, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._take(client, connection, message)
            return
        match parsed(message):
            case {"open": numbers, **rest} if not rest:
                self._open(client, connection, stream_numbers(numbers))
            case {"close": numbers, **rest} if not rest:
                self._close(client, connection, stream_numbers(numbers))
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

    def _close(self, client: Client, connection: Connection, numbers: list[int]) -> None:
        """All of these or none."""
        if not all(number in client.streams for number in numbers):
            connection.note(error="one of these streams is not open", close=numbers)
            return
        for number in numbers:
            self._end(client.streams.pop(number))
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


def save(service: Service, folder: Path) -> None:
    """Write all clients and streams, while nothing is being stepped."""
    pool = f"streams-{secrets.token_hex(8)}.safetensors"
    service.pool.save(folder / pool)
    clients = {
        client.name: {number: [s.id, s.position, s.answer.hex()] for number, s in client.streams.items()}
        for client in service.clients.values()
        if client.streams
    }
    text = json.dumps({"pool": pool, "clients": clients})
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "clients.json")
    for old in folder.glob("streams-*.safetensors"):
        if old.name != pool:
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
    if not re.fullmatch(r"streams-[0-9a-f]{16}\.safetensors", pool):
        raise ValueError(pool)
    for name, streams in what["clients"].items():
        client = Client(name)
        for number, (id_, position, answer) in streams.items():
            if type(id_) is not int or type(position) is not int:
                raise TypeError(number)
            client.streams[int(number)] = Stream(id_, position, bytes.fromhex(answer))
        clients.append(client)
    return pool, clients


# The process


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
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        print(f"serving {len(self.service.pool)} streams at ws://{host}:{port}/streams", flush=True)

    def _no_more_batches(self, batches: "asyncio.Task[None]") -> None:
        self.should_exit = True  # also where they ended by an error, which `shutdown` then raises

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more tokens, step those taken, save, and say goodbye."""
        self.service.batcher.stop()
        await self.batches
        await self.service.hand_out()
        if self.folder is not None:
            save(self.service, self.folder)
        await super().shutdown(sockets)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve many streams over WebSockets.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765, help="0: one that is free (default: 8765)")
    parser.add_argument("--layer", metavar="HEADSxWIDTH", help="serve a layer instead of the bundled language model")
    parser.add_argument("--snapshot", type=Path, metavar="FOLDER", help="save streams at the end, go on from there")
    parser.add_argument("--budget", type=float, default=2.0, help="ms that a token may wait for others (default: 2)")
    parser.add_argument("--streams", type=int, default=Limits.streams, help="of all clients")
    parser.add_argument("--streams-per-client", type=int, default=Limits.streams_per_client)
    parser.add_argument("--clients", type=int, default=Limits.clients)
    parser.add_argument("--message-bytes", type=int, help="default: for a token of each stream of a client")
    parser.add_argument("--grace", type=float, default=Limits.grace, help="s to keep a client's streams (default: 60)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    limits = Limits(args.streams, args.streams_per_client, args.clients, args.message_bytes, args.grace)
    try:
        service = Service(chosen(args.layer), limits, args.budget / 1000)
        service.warm_up()
        if args.snapshot is not None:
            args.snapshot.mkdir(mode=0o700, parents=True, exist_ok=True)
            load(service, args.snapshot)
        listener = socket.create_server((args.host, args.port), backlog=1024)
    except (ValueError, OSError) as error:
        raise SystemExit(f"can't serve: {error}") from None
    config = uvicorn.Config(
        service.app,
        ws="websockets-sansio",
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
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises anew at the end
        asyncio.run(Server(config, service, args.snapshot).serve([listener]))


if __name__ == "__main__":
    main()
