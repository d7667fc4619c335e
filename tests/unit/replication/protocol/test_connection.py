import errno
import gc
import socket
import ssl
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vmckpt.replication.protocol import connection
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Ack, Heartbeat, Pages, WrongToken
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import Deadline

SHORT = Seconds(5.0)


class Ends:
    """Two agents' folders, and a listening socket of the second."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "one", folder / "two"]
        for one in self.folders:
            one.mkdir()
        told = [connection.make_identity(one) for one in self.folders]
        for one, other in zip(self.folders, reversed(told), strict=True):
            (one / connection.PEER).write_text(other)
        self.server = socket.create_server(("127.0.0.1", 0))

    def lines(
        self, stack: ExitStack, tokens: tuple[int, int] = (7, 7)
    ) -> tuple[PeerConnection, PeerConnection]:
        found = []
        waiter = threading.Thread(
            target=lambda: found.append(
                connection.accept(self.folders[1], self.server, limit=SHORT)
            )
        )
        waiter.start()
        near = connection.connect(self.folders[0], self.server.getsockname(), limit=SHORT)
        waiter.join()
        assert found[0] is not None
        return (
            stack.enter_context(PeerConnection(near, lambda: tokens[0])),
            stack.enter_context(PeerConnection(found[0], lambda: tokens[1])),
        )


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.server.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def reset(caller: socket.socket) -> None:
    """Hang up so that the other end's connection is reset, not ended."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()


@pytest.mark.parametrize("said", [b"", b"x"], ids=["nothing", "something"])
def test_callers_that_hang_up_at_once_end_no_handshake_of_the_peer(
    ends: Ends, stack: ExitStack, said: bytes
) -> None:
    """Else a program that calls over and over keeps the primary from its standby."""
    address = ends.server.getsockname()
    began = stack.enter_context(socket.create_connection(address))
    found: list[ssl.SSLSocket | None] = []
    waiter = threading.Thread(
        target=lambda: found.append(connection.accept(ends.folders[1], ends.server, limit=SHORT))
    )
    waiter.start()
    time.sleep(0.1)  # the peer has called, and its handshake is under way
    for _ in range(3):
        caller = socket.create_connection(address)
        caller.sendall(said)
        reset(caller)
        time.sleep(0.02)
    made = connection._context(ends.folders[0], ssl.PROTOCOL_TLS_CLIENT).wrap_socket(began)
    waiter.join()
    assert found[0] is not None
    found[0].close()
    made.close()


def test_a_server_that_hangs_up_at_once_leaves_no_open_socket(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = socket.create_connection(ends.server.getsockname())
    callee, _ = ends.server.accept()
    reset(callee)
    until = Deadline(5)
    with suppress(OSError):
        while caller.getpeername():
            assert not until.passed()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: caller)
    reset_once = ConnectionResetError(errno.ECONNRESET, "reset")
    monkeypatch.setattr(ssl.SSLSocket, "recv", raising(reset_once))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ConnectionLost, match="reset"):
            connection.connect(ends.folders[0], ends.server.getsockname(), limit=SHORT)
        gc.collect()
    unclosed = [str(one.message) for one in warned if one.category is ResourceWarning]
    # Whatever tests before this one left to the garbage collector is none of its business.
    assert [one for one in unclosed if "socket" in one] == []


def raising(error: OSError) -> Callable[..., bytes]:
    def recv(*_: object) -> bytes:
        raise error

    return recv


def test_what_is_sent_arrives_in_its_order_both_ways(ends: Ends, stack: ExitStack) -> None:
    near, far = ends.lines(stack)
    large = [Pages(epoch=1, file=0, data=bytes([n]) * 3_000_000) for n in range(8)]

    def send() -> None:
        for one in large:
            near.send(one)

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(200):
        far.send(Ack(epoch=number))
    assert [far.receive(SHORT) for _ in large] == large
    assert [near.receive(SHORT) for _ in range(200)] == [Ack(epoch=n) for n in range(200)]
    sender.join()


