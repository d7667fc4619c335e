import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt_lab import config_files, ledger, plan
from vmckpt_lab.observer import messages
from vmckpt_lab.observer.analysis import Output, Rhythm, Sightings, View, blackout
from vmckpt_lab.plan import LabPlan

WORDS = st.integers(0, (1 << 64) - 1)


def test_names_and_addresses_of_two_labs_never_meet() -> None:
    one, two = (LabPlan(name=name, subnet=i, host_count=4) for i, name in enumerate(("a", "a-b")))

    assert not {host.link for host in one.hosts} & {host.link for host in two.hosts}
    assert not {host.uuid for host in one.hosts} & {host.uuid for host in two.hosts}
    assert not two.prefix.startswith(one.prefix)
    assert all(len(host.link) <= 15 for host in one.hosts)
    assert len(one.link_to("witness")) <= 15


@pytest.mark.parametrize("name", ["", "A", "a/b", "-a", "a.", "a b", "x" * 25, "../x", "a\n"])
def test_a_lab_name_that_could_be_mistaken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use 1 to 24"):
        plan.check_name(name)


def test_a_taken_subnet_is_passed_over() -> None:
    first = plan.free_subnet("x", set())

    assert plan.free_subnet("x", {first}) == (first + 1) % 256
    with pytest.raises(ValueError, match="in use"):
        plan.free_subnet("x", set(range(256)))


@given(st.lists(WORDS, min_size=10, max_size=10))
def test_a_message_survives_the_wire(words: list[int]) -> None:
    names = list(messages.Message.__dataclass_fields__)
    message = messages.Message(**dict(zip(names, words, strict=True)))

    assert messages.decode(messages.encode(message)) == message


@given(st.binary(max_size=200))
def test_any_other_datagram_is_not_ours(datagram: bytes) -> None:
    assert messages.decode(datagram) is None


def number(n: int, clock: int = 0) -> messages.Message:
    return messages.Message(kind=messages.NUMBER, run=1, number=n, clock_ns=clock or n)


def test_numbers_in_order_with_losses_are_no_conflict() -> None:
    output = Output()
    for n in (1, 2, 5, 6):
        output.number(number(n))

    assert (output.highest, output.heard, output.conflicts) == (6, 4, 0)


def test_a_number_that_others_have_overtaken_is_no_conflict() -> None:
    output = Output()
    for n in (1, 2, 4, 5, 3):
        output.number(number(n))

    assert (output.highest, output.heard, output.conflicts) == (5, 5, 0)
    output.number(number(3, clock=99))
    assert output.conflicts == 1


def test_a_datagram_that_arrives_twice_is_no_conflict() -> None:
    output = Output()
    for n in (1, 2, 2):
        output.number(number(n))

    assert (output.heard, output.conflicts) == (2, 0)


@pytest.mark.parametrize("n", [2, 3], ids=["told again otherwise", "older and never heard"])
def test_a_second_copy_of_a_guest_betrays_itself(n: int) -> None:
    output = Output()
    for told in (1, 2, 4):
        output.number(number(told))
    output.number(number(n, clock=99))

    assert output.conflicts == 1


def pong(n: int, token: int) -> messages.Message:
    return replace(number(n), kind=messages.PONG, token=token)


def test_an_answer_that_forgets_a_number_is_noticed() -> None:
    seen = Sightings()
    seen.hear(number(5), 1.0)
    seen.ask(7)
    seen.hear(pong(5, 7), 1.1)
    assert seen.outputs[number(5).run].forgotten == 0
    seen.hear(pong(4, 7), 1.2)
    assert seen.outputs[number(5).run].forgotten == 1


def test_an_answer_that_waited_while_numbers_left_has_forgotten_nothing() -> None:
    seen = Sightings()
    seen.hear(number(1), 1.0)
    seen.ask(7)
    for later in range(2, 9):
        seen.hear(number(later), 1.0)
    seen.ask(7)  # the same question, once more
    seen.hear(pong(1, 7), 2.0)
    assert seen.outputs[number(1).run].forgotten == 0
    seen.ask(8)
    seen.hear(pong(1, 8), 2.1)
    assert seen.outputs[number(1).run].forgotten == 1
    seen.hear(pong(1, 99), 2.2)  # nobody knows when that was asked
    assert seen.outputs[number(1).run].forgotten == 1


def rhythm(*beats: float) -> Rhythm:
    made = Rhythm()
    for beat in beats:
        made.beat(beat)
    return made


