"""The connection between the agents: TLS 1.3, with pinned certificates created for the session.

Each agent creates a key that never leaves its host, and the controller exchanges the certificates
over ssh. A peer with a different certificate is disconnected before any message is read.
"""

import datetime
import os
import queue
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vmckpt.errors import RemoteError
from vmckpt.replication.protocol import framing
from vmckpt.replication.protocol.messages import End, Heartbeat, Message, PeerRefused, WireError
from vmckpt.units import Seconds

T = TypeVar("T", bound=Message)

KEY, CERTIFICATE, PEER = "key.pem", "certificate.pem", "peer.pem"
_LASTS = datetime.timedelta(days=3650)
_CHUNK = 256 << 10
_WAITING = 8
"""Maximum number of received messages in the queue: a slow receiver slows down the sender."""
_TURN = 0.5
_HANDSHAKE = 3.0
"""Time limit for a handshake, in seconds; a busy host may need this long."""
_SPEAKS = 0.5
"""How long a new peer that sends nothing counts as busy, in seconds: agents send immediately."""
_AT_ONCE = 64
"""Maximum number of concurrent handshakes; beyond it, the first silent peer is disconnected."""
# The kernel closes a connection if the other end acknowledges nothing for this long.
_SILENT_MS = 5000


class ConnectionLost(RemoteError):
    """The connection between the agents is lost, cannot be established, or must be given up."""


