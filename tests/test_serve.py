"""The server of examples/ as a process of its own: loaded, misused, stopped in the middle, started again."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
exceptions = pytest.importorskip("websockets.exceptions")
connect = pytest.importorskip("websockets.sync.client").connect

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
server, load = import_module("serve_streams"), import_module("serve_streams_load")

SMALL = "2x16"
LAYER = server.chosen(SMALL)
TOKENS = LAYER.samples(64)
RECORD = server.HEADER.size + LAYER.token.itemsize


HANDSHAKE = (
    b"GET /streams HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)

HELLO = b'\x81\x8f\0\0\0\0{"hello": null}'


class Serving:
    """A server, for a while. What it prints to stderr, warnings too, is an error. `code` is run before it."""

    def __init__(self, *options, port=0, layer=SMALL, code=None):
        chosen = ["--layer", layer] if layer else []
        program = ["-c", f"import serve_streams\n{code}\nserve_streams.main()"] if code else ["serve_streams.py"]
        command = [sys.executable, "-W", "error", *program, "--port", port, *chosen, *options]
        self.process = subprocess.Popen(
            list(map(str, command)), cwd=EXAMPLES, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        match = re.fullmatch(r"serving (\d+) streams at (ws://127.0.0.1:(\d+)/streams)\n", line)
        assert match, (line, self.process.communicate())
        self.count, self.url, self.port = int(match[1]), match[2], int(match[3])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, with_signal=signal.SIGTERM):
        """End it, as a service manager does."""
        if self.process.returncode is not None:
            return
        self.process.send_signal(with_signal)
        out, err = self.process.communicate(timeout=20)
        assert (out, err) == ("", "")
        assert self.process.returncode == (0 if with_signal == signal.SIGINT else -with_signal)

    def status(self):
        return load.status(f"127.0.0.1:{self.port}")

    def wait(self, **what):
        """Until its status is that."""
        end = time.monotonic() + 10
        while what.items() - self.status().items():
            assert time.monotonic() < end, (what, self.status())
            time.sleep(0.02)


class Talk:
    """A client, by hand."""

    def __init__(self, serving, key=None, open=()):
        self.stack = contextlib.ExitStack()
        self.socket = self.stack.enter_context(connect(serving.url, compression=None))
        self.hello = self.ask(hello=key)
        self.key = self.hello["hello"]
        self.open = list(open)
        if open:
            assert self.ask(open=self.open) == {"opened": self.open}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(exceptions.ConnectionClosed):
            self.socket.send(json.dumps({"close": self.open}))  # else they stay for the grace time
        self.stack.close()

    def ask(self, **what):
        self.socket.send(json.dumps(what))
        return json.loads(self.socket.recv(timeout=10))

    def send(self, *tokens):
        self.socket.send(b"".join(record(*token) for token in tokens))

    def answers(self, count):
        """{stream: (status, sequence, answer)} of so many answers."""
        found, size = {}, server.HEADER.size + LAYER.answer.itemsize
        while len(found) < count:
            message = self.socket.recv(timeout=10)
            for at in range(0, len(message), size):
                number, status, sequence = server.HEADER.unpack_from(message, at)
                assert number not in found
                found[number] = status, sequence, message[at + server.HEADER.size : at + size]
        return found

    def one(self, *token):
        """The answer to one token."""
        self.send(token)
        return self.answers(1)[token[0]]

    def closed(self):
        """How the server ends the connection."""
        try:
            while True:
                self.socket.recv(timeout=10)
        except exceptions.ConnectionClosed as closed:
            return closed.rcvd.code


def record(number, sequence, token=None):
    """A token as it is sent; by default the stream's own."""
    token = TOKENS[(7 * number + sequence) % len(TOKENS)] if token is None else token
    return server.HEADER.pack(number, 0, sequence) + token.tobytes()


def expected(number, count):
    """The answers to the first tokens of a stream."""
    return [a.tobytes() for a in LAYER.alone(TOKENS[(7 * number + np.arange(count)) % len(TOKENS)])]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def running():
    options = ("--streams", 40, "--streams-per-client", 16, "--clients", 6, "--grace", 1)
    with Serving(*options) as serving:
        yield serving


