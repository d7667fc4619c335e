import pytest

from vmckpt.definition.findings import missing, refused
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Answers, Resource
from vmckpt.model.finding import Finding, Severity


def of(kind: Kind, name: str, device: str | None = "disk vda") -> Resource:
    return Resource(kind=kind, name=name, device=device)


def told(answers: Answers, *more: Resource) -> tuple[Finding, ...]:
    return missing((*answers, *more), answers, guest="web 1", source="alpha", target="beta")


def test_nothing_is_said_of_what_is_there_or_unknown() -> None:
    assert told({of(Kind.FILE, "/a"): Answer.PRESENT}, of(Kind.SECRET, "s")) == ()


TEXTS = [
    (Kind.SECRET, "s", Answer.ABSENT, "disk vda of web 1 needs secret s, which is missing there"),
    (Kind.SECRET, "s", Answer.NO_VALUE,
     "disk vda of web 1 needs secret s, which has no value there"),
    (Kind.POOL, "p", Answer.INACTIVE,
     "disk vda of web 1 needs storage pool p, which is not active there"),
    (Kind.PORT, "5901", Answer.ABSENT,
     "disk vda of web 1 needs TCP port 5901, which is in use there"),
    (Kind.HUGE_PAGES, "2048", Answer.ABSENT,
     "disk vda of web 1 needs huge pages of 2048 KiB, of which too few are free there"),
    (Kind.UNCHECKED, "-x", Answer.PRESENT, "disk vda of web 1 needs -x, which was not checked"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "answer", "text"), TEXTS)
def test_a_finding_names_the_device_and_what_it_needs(
    kind: Kind, name: str, answer: Answer, text: str
) -> None:
    (found,) = told({of(kind, name): answer})

    assert (found.text, found.where) == (text, "beta")


def test_hints_are_commands_that_can_be_typed() -> None:
    (pool,) = told({of(Kind.POOL, "my pool"): Answer.INACTIVE})
    (volume,) = told({of(Kind.VOLUME, "fast/a b.img"): Answer.ABSENT})
    (folder,) = told({of(Kind.DIRECTORY, "/srv/a b"): Answer.ABSENT})

    assert pool.hint == "run virsh pool-start 'my pool' on beta"
    assert volume.hint == "run virsh pool-refresh fast on beta if the volume is new"
    assert folder.hint == "run mkdir -p '/srv/a b' on beta"


def test_a_value_is_set_by_uuid_even_if_a_definition_names_the_secret_by_its_usage() -> None:
    uuid = "0d6f7a57-be04-4dd1-80ff-c8e5fa28580b"
    (by_uuid,) = told({of(Kind.SECRET, uuid): Answer.NO_VALUE})
    (by_usage,) = told({of(Kind.SECRET, "my disk"): Answer.NO_VALUE})

    assert by_uuid.hint == f"run virsh secret-set-value {uuid} --file FILE on beta"
    assert by_usage.hint == "run virsh secret-set-value UUID --file FILE on beta"


def test_several_of_a_kind_for_a_device_are_one_finding() -> None:
    cpus = {of(Kind.CPU, str(cpu), None): Answer.ABSENT for cpu in (8, 9, 10)}
    (found,) = told(cpus)

    assert found.text == "web 1 needs host CPUs 8, 9, 10, which are missing there"


def test_a_file_is_not_needed_where_another_replaces_it() -> None:
    template = Resource(kind=Kind.FILE, name="/t.fd", unless="/n.fd")
    instead = Resource(kind=Kind.FILE, name="/n.fd")

    assert told({template: Answer.ABSENT, instead: Answer.PRESENT}) == ()
    found = missing(
        [template], {template: Answer.ABSENT, instead: Answer.ABSENT},
        guest="web1", source="alpha", target="beta",
    )  # fmt: skip
    assert [one.code for one in found] == ["file-missing"]


def test_a_definition_that_libvirt_refuses_is_a_blocker_in_its_words() -> None:
    found = refused("unsupported configuration: x", guest="web1", target="beta")

    assert found.severity is Severity.BLOCKER
    assert found.text == "libvirt on beta would not start web1: unsupported configuration: x"


def test_several_are_named_by_their_plural_and_not_without_end() -> None:
    sizes = {of(Kind.HUGE_PAGES, size, None): Answer.ABSENT for size in ("2048", "1048576")}
    places = {of(Kind.DIRECTORY, path): Answer.ABSENT for path in ("/a", "/b")}
    cpus = {of(Kind.CPU, str(cpu), None): Answer.ABSENT for cpu in range(60_000)}

    assert "needs huge pages of 2048 KiB, of 1048576 KiB, of which" in told(sizes)[0].text
    assert "needs directories /a, /b, which are missing" in told(places)[0].text
    assert told(cpus)[0].text.endswith("6, 7 and 59992 more, which are missing there")
