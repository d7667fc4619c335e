"""A recording: its lines, its clients as a process, and what is made of it."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.histories import Store, World
from vmckpt_lab.history import history, recorder
from vmckpt_lab.history.history import OPERATOR, Input, Kind, call_line, parse, return_line
from vmckpt_lab.history.workload import ASKS_AGAIN, GIVES_UP, THINKS, Client
from vmckpt_lab.observer import messages

WORDS = st.integers(0, (1 << 64) - 1)
READ = Input(kind=Kind.READ, key=1)


def never() -> bool:
    return False


def test_a_history_survives_its_file() -> None:
    known = World(3, dies=2.0).play(4.0)

    again = parse(history.lines(known))
    assert set(again.operations) == set(known.operations)
    assert (again.answered, again.pending) == (known.answered, known.pending)


def test_what_was_called_and_never_returned_is_pending() -> None:
    known = parse([call_line(1, 1, READ, 2.0), call_line(2, 1, READ, 1.0), return_line(2, 1, 3.0)])

    assert [(one.client, one.returned) for one in known.operations] == [(2, 3.0), (1, None)]
    assert (known.answered, known.pending) == (1, 1)


def test_a_line_that_is_just_being_written_is_left_out() -> None:
    lines = [call_line(1, 1, READ, 1.0), return_line(1, 1, 2.0)[:-9]]

    assert parse(lines).pending == 1


def test_a_line_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        parse(["hello\n"])


@pytest.mark.parametrize(
    ("second", "contradictory"),
    [
        (return_line(1, 1, 3.0, output=7, run=1), False),
        (return_line(1, 1, 3.0, output=8, run=1), True),
        (return_line(1, 1, 3.0, output=8, run=2), False),
    ],
    ids=["the same answer", "another answer", "of another run"],
)
def test_one_request_has_one_answer_of_one_run(second: str, contradictory: bool) -> None:
    lines = [call_line(1, 1, READ, 1.0), return_line(1, 1, 2.0, output=7, run=1), second]

    assert bool(parse(lines).contradictions) is contradictory
    back = Input(kind=Kind.RESTORE, snapshot="s")
    assert not parse([call_line(OPERATOR, 1, back, 0.0), *lines]).contradictions


def test_a_request_that_was_answered_twice_is_wrong_by_itself() -> None:
    write = Input(kind=Kind.WRITE, value=5)
    lines = [call_line(1, 1, write, 1.0), return_line(1, 1, 2.0, output=0, run=1)]
    lines.append(return_line(1, 1, 3.0, output=5, run=1))

    (wrong,) = recorder.check_runs(parse(lines), never).wrong
    assert wrong == "history: client 1: write 5 to key 0 was answered with 0 and 5"


def test_runs_of_a_guest_that_was_started_anew_are_apart() -> None:
    write = Input(kind=Kind.WRITE, value=5)
    lines = [
        call_line(1, 1, write, 1.0), return_line(1, 1, 2.0, output=0, run=7),
        call_line(1, 2, write, 3.0),
        call_line(1, 3, Input(kind=Kind.READ), 4.0), return_line(1, 3, 5.0, output=0, run=8),
    ]  # fmt: skip
    known = parse(lines)

    assert {run: len(part) for run, part in known.runs().items()} == {7: 2, 8: 2}
    assert recorder.check_runs(known, never).wrong == ()
    as_one = [line.replace('"run":8', '"run":7') for line in lines]
    assert recorder.check_runs(parse(as_one), never).wrong


def test_a_history_without_an_answer_proves_nothing() -> None:
    assert recorder.check_runs(parse([call_line(1, 1, READ, 1.0)]), never).wrong == (
        "history: no operation was answered",
    )


def test_a_check_that_has_no_time_says_so() -> None:
    found = recorder.check_runs(World(1, epoch=None, clients=16).play(8.0), lambda: True)

    assert found.wrong == ()
    assert found.unknown


def test_a_history_is_kept_as_it_was(tmp_path: Path) -> None:
    known = World(3).play(1.0)
    kept = recorder.keep(history.lines(known), tmp_path)

    assert kept.parent == tmp_path
    with kept.open() as file:
        assert set(parse(file).operations) == set(known.operations)


@given(st.sampled_from(list(messages.STORE_KINDS)), st.lists(WORDS, min_size=6, max_size=6))
def test_a_request_survives_the_wire(kind: Kind, words: list[int]) -> None:
    recording, session, sequence, key, value, expected = words
    asked = Input(kind=kind, key=key, value=value, expected=expected)
    request = messages.Request(recording=recording, session=session, sequence=sequence, asked=asked)

    assert messages.decode_request(messages.encode_request(request)) == request
    assert messages.decode_reply(messages.encode_request(request)) is None


@given(st.lists(WORDS, min_size=5, max_size=5))
def test_a_reply_survives_the_wire(words: list[int]) -> None:
    recording, session, sequence, run, before = words
    reply = messages.Reply(
        recording=recording, session=session, sequence=sequence, run=run, before=before
    )

    assert messages.decode_reply(messages.encode_reply(reply)) == reply
    assert messages.decode_request(messages.encode_reply(reply)) is None


@given(st.binary(max_size=80))
def test_another_datagram_is_neither(datagram: bytes) -> None:
    assert messages.decode_request(datagram) is None
    assert messages.decode_reply(datagram) is None


def client(seed: int = 1) -> Client:
    return Client(0, 4, random.Random(seed), {})


def test_a_client_asks_again_and_then_goes_on_with_another_operation() -> None:
    one = client()
    asks = [(now, ask) for now in range(8) if (ask := one.due(now / 2)) is not None]

    assert [ask.sequence for _, ask in asks] == [1] * 7 + [2]
    assert [ask.again for _, ask in asks] == [False] + [True] * 6 + [False]
    assert (ASKS_AGAIN, GIVES_UP) == (0.5, 3.0)


def test_a_client_thinks_before_it_goes_on() -> None:
    one = client()
    assert one.due(1.0) is not None
    one.hear(1, 0, 1.1)

    assert one.due(1.1 + THINKS[0] / 2) is None
    ask = one.due(1.1 + THINKS[1])
    assert ask is not None
    assert (ask.sequence, ask.again) == (2, False)


def test_a_late_answer_to_an_operation_that_was_given_up_changes_nothing() -> None:
    one = client()
    one.due(0.0)
    one.due(GIVES_UP + 1)
    one.hear(1, 0, GIVES_UP + 1.1)

    assert one.waits


def test_a_client_that_is_to_stop_begins_nothing() -> None:
    one = client()

    assert one.due(1.0, begin=False) is None
    assert not one.waits


def test_no_two_operations_write_the_same_value() -> None:
    written = []
    for number in range(8):
        one = Client(number, 4, random.Random(number), {})
        for now in range(200):
            ask = one.due(float(now))
            assert ask is not None
            one.hear(ask.sequence, 0, now + 0.1)
            if ask.asked.kind in (Kind.WRITE, Kind.CAS):
                written.append(ask.asked.value)

    assert len(written) == len(set(written)) > 800


@contextmanager
def served(store: Store) -> Iterator[int]:
    """The store on a port of this machine. Yields the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(0.1)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    datagram, sender = sock.recvfrom(256)
                    request = messages.decode_request(datagram)
                    reply = None if request is None else store.answer(request)
                    if reply is not None:
                        sock.sendto(messages.encode_reply(reply), sender)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(sock.getsockname()[1])
        over.set()
        thread.join()