@pytest.fixture
def serving(running):
    """The same for all, with nobody there."""
    running.wait(clients=0, streams=0)
    return running


def nan():
    token = TOKENS[:1].copy()
    token["k"][0, 1, 3] = np.nan
    return token


# answers


def test_a_layer_under_load(serving):
    wanted = load.Load(20, 50, 1, 3)
    report, streams = asyncio.run(load.run("127.0.0.1", serving.port, LAYER, wanted))
    assert report.faults == []
    assert load.check(LAYER, wanted, streams) == []
    assert report.latencies.size == 1000 and report.connections == 3
    serving.wait(streams=0)


def test_the_model_under_load_by_the_commands():
    with Serving(layer=None) as serving:
        command = [EXAMPLES / "serve_streams_load.py", "--port", serving.port, "--streams", 20, "--rate", 50]
        done = subprocess.run(
            list(map(str, [sys.executable, "-W", "error", *command, "--seconds", 1, "--clients", 3])),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "1,000 tokens answered" in done.stdout and "p99" in done.stdout
    assert "every answer is that of a stream alone, to the bit: 1,000 tokens" in done.stdout


def test_a_wrong_answer_is_found():
    wanted, stream = load.Load(streams=1, rate=20, seconds=1), load.Stream(0, 0)
    stream.answers += LAYER.alone(load.Bank(LAYER).first(stream, 20)).tobytes()
    stream.latencies += [0.0] * 20
    assert load.check(LAYER, wanted, [stream]) == []
    stream.answers[7 * LAYER.answer.itemsize] ^= 1
    (fault,) = load.check(LAYER, wanted, [stream])
    assert fault == "stream 0: 20 answers of 20, the first wrong one is number 7"
    del stream.answers[-1], stream.latencies[-1]
    assert len(load.check(LAYER, wanted, [stream])) == 1


def test_a_token_is_taken_once(serving):
    want = expected(3, 3)
    with Talk(serving, open=[3]) as talk:
        assert talk.one(3, 0) == (server.OK, 0, want[0])
        assert talk.one(3, 0) == (server.OK, 0, want[0])
        assert talk.one(3, 1) == (server.OK, 1, want[1])
        assert talk.one(3, 1, TOKENS[50]) == (server.OK, 1, want[1])
        for sequence in (0, 3, 2**64 - 1):
            assert talk.one(3, sequence)[:2] == (server.OUT_OF_ORDER, 2)
        talk.send((3, 2), (3, 2))
        assert talk.answers(1)[3] == (server.OK, 2, want[2])
        assert talk.one(4, 0)[:2] == (server.NO_SUCH_STREAM, 0)  # and no second answer to the last one


def test_a_token_that_is_refused_harms_nothing(serving):
    with Talk(serving, open=[1, 2]) as talk:
        assert talk.one(1, 0)[0] == server.OK
        talk.send((1, 1, nan()), (2, 0))
        assert talk.answers(2) == {
            1: (server.REFUSED, 1, bytes(LAYER.answer.itemsize)),
            2: (server.OK, 0, expected(2, 1)[0]),
        }
        assert talk.one(1, 1) == (server.OK, 1, expected(1, 2)[1])


def test_clients_number_their_own_streams(serving):
    with Talk(serving, open=[1, 2]) as mine, Talk(serving, open=[1]) as other:
        assert mine.one(1, 0)[2] == expected(1, 1)[0]
        assert other.one(2, 0)[0] == server.NO_SUCH_STREAM
        assert other.one(1, 1)[:2] == (server.OUT_OF_ORDER, 0)
        assert other.one(1, 0, TOKENS[50])[0] == server.OK
        assert other.ask(close=[2])["error"] == "one of these streams is not open"
        assert other.ask(close=[1]) == {"closed": [1]}
        assert mine.one(1, 1) == (server.OK, 1, expected(1, 2)[1])


def test_close_and_open_begins_anew(serving):
    with Talk(serving, open=[5]) as talk:
        assert talk.one(5, 0)[0] == server.OK
        assert talk.ask(close=[5]) == {"closed": [5]}
        assert talk.one(5, 1)[0] == server.NO_SUCH_STREAM
        assert talk.ask(open=[5]) == {"opened": [5]}
        assert talk.one(5, 0) == (server.OK, 0, expected(5, 1)[0])


# clients that go


def test_a_client_that_vanishes_in_a_message(serving):
    with Talk(serving, open=[0]) as other:
        gone = Talk(serving, open=range(8))
        gone.send(*((number, 0) for number in range(8)))  # these are stepped, and nobody takes the answers
        gone.socket.socket.sendall(b"\x82\xfe")  # the beginning of a frame
        gone.socket.socket.shutdown(socket.SHUT_RDWR)
        for t in range(20):
            assert other.one(0, t) == (server.OK, t, expected(0, t + 1)[t])
        serving.wait(clients=1, streams=1)
        assert other.one(0, 20)[0] == server.OK


def test_clients_that_vanish_at_the_door(serving):
    with Talk(serving, open=[0]) as other:
        for beginning in (b"", HANDSHAKE[:50], HANDSHAKE, HANDSHAKE + HELLO):
            for _ in range(5):
                gone = socket.create_connection(("127.0.0.1", serving.port))
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
                gone.sendall(beginning)
                gone.close()
            serving.wait(clients=1)
        assert other.one(0, 0)[0] == server.OK


def test_connections_that_say_nothing(serving):
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connect(serving.url))
        with pytest.raises(exceptions.InvalidStatus, match="403"):
            stack.enter_context(connect(serving.url))
    with Talk(serving, open=[0]) as talk:
        assert talk.one(0, 0)[0] == server.OK