def make_identity(folder: Path) -> str:
    """Create a key and its certificate in a directory. Returns the certificate as PEM.

    Raises OSError.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "vmckpt session")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Hosts' clocks differ, and the time does not matter: the certificate itself is pinned.
        .not_valid_before(now - _LASTS)
        .not_valid_after(now + _LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    text = certificate.public_bytes(serialization.Encoding.PEM)
    for file, content in ((KEY, secret), (CERTIFICATE, text)):
        opened = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(opened, "wb") as out:
            out.write(content)
    return text.decode()


class _Socket(ssl.SSLSocket):
    """A TLS socket that closes itself if its peer resets the connection before the handshake.

    ssl.SSLSocket reads once in its constructor, and stays open if that fails.
    """

    def recv(self, size: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(size, flags)
        except OSError:
            if self.version() is None:
                self.close()
            raise


def _context(folder: Path, purpose: int) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.sslsocket_class = _Socket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.load_verify_locations(folder / PEER)
    return context


def connect(folder: Path, address: tuple[str, int], *, limit: Seconds) -> ssl.SSLSocket:
    """Connect to the other agent, with the session's key in `folder`.

    Raises ConnectionLost if no agent answers, or if the certificate is not the session's.
    """
    try:
        with socket.create_connection(address, timeout=limit) as plain:
            made = _context(folder, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(plain)
        return _checked(made, folder)
    except OSError as exc:
        raise ConnectionLost(f"{address[0]}:{address[1]}: {_why(exc)}") from exc


def accept(folder: Path, server: socket.socket, *, limit: Seconds) -> ssl.SSLSocket | None:
    """Accept the next connection with the session's certificate. Returns None after `limit`.

    Handshakes of several peers run concurrently, so that a slow or silent peer does not delay other
    peers. A handshake that is in progress may take longer than `limit`. Raises OSError if the
    server is closed.
    """
    with _Door(folder, server) as door:
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0 or door.busy():
            made = door.turn(Seconds(max(left, 0.05)))
            if made is not None:
                with suppress(OSError):  # a wrong certificate, or a peer that has disconnected
                    return _checked(made, folder)
    return None


class _Door:
    """The handshakes in progress at a server's socket."""

    def __init__(self, folder: Path, server: socket.socket) -> None:
        self._folder, self._server = folder, server
        self._context: ssl.SSLContext | None = None
        """Created when the first peer connects, since creating it reads the certificates."""
        self._select = selectors.DefaultSelector()
        self._since: dict[ssl.SSLSocket, float] = {}
        """When each peer connected, in that order."""
        self._spoke: set[ssl.SSLSocket] = set()

    def __enter__(self) -> Self:
        if self._server.fileno() < 0:
            raise OSError("the server is closed")
        self._server.setblocking(False)
        self._select.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for one in list(self._since):
            self._drop(one)
        self._select.close()

    def busy(self) -> bool:
        """Return whether a handshake is in progress, or a peer has just connected."""
        now = time.monotonic()
        return any(one in self._spoke or now - at < _SPEAKS for one, at in self._since.items())

    def turn(self, limit: Seconds) -> ssl.SSLSocket | None:
        """Continue all handshakes for at most `limit`.

        Returns a socket whose handshake is complete; None: none is complete yet. Raises OSError.
        """
        for key, _ in self._select.select(min(limit, _TURN)):
            if key.fileobj is self._server:
                self._call()
                continue
            one = cast("ssl.SSLSocket", key.fileobj)
            self._spoke.add(one)
            if self._shaken(one):
                self._select.unregister(one)
                del self._since[one]
                self._spoke.discard(one)
                return one
        now = time.monotonic()
        for one, at in list(self._since.items()):
            if now - at > _HANDSHAKE:
                self._drop(one)
        return None

    def _call(self) -> None:
        if self._context is None:
            self._context = _context(self._folder, ssl.PROTOCOL_TLS_SERVER)
        with suppress(BlockingIOError, ConnectionAbortedError):
            plain, _ = self._server.accept()
            with suppress(OSError):  # a peer that has disconnected must not end other handshakes
                self._begin(self._context, plain)

    def _begin(self, context: ssl.SSLContext, plain: socket.socket) -> None:
        """Begin a handshake. Raises OSError; in that case, the socket is closed."""
        with plain:
            plain.setblocking(False)
            made = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self._since[made] = time.monotonic()
        self._select.register(made, selectors.EVENT_READ)
        if len(self._since) > _AT_ONCE:
            idle = [one for one in self._since if one not in self._spoke]
            self._drop((idle or list(self._since))[0])

    def _shaken(self, one: ssl.SSLSocket) -> bool:
        try:
            one.do_handshake()
        except ssl.SSLWantReadError:
            self._select.modify(one, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._select.modify(one, selectors.EVENT_WRITE)
        except OSError:
            self._drop(one)
        else:
            return True
        return False

    def _drop(self, one: ssl.SSLSocket) -> None:
        self._select.unregister(one)
        self._since.pop(one)
        self._spoke.discard(one)
        one.close()


def _checked(made: ssl.SSLSocket, folder: Path) -> ssl.SSLSocket:
    """Return the socket if its peer has the certificate of the session.

    Raises OSError, and closes the socket, if the peer has a different certificate.
    """
    try:
        wanted = ssl.PEM_cert_to_DER_cert((folder / PEER).read_text())
        if made.getpeercert(binary_form=True) != wanted:
            raise ConnectionRefusedError(
                "the other end does not have the certificate of this protection"
            )
        made.settimeout(_HANDSHAKE)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
    except BaseException:
        made.close()
        raise
    return made


def _why(exc: OSError) -> str:
    return " ".join(str(exc.strerror or exc).split())


class PeerConnection:
    """A connection for messages in both directions.

    Use as `with PeerConnection(connected, token) as line`. Any thread may send; one thread
    receives. A small message waits for at most one large message of another thread.
    """

    def __init__(
        self,
        connected: ssl.SSLSocket,
        token: Callable[[], int],
        takes: Callable[[int], bool] | None = None,
    ) -> None:
        """`token`: returns the lease's token, which every message carries; `takes`: returns whether
        to accept a received token; None: only the lease's token is accepted.
        """
        connected.setblocking(False)
        self._connected, self._token = connected, token
        self._reader = framing.Reader(token=takes or (lambda told: told == token()))
        self._received: queue.Queue[Message | RemoteError | WireError] = queue.Queue(_WAITING)
        # Both directions share OpenSSL's state, so only one call at a time is allowed.
        self._tls, self._sending = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self.heard = time.monotonic()
        """When data was last received, by time.monotonic()."""
        self.sent = self.received = 0
        """Number of bytes sent and received, without the overhead of TLS."""
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A thread that is waiting for a message gets ConnectionLost."""
        self._closed.set()
        with suppress(OSError, ValueError), self._tls:
            self._connected.shutdown(socket.SHUT_RDWR)
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._received.get_nowait()
            self._thread.join(0.01)
        self._connected.close()

    def send(self, message: Message) -> None:
        """Send a message. Raises ConnectionLost, and the errors of `framing.parts`."""
        head, body = framing.parts(message, token=self._token())
        with self._sending:
            for part in (head, body):
                self._send(memoryview(part))
            self.sent += len(head) + len(body)

    def _send(self, data: memoryview) -> None:
        while data:
            if self._closed.is_set():
                raise ConnectionLost("the connection was closed")
            try:
                with self._tls:
                    data = data[self._connected.send(data) :]
            except ssl.SSLWantWriteError:
                select.select([], [self._connected], [], _TURN)
            except ssl.SSLWantReadError:
                time.sleep(0.001)  # the reading thread receives the data that TLS needs
            except (OSError, ValueError) as exc:
                raise ConnectionLost(f"the connection was lost: {exc}") from exc

    def receive(self, limit: Seconds) -> Message | None:
        """Return the next message, or None if no message arrives within `limit`.

        Raises ConnectionLost, WireError.
        """
        try:
            found = (
                self._received.get(timeout=max(0.0, limit))
                if limit > 0
                else (self._received.get_nowait())
            )
        except queue.Empty:
            return None
        if isinstance(found, RemoteError | WireError):
            self._put(found)  # the next call raises the same error
            raise found
        return found

    def expect(self, kind: type[T], limit: Seconds) -> T:
        """Return the next message, which must be of this kind. Skips heartbeats.

        Raises WireError, and ConnectionLost, also if the other end refuses to continue, sends a
        different message, or does not send this message within `limit`.
        """
        give_up = time.monotonic() + limit
        while (left := give_up - time.monotonic()) > 0:
            found = self.receive(Seconds(left))
            if isinstance(found, kind):
                return found
            if isinstance(found, PeerRefused | End):
                raise ConnectionLost(f"the other end refused to continue: {found.why}")
            if found is not None and not isinstance(found, Heartbeat):
                raise ConnectionLost(
                    f"the other end sent {type(found).__name__} instead of {kind.__name__}"
                )
        raise ConnectionLost(f"the other end has not answered for {limit:g} s")

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                for message in self._reader.feed(self._read()):
                    self._put(message)
        except (ConnectionLost, WireError) as exc:
            self._put(exc)

    def _read(self) -> bytes:
        while not self._closed.is_set():
            try:
                with self._tls:
                    data = self._connected.recv(_CHUNK)
            except ssl.SSLWantReadError:
                select.select([self._connected], [], [], _TURN)
                continue
            except ssl.SSLWantWriteError:
                time.sleep(0.001)
                continue
            except (OSError, ValueError) as exc:
                raise ConnectionLost(f"the connection was lost: {exc}") from exc
            if not data:
                self._reader.close()
                raise ConnectionLost("the other end closed the connection")
            self.heard = time.monotonic()
            self.received += len(data)
            return data
        raise ConnectionLost("the connection was closed")

    def _put(self, what: Message | RemoteError | WireError) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._received.put(what, timeout=_TURN)
                return