def test_a_heartbeat_passes_between_large_messages(ends: Ends, stack: ExitStack) -> None:
    near, far = ends.lines(stack)
    page = Pages(epoch=1, file=0, data=bytes(1 << 20))
    over = threading.Event()

    def flood() -> None:
        with suppress(ConnectionLost):
            while not over.is_set():
                near.send(page)

    sender = threading.Thread(target=flood)
    sender.start()
    # Not from here: it may wait until somebody takes what is before it.
    beating = threading.Thread(target=near.send, args=(Heartbeat(sent=1.0, note=b""),))
    beating.start()
    until = Deadline(5)
    while far.receive(SHORT) == page:
        assert not until.passed()
    beating.join()
    over.set()
    near.close()
    far.close()
    sender.join()


class Door:
    """Accepts as a standby's agent does, over and over, until the end."""

    def __init__(self, ends: Ends, folder: Path | None = None) -> None:
        """`folder`: of another agent than the second."""
        self._folder, self._server = folder or ends.folders[1], ends.server
        self._over = threading.Event()
        self.came: list[object] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Door":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            made = connection.accept(self._folder, self._server, limit=Seconds(0.2))
            if made is not None:
                self.came.append(made)
                made.close()


def test_another_certificate_is_sent_away(ends: Ends, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    connection.make_identity(stranger)
    (stranger / connection.PEER).write_text((ends.folders[1] / connection.CERTIFICATE).read_text())
    assert_sent_away(ends, stranger)


def assert_sent_away(ends: Ends, stranger: Path) -> None:
    with Door(ends) as door:
        # With TLS 1.3 the client is through before the server has looked at its certificate.
        made = connection.connect(stranger, ends.server.getsockname(), limit=SHORT)
        with PeerConnection(made, lambda: 7) as one, pytest.raises(ConnectionLost):
            one.receive(SHORT)
    assert door.came == []


def test_a_server_with_another_certificate_is_not_spoken_to(ends: Ends) -> None:
    (ends.folders[0] / connection.PEER).write_text(
        (ends.folders[0] / connection.CERTIFICATE).read_text()
    )
    with Door(ends), pytest.raises(ConnectionLost, match="certificate"):
        connection.connect(ends.folders[0], ends.server.getsockname(), limit=SHORT)


def signed_by_session(folder: Path, by: Path) -> None:
    """An agent's folder with a certificate of its own that another agent's key has signed."""
    folder.mkdir()
    connection.make_identity(folder)
    (folder / connection.PEER).write_text((by / connection.PEER).read_text())
    signer = serialization.load_pem_private_key((by / connection.KEY).read_bytes(), password=None)
    issuer = x509.load_pem_x509_certificate((by / connection.CERTIFICATE).read_bytes())
    own = x509.load_pem_x509_certificate((folder / connection.CERTIFICATE).read_bytes())
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "another")]))
        .issuer_name(issuer.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(own.not_valid_before_utc)
        .not_valid_after(own.not_valid_after_utc)
        .sign(signer, hashes.SHA256())
    )
    (folder / connection.CERTIFICATE).write_bytes(made.public_bytes(serialization.Encoding.PEM))


def test_a_certificate_that_the_peer_s_has_signed_is_another_one(
    ends: Ends, tmp_path: Path
) -> None:
    """For OpenSSL that is a good chain; but the session has two certificates and no third."""
    signed_by_session(tmp_path / "stranger", ends.folders[0])
    assert_sent_away(ends, tmp_path / "stranger")


def test_a_server_whose_certificate_the_peer_s_has_signed_is_not_spoken_to(
    ends: Ends, tmp_path: Path
) -> None:
    signed_by_session(tmp_path / "stranger", ends.folders[1])
    with (
        Door(ends, tmp_path / "stranger"),
        pytest.raises(ConnectionLost, match="the certificate of this protection"),
    ):
        connection.connect(ends.folders[0], ends.server.getsockname(), limit=SHORT)