def test_a_client_that_comes_back_in_time(serving):
    first = Talk(serving, open=[0, 9])
    answer = first.one(9, 0)
    first.stack.close()
    with Talk(serving, key=first.key) as talk:
        assert talk.hello["positions"] == {"0": 0, "9": 1}
        assert talk.one(9, 0) == answer
        assert talk.one(9, 1) == (server.OK, 1, expected(9, 2)[1])
        time.sleep(1.2)  # longer than the grace of the first connection
        assert talk.one(9, 2)[0] == server.OK


def test_a_new_connection_takes_over(serving):
    old = Talk(serving, open=[0])
    assert old.one(0, 0)[0] == server.OK
    with Talk(serving, key=old.key) as talk:
        assert old.closed() == server.TAKEN_OVER
        assert talk.one(0, 1) == (server.OK, 1, expected(0, 2)[1])
        assert serving.status()["clients"] == 1


@pytest.mark.parametrize(
    "message",
    [(b"".join(server.HEADER.pack(99, 0, 0) + bytes(RECORD - 16) for _ in range(10)), 2), (b'{"open": [0]}', 1)],
)
def test_a_client_that_does_not_read(serving, message):
    with Talk(serving, open=[0]) as other:
        with not_reading(serving, *message):
            assert other.one(0, 0)[0] == server.OK
            assert serving.status()["connected"] == 2
        serving.wait(clients=1, streams=1)