@contextmanager
def clients(port: int, file: Path) -> "Iterator[subprocess.Popen[bytes]]":
    program = [sys.executable, "-m", "vmckpt_lab.history.clients", "127.0.0.1", str(file)]
    with subprocess.Popen([*program, "--port", str(port)]) as process:
        yield process
        process.kill()


def answered(file: Path, count: int) -> None:
    give_up = time.monotonic() + 60
    while not file.exists() or file.read_text().count('"return"') < count:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_clients_record_what_a_store_answers(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    with served(Store(run=9)) as port, clients(port, file) as process:
        answered(file, 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with file.open() as lines:
        known = parse(lines)

    assert known.answered >= 200
    assert known.pending == 0
    assert {one.client for one in known.operations} == set(range(8))
    assert {one.input.kind for one in known.operations} == set(messages.STORE_KINDS)
    found = recorder.check_runs(known, never)
    assert (found.wrong, found.unknown) == ((), ())


def test_clients_betray_a_store_that_goes_back_in_time(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    store = Store(run=9)
    with served(store) as port, clients(port, file) as process:
        answered(file, 100)
        old = dict(store.cells)
        answered(file, 200)
        store.cells = old
        answered(file, 300)
        process.kill()
        process.wait()
    with file.open() as lines:
        found = recorder.check_runs(parse(lines), never)

    assert "is not linearizable" in found.wrong[0]
    assert json.dumps(found.wrong)


def test_too_many_clients_are_refused(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "vmckpt_lab.history.clients", "127.0.0.1"]
    done = subprocess.run(
        [*program, str(tmp_path / "x"), "--clients", "65"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "use 1 to 64 clients" in done.stderr