def test_a_silence_counts_less_the_observers_own() -> None:
    answers = rhythm(1.0, 1.005, 1.305, 1.310)

    assert blackout(answers, rhythm(1.0, 1.005), 0.9, 1.01) == pytest.approx(0.3)
    own = rhythm(1.1, 1.2, 1.205)
    assert blackout(answers, own, 0.9, 1.2) == pytest.approx(0.2)


def test_a_silence_that_lasts_until_now_counts() -> None:
    assert blackout(rhythm(1.0), rhythm(), 0.0, 5.0) == pytest.approx(4.0)


def test_a_silence_outside_the_window_does_not_count() -> None:
    answers = rhythm(1.0, 2.0, 2.005, 2.010)

    assert blackout(answers, rhythm(), 2.004, 2.01) == pytest.approx(0.005)


def test_two_runs_of_a_guest_are_kept_apart() -> None:
    seen = Sightings()
    seen.hear(number(7), 1.0)
    seen.hear(replace(number(1), run=2), 2.0)
    view = seen.view(Rhythm(), now=2.0, since=0.0, until=2.0)

    assert (view.runs, view.run, view.highest, view.conflicts) == (2, 2, 1, 0)


def record(n: int, run: int = 1) -> bytes:
    words = (int.from_bytes(b"VMCREC1", "little"), run, n, *range(60))
    return struct.pack("<64Q", *words, ledger.checksum(words))


def image(*records: tuple[int, bytes]) -> bytes:
    disk = bytearray(65536)
    for slot, content in records:
        disk[slot * 512 : (slot + 1) * 512] = content
    return bytes(disk)


def test_records_are_read_and_other_runs_passed_over() -> None:
    disk = image((0, record(1)), (1, record(2)), (2, record(3, run=9)))

    assert ledger.read_records(disk, 1, 2) == ledger.Records(highest=2, whole=2, broken=0)


@pytest.mark.parametrize("flipped", [20, 100, 511])
def test_a_flipped_bit_in_a_record_is_found(flipped: int) -> None:
    disk = bytearray(image((0, record(1)), (1, record(2))))
    disk[512 + flipped] ^= 1
    seen = ledger.read_records(bytes(disk), 1, 2)

    assert (seen.whole, seen.broken) == (1, 1)


def test_a_record_in_a_wrong_place_is_broken() -> None:
    assert ledger.read_records(image((5, record(1))), 1, 1).broken == 1


CHECKED = messages.Message(kind=messages.VERIFIED, number=9, pages_checked=10, records_checked=9)
VIEW = View(
    now=1.0, blackout=0.005, answered_at=1.0,
    runs=1, run=1, pages_written=1, highest=9, heard=9,
    conflicts=0, forgotten=0, verified=CHECKED,
)  # fmt: skip
RECORDS = ledger.Records(highest=9, whole=9, broken=0)


def broken(view: View, records: ledger.Records | None = RECORDS) -> list[str]:
    return [e.name for e in ledger.judge("web1", view, records).entries if not e.whole]


def test_ledgers_that_agree_are_whole() -> None:
    assert broken(VIEW) == []
    assert broken(VIEW, None) == []


@pytest.mark.parametrize(
    ("view", "records", "expected"),
    [
        (replace(VIEW, verified=replace(CHECKED, memory_errors=1)), RECORDS, "memory"),
        (replace(VIEW, verified=replace(CHECKED, disk_errors=1)), RECORDS, "disk"),
        (replace(VIEW, verified=replace(CHECKED, records_checked=0)), RECORDS, "disk"),
        (VIEW, replace(RECORDS, highest=8), "disk"),
        (VIEW, replace(RECORDS, broken=1), "disk"),
        (replace(VIEW, conflicts=1), RECORDS, "output"),
        (replace(VIEW, forgotten=1), RECORDS, "output"),
        (replace(VIEW, runs=2), RECORDS, "output"),
        (replace(VIEW, heard=0), RECORDS, "output"),
    ],
)
def test_each_loss_breaks_its_ledger(view: View, records: ledger.Records, expected: str) -> None:
    assert broken(view, records) == [expected]


def test_a_host_sees_the_program_wherever_it_is() -> None:
    plan = LabPlan(name="a", subnet=1, host_count=2)
    script = config_files.boot_script(plan, plan.hosts[0], ("/usr/lib/x", "/tmp/a b/v", "/root/v"))
    lines = script.splitlines()
    held = lines.index("exec 8<'/tmp/a b/v'")
    shown = lines.index("mount -c --bind /proc/self/fd/8 '/tmp/a b/v'")
    assert held < lines.index("mount -t tmpfs tmpfs /tmp") < shown
    assert "/usr/lib/x" not in script