@contextlib.contextmanager
def not_reading(serving, *message):
    """A client that says something until the server no longer reads it, and reads no answer."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", serving.port))
        for data, answer in (HANDSHAKE, b"101 "), (HELLO, b"hello"):
            slow.sendall(data)
            assert answer in slow.recv(1000)
        slow.settimeout(0.5)
        with pytest.raises(TimeoutError):
            slow.sendall(frame(*message) * (100_000_000 // len(message[0])))
        yield


def test_a_client_that_does_not_read_is_cut_off():
    message = b'{"close": [5]}', 1
    with Serving("--grace", 0.2, code="serve_streams.READ_SECONDS = 2") as serving, Talk(serving, open=[0]) as other:
        with not_reading(serving, *message), not_reading(serving, *message):
            serving.wait(clients=1)
            assert other.one(0, 0)[0] == server.OK
        with not_reading(serving, *message):
            serving.stop(signal.SIGINT)  # says nothing, and waits for nobody


def test_connections_without_a_request():
    """More than there may be, and more than there may be files: the oldest are kept for a while, others are not."""
    files = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (380, 380))"
    code = f"serve_streams.HELLO_SECONDS = 4; {files}"
    with (
        Serving("--clients", 2, code=code) as serving,
        Talk(serving, open=[0]) as talk,
        contextlib.ExitStack() as stack,
    ):
        start = time.monotonic()
        beginnings = [b"", HANDSHAKE[:50]] * 250
        for beginning in beginnings:
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", serving.port)))
            with contextlib.suppress(OSError):
                silent.sendall(beginning)
        for t in range(20):
            assert talk.one(0, t)[0] == server.OK
        refused = 0
        while True:  # until the silent ones have been cut off
            try:
                new = stack.enter_context(Talk(serving))
                break
            except (OSError, EOFError, exceptions.WebSocketException):
                refused += 1
                assert time.monotonic() < start + 60
                time.sleep(0.2)
        assert refused or time.monotonic() > start + 4  # a slow machine may have come too late to be refused
        assert new.ask(open=[1]) == {"opened": [1]}


def test_silent_connections_do_not_keep_it_from_saving(tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (380, 380))"
    with Serving("--clients", 2, "--snapshot", tmp_path, code=code) as serving, contextlib.ExitStack() as stack:
        talk = stack.enter_context(Talk(serving, open=[0]))
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", serving.port)))
        assert talk.one(0, 0)[0] == server.OK
        serving.stop()
        assert talk.closed() == server.RESTART
    with Serving("--snapshot", tmp_path) as serving:
        assert serving.count == 1


def frame(data, opcode):
    """A WebSocket frame of a client; masked with zeros."""
    assert len(data) < 2**16
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + length + bytes(4) + data


def test_nothing_of_a_stream_comes_after_its_end():
    class Peer:
        def __init__(self):
            self.got = []

        async def send_text(self, what):
            self.got.append(json.loads(what))

        async def send_bytes(self, what):
            self.got.append(what)

        async def close(self, code, reason):
            self.got.append(code)

    async def talk():
        connection = server.Connection(Peer())
        connection.answer(0, 0, 0, b"a")
        connection.answer(1, 0, 0, b"b")
        connection.note(closed=[0])
        connection.answer(1, 0, 1, b"c")
        connection.close(server.RESTART, "")
        await connection.write()
        return connection.websocket.got

    first, *rest = asyncio.run(talk())
    assert first == server.HEADER.pack(0, 0, 0) + b"a" + server.HEADER.pack(1, 0, 0) + b"b"
    assert rest == [{"closed": [0]}, server.HEADER.pack(1, 0, 1) + b"c", server.RESTART]


def test_a_closed_stream_leaves_its_place():
    slow = """