def test_a_caller_without_a_certificate_is_sent_away(ends: Ends, stack: ExitStack) -> None:
    with Door(ends) as door:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        caller = stack.enter_context(socket.create_connection(ends.server.getsockname()))
        caller.settimeout(SHORT)
        with pytest.raises(ssl.SSLError), context.wrap_socket(caller) as made:
            made.recv(1)
        connection.connect(ends.folders[0], ends.server.getsockname(), limit=SHORT).close()
        until = time.monotonic() + SHORT
        while not door.came:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert len(door.came) == 1


def test_an_older_tls_is_not_spoken(ends: Ends, stack: ExitStack) -> None:
    with Door(ends) as door:
        context = connection._context(ends.folders[0], ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        caller = stack.enter_context(socket.create_connection(ends.server.getsockname()))
        caller.settimeout(SHORT)
        with pytest.raises(ssl.SSLError, match=r"(?i)version"):
            context.wrap_socket(caller)
    assert door.came == []


def test_a_wrong_token_is_refused_by_name(ends: Ends, stack: ExitStack) -> None:
    near, far = ends.lines(stack, (6, 7))
    near.send(Ack(epoch=1))
    with pytest.raises(WrongToken):
        far.receive(SHORT)


def test_an_end_that_hangs_up_is_told(ends: Ends, stack: ExitStack) -> None:
    near, far = ends.lines(stack)
    near.close()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            far.receive(SHORT)


def test_nothing_to_receive_is_none(ends: Ends, stack: ExitStack) -> None:
    near, _ = ends.lines(stack)
    assert near.receive(Seconds(0.0)) is None
    assert near.receive(Seconds(0.05)) is None


@pytest.mark.parametrize("says", [b"", b"\x16", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_those_that_call_and_are_not_the_peer_keep_it_from_nothing(
    ends: Ends, stack: ExitStack, says: bytes
) -> None:
    """Any client on the migration network can do so, at no cost."""
    address = ends.server.getsockname()
    with Door(ends) as door:
        for _ in range(10):
            for _ in range(20):
                caller = stack.enter_context(socket.create_connection(address))
                with suppress(OSError):
                    caller.sendall(says)
            connection.connect(ends.folders[0], address, limit=SHORT).close()
        until = time.monotonic() + SHORT
        while len(door.came) < 10:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_no_more_than_some_are_listened_to_at_once(
    ends: Ends, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_AT_ONCE", 5)
    address = ends.server.getsockname()
    callers = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
    with Door(ends):
        for caller in callers[:15]:
            caller.settimeout(SHORT)
            assert caller.recv(1) == b""
        connection.connect(ends.folders[0], address, limit=SHORT).close()


def test_those_that_called_first_and_say_nothing_make_room(
    ends: Ends, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All within one wait for the peer, whose end drops them in any case."""
    monkeypatch.setattr(connection, "_AT_ONCE", 5)
    with connection._Door(ends.folders[1], ends.server) as door:
        callers = [
            stack.enter_context(socket.create_connection(ends.server.getsockname()))
            for _ in range(20)
        ]
        for _ in callers:
            door.turn(SHORT)
        for caller in callers[:15]:
            caller.settimeout(SHORT)
            assert caller.recv(1) == b""
        for caller in callers[15:]:
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)


def test_one_that_hangs_up_at_once_leaves_nothing_open(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be gone between the handshake and the look at its certificate."""
    closed: list[object] = []

    class Gone:
        def getpeercert(self, **_: object) -> bytes:
            raise OSError("Transport endpoint is not connected")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(
        connection, "_context", lambda *_: SimpleNamespace(wrap_socket=lambda _: Gone())
    )
    with pytest.raises(ConnectionLost, match="not connected"):
        connection.connect(ends.folders[0], ends.server.getsockname(), limit=SHORT)
    assert len(closed) == 1