step = serve_streams.Layer.step
serve_streams.Layer.step = lambda *args: (serve_streams.time.sleep(0.1), step(*args))[1]
"""
    with Serving("--streams", 1, code=slow) as serving, Talk(serving, open=[0]) as talk:
        for _ in range(5):
            talk.send((0, 0))
            talk.socket.send('{"close": [0]}')
            talk.socket.send('{"open": [0]}')
            assert [json.loads(talk.socket.recv(timeout=10)) for _ in range(2)] == [{"closed": [0]}, {"opened": [0]}]
        assert talk.one(0, 0) == (server.OK, 0, expected(0, 1)[0])


# limits and misuse


def test_limits(serving):
    with Talk(serving, open=range(16)) as a, Talk(serving, open=range(16)) as b, Talk(serving) as c:
        assert a.ask(open=[16])["error"] == "a client may have 16 streams"
        assert a.ask(open=[3])["error"] == "one of these streams is open already"
        assert c.ask(open=list(range(9)))["error"] == "the server has as many streams as it can"
        assert c.ask(open=list(range(8))) == {"opened": list(range(8))}
        assert serving.status()["streams"] == 40
        others = [Talk(serving) for _ in range(3)]
        with pytest.raises(exceptions.ConnectionClosed) as caught:
            Talk(serving)
        assert caught.value.rcvd.code == server.TRY_LATER
        assert [talk.one(0, 0)[0] for talk in (a, b, c)] == [server.OK] * 3
        for talk in others:
            talk.stack.close()


@pytest.mark.parametrize(
    "message",
    [
        *(
            "",
            "{",
            "[]",
            "7",
            '{"open": 3}',
            '{"open": [1.5]}',
            '{"open": [true]}',
            '{"open": [-1]}',
            '{"open": [1, 1]}',
        ),
        *('{"open": [4294967296]}', '{"open": [1], "close": [1]}', '{"hello": null}', "[" * 4000, '{"open": [NaN]}'),
        *(b"\x00", bytes(RECORD - 1), bytes(RECORD + 1)),
    ],
)
def test_malformed_messages(serving, message):
    with Talk(serving) as talk:
        talk.socket.send(message)
        assert talk.closed() == server.MALFORMED


def test_text_that_is_not_utf8(serving):
    with Talk(serving) as talk:
        talk.socket.socket.sendall(frame(b'{"open": [0], "\xff": 1}', 1))
        assert talk.closed() == server.MALFORMED


@pytest.mark.parametrize("message", ["{}", '{"hello": 3}', '{"hello": null, "x": 1}', '{"open": [1]}', b"\x00\x01"])
def test_malformed_hellos(serving, message):
    with connect(serving.url) as connection:
        connection.send(message)
        with pytest.raises(exceptions.ConnectionClosed) as caught:
            connection.recv(timeout=10)
    assert caught.value.rcvd.code == server.MALFORMED


@pytest.mark.parametrize("key", ["", "x" * 32, "\ud800", 3])
def test_keys_that_are_nobodys(serving, key):
    with pytest.raises(exceptions.ConnectionClosed) as caught:
        Talk(serving, key=key)
    assert caught.value.rcvd.code == (server.MALFORMED if key == 3 else server.NO_SUCH_CLIENT)


def test_a_message_that_is_too_long(serving):
    with Talk(serving, open=[0]) as other, Talk(serving) as talk:
        assert talk.hello["message_bytes"] == 16 * RECORD
        talk.socket.send(bytes(16 * RECORD + 1))
        assert talk.closed() == 1009
        assert other.one(0, 0)[0] == server.OK


# the end, and a new beginning


def test_a_restart_under_load(tmp_path):
    served, port, wanted = server.chosen(None), free_port(), load.Load(20, 50, 2.5, 3)
    first = Serving("--snapshot", tmp_path, port=port, layer=None)
    second = []

    def restart():
        time.sleep(1.1)
        first.stop()
        second.append(Serving("--snapshot", tmp_path, port=port, layer=None))

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        report, streams = asyncio.run(load.run("127.0.0.1", port, served, wanted))
    finally:
        thread.join()
        second[0].stop()
    assert report.faults == []
    assert load.check(served, wanted, streams) == []
    assert report.connections == 6
    assert second[0].count == 20


def test_a_snapshot_has_all(tmp_path):
    with Serving("--snapshot", tmp_path) as serving, Talk(serving, open=[4, 5, 6]) as talk:
        answers = [talk.one(4, t) for t in range(3)]
        talk.one(5, 0)
        serving.stop()
        assert talk.closed() == server.RESTART
    assert talk.key not in (tmp_path / "clients.json").read_text()
    with Serving("--snapshot", tmp_path) as serving:
        assert serving.count == 3
        with Talk(serving, key=talk.key) as talk:
            assert talk.hello["positions"] == {"4": 3, "5": 1, "6": 0}
            assert talk.one(4, 2) == answers[2]
            assert talk.one(4, 3) == (server.OK, 3, expected(4, 4)[3])
            assert talk.one(6, 0) == (server.OK, 0, expected(6, 1)[0])
            serving.stop(signal.SIGKILL)  # saves nothing, and breaks nothing
    with Serving("--snapshot", tmp_path) as serving:
        talk = Talk(serving, key=talk.key)
        assert talk.hello["positions"] == {"4": 3, "5": 1, "6": 0}
        serving.stop()
        talk.stack.close()
    assert len(list(tmp_path.iterdir())) == 3  # clients.json, the pool's file, and .lock
    with Serving("--snapshot", tmp_path, "--grace", 0.2) as serving:  # this time nobody comes back
        assert serving.count == 3
        serving.wait(clients=0, streams=0)


def test_ctrl_c_saves_too(tmp_path):
    with Serving("--snapshot", tmp_path) as serving:
        serving.stop(signal.SIGINT)
    with Serving("--snapshot", tmp_path) as serving:
        assert serving.count == 0


def test_a_save_that_fails(tmp_path):
    folder = tmp_path / "gone"
    with Serving("--snapshot", folder) as serving, Talk(serving, open=[0, 1]) as talk:
        (folder / ".lock").unlink()
        folder.rmdir()
        serving.process.send_signal(signal.SIGTERM)
        assert talk.closed() == server.RESTART
        _, err = serving.process.communicate(timeout=20)
    assert serving.process.returncode == 1
    assert err.startswith(f"could not save 2 streams in {folder}: ") and err.count("\n") == 1


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "clients.json").mkdir()

    async def save():
        server.save(server.Service(LAYER, server.Limits(), 0.002), tmp_path)

    with pytest.raises(OSError, match=r"clients\.json"):
        asyncio.run(save())
    assert [path.name for path in tmp_path.iterdir()] == ["clients.json"]


def test_a_folder_has_one_server(tmp_path):
    with Serving("--snapshot", tmp_path):
        assert "another server has this folder" in refused("--layer", SMALL, "--snapshot", tmp_path)
    with Serving("--snapshot", tmp_path):
        pass


def test_files_of_others_are_kept(tmp_path):
    others = {
        "streams-mine.safetensors",
        "streams-0123456789ABCDEF.safetensors",
        "streams-0123456789abcdef.safetensors.old",
    }
    for name in {"streams-0123456789abcdef.safetensors"} | others:
        (tmp_path / name).touch()
    with Serving("--snapshot", tmp_path):
        pass
    names = {path.name for path in tmp_path.iterdir()}
    assert others < names and "streams-0123456789abcdef.safetensors" not in names


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """The files of a snapshot: {name: bytes}."""
    folder = tmp_path_factory.mktemp("snapshot")
    with Serving("--snapshot", folder) as serving, Talk(serving, open=[0, 1]) as talk:
        talk.one(0, 0)
        serving.stop()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def changed(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def signed(what):
    """clients.json with a checksum that is right."""
    text = json.dumps(what)
    return f"{server.hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode()


def loaded(folder, layer=LAYER, **limits):
    service = server.Service(layer, server.Limits(**limits), 0.002)
    server.load(service, folder)
    return service


async def unserved(folder, *args, **limits):
    return loaded(folder, *args, **limits)


def test_a_damaged_snapshot_is_refused_and_kept(snapshot, tmp_path):
    pool = next(name for name in snapshot if name != "clients.json")
    damaged = [{"clients.json": changed(snapshot["clients.json"], at)} for at in (0, 64, 65, -1)]
    damaged += [{"clients.json": b""}, {pool: changed(snapshot[pool], -100)}, {pool: snapshot[pool][:-1]}, {pool: None}]
    for change in damaged:
        files = {name: data for name, data in (snapshot | change).items() if data is not None}
        folder = write(tmp_path / str(len(list(tmp_path.iterdir()))), files)
        with pytest.raises((ValueError, OSError)):
            asyncio.run(unserved(folder))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def write(folder, files):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_snapshot_made_up_by_someone(snapshot, tmp_path):
    text = json.loads(snapshot["clients.json"].partition(b"\n")[2])
    (name,) = text["clients"]
    streams = text["clients"][name]
    one, two = streams["0"], streams["1"]
    for bad in (
        [],
        {"pool": text["pool"]},
        {"pool": "../" + text["pool"], "clients": {}},
        {"pool": 3, "clients": {}},
        {"pool": text["pool"], "clients": []},
        {"pool": text["pool"], "clients": {}},
        *(
            {"pool": text["pool"], "clients": {name: streams}}
            for streams in (
                {"0": one},
                {"0": one, "1": one},
                {"0": one, "1": [two[0], 1, one[2]]},
                {"0": one, "1": [two[0], 0, one[2]]},
                {"0": one, "1": [str(two[0]), 0, ""]},
                {"0": one, "1": [two[0], 0]},
                *({"0": one, number: two} for number in ("x", "-1", " 7", "07", "1_0", "٣", "4294967296")),
                {"0": [one[0], 1, one[2][:-2]], "1": two},
            )
        ),
    ):
        folder = write(tmp_path / str(len(list(tmp_path.iterdir()))), snapshot | {"clients.json": signed(bad)})
        with pytest.raises(server.SnapshotError):
            asyncio.run(unserved(folder))
    folder = write(tmp_path / "right", snapshot | {"clients.json": signed(text)})
    assert len(asyncio.run(unserved(folder)).pool) == 2
    with pytest.raises(server.SnapshotError, match="another layer"):
        asyncio.run(unserved(folder, server.chosen("2x8")))
    with pytest.raises(server.PoolFullError):
        asyncio.run(unserved(folder, streams=1))


def refused(*options, code=None):
    command = [sys.executable, *(["-c", code] if code else [EXAMPLES / "serve_streams.py"]), *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_refusals_are_one_line(snapshot, tmp_path):
    folder = write(tmp_path / "damaged", snapshot | {"clients.json": b"{}"})
    assert "its checksum is not that of its text" in refused("--layer", SMALL, "--snapshot", folder)
    assert "expected HEADSxWIDTH" in refused("--layer", "two")
    assert "--port: expected 0 to 65535, got 99999" in refused("--port", "99999")
    blocked = (
        f"import sys, runpy; sys.modules['starlette'] = None; runpy.run_path({str(EXAMPLES / 'serve_streams.py')!r})"
    )
    assert "pip install 'linattn-edge[serve]'" in refused(code=blocked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--port -1", "--port: expected 0"),
        ("--budget nan", "--budget: expected 0"),
        ("--budget -1", "--budget: expected 0"),
        ("--grace nan", "--grace: expected 0"),
        ("--grace -3", "--grace: expected 0"),
        ("--clients 0", "--clients: expected 1"),
        ("--clients 1000000", "--clients: so many need .* open files"),
        ("--streams 0", "--streams: expected 1"),
        ("--streams-per-client 0", "--streams-per-client: expected 1"),
        ("--message-bytes -1", "--message-bytes: expected 1"),
        ("--message-bytes 3", "--message-bytes: expected 1024"),
        ("--snapshot=", "--snapshot: expected a folder"),
        ("--layer ２x８", "--layer: expected HEADSxWIDTH"),
        ("--layer 9999x9999", "[Uu]nable to allocate"),
    ],
)
def test_options_that_make_no_sense(monkeypatch, options, message):
    layer = [] if "--layer" in options else ["--layer", SMALL]
    monkeypatch.setattr(sys, "argv", ["", *layer, *options.split()])
    with pytest.raises(SystemExit, match=f"^can't serve: {message}"):
        server.main()


def test_a_fault_of_the_arithmetic_ends_the_server(tmp_path):
    code = """
import serve_streams, sys
def step(*args, times=[]):
    times.append(None)
    if len(times) > 3: raise MemoryError("no more")
    return right(*args)
right, serve_streams.Layer.step = serve_streams.Layer.step, step
sys.argv = ["", "--port", "0", "--layer", "2x16", "--snapshot", %r]
serve_streams.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code % str(tmp_path)], cwd=EXAMPLES, stdout=-1, stderr=-1, text=True
    )
    url = process.stdout.readline().split()[-1]
    with connect(url) as talk:
        for what in ({"hello": None}, {"open": [0]}):
            talk.send(json.dumps(what))
            talk.recv(timeout=10)
        for t in range(3):
            talk.send(record(0, t))
            with contextlib.suppress(exceptions.ConnectionClosed):
                talk.recv(timeout=10)
    err = process.communicate(timeout=20)[1]
    assert process.returncode == 1 and "MemoryError: no more" in err
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_five_hundred_streams_for_a_minute():
    with Serving(layer=None) as serving:
        served, wanted = server.chosen(None), load.Load()
        report, streams = asyncio.run(load.run("127.0.0.1", serving.port, served, wanted))
    print(*report.lines(), os.getloadavg(), sep="\n")
    assert report.faults == []
    assert load.check(served, wanted, streams) == []
    assert report.latencies.size == 600_000  # the times are for people: they depend on what else runs
