from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt import inventory
from vmckpt.errors import InventoryError
from vmckpt.model.fencing import FenceDevice
from vmckpt.model.roles import Members, Role

PATH = Path("hosts.yaml")
GOOD = """\
hosts:
  alpha:
    uri: qemu+ssh://root@alpha/system
    ssh: {address: alpha, port: 2222, key_file: ~/.ssh/id}
    labels: {rack: a1}
    networks: [br0]
  beta:
    uri: qemu+tls://beta/system
    peer_uri: qemu+tcp://10.0.0.2/system
observer: /run/observer.sock
"""


def test_a_good_inventory_is_read_whole() -> None:
    found = inventory.parse(GOOD, PATH)

    alpha, beta = found.host("alpha"), found.host("beta")
    assert alpha.ssh is not None
    assert (alpha.ssh.user, alpha.ssh.port) == ("root", 2222)
    assert alpha.ssh.key_file == Path("~/.ssh/id").expanduser()
    assert alpha.uri_for_peers == alpha.uri
    assert beta.uri_for_peers == "qemu+tcp://10.0.0.2/system"
    assert beta.ssh is None
    assert found.observer == Path("/run/observer.sock")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        pytest.param(
            "labels:",
            "lables:",
            ":5: unknown key 'lables'; did you mean 'labels'?",
            id="misspelt-key",
        ),
        pytest.param(
            "port: 2222",
            "prot: 2222",
            ":4: unknown key 'prot'; did you mean 'port'?",
            id="misspelt-key-within",
        ),
        pytest.param(
            "observer:",
            "observr:",
            ":10: unknown key 'observr'; did you mean 'observer'?",
            id="misspelt-key-at-the-top",
        ),
        pytest.param("port: 2222", "port: 99999", ":4: hosts.alpha.ssh.port", id="port-too-high"),
        pytest.param("port: 2222", "port: yes", ":4: hosts.alpha.ssh.port", id="port-no-number"),
        pytest.param(
            "uri: qemu+tls://beta/system",
            "uri: beta",
            ":8: hosts.beta.uri: 'beta' is not a libvirt URI",
            id="no-uri",
        ),
        pytest.param(
            "    uri: qemu+tls://beta/system\n",
            "",
            ":7: hosts.beta.uri is missing",
            id="uri-missing",
        ),
        pytest.param("  beta:", "  alpha:", ":7: duplicate key 'alpha'", id="host-twice"),
        pytest.param("[br0]", "br0", ":6: hosts.alpha.networks", id="not-a-list"),
        pytest.param("{rack: a1}", "{rack: 1}", ":5: hosts.alpha.labels.rack", id="label-a-number"),
        pytest.param("[br0]", "[br0", ":7:", id="no-yaml"),
        pytest.param("[br0]", "!!python/object:os.system [x]", ":6:", id="tag"),
        pytest.param("{rack: a1}", "&a {rack: *a}", "aliases", id="alias-of-itself"),
    ],
)
def test_a_mistake_is_named_with_file_line_key_and_likely_word(
    old: str, new: str, complaint: str
) -> None:
    with pytest.raises(InventoryError) as caught:
        inventory.parse(GOOD.replace(old, new, 1), PATH)

    assert str(caught.value).startswith("hosts.yaml:")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "hosts:", "hosts: {}", "hosts: [a]", "1", "\t", "a: b: c"]
)
def test_what_is_no_inventory_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InventoryError) as caught:
        inventory.parse(text, PATH)

    assert "\n" not in str(caught.value)


def test_aliases_that_would_fill_the_memory_are_refused() -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(InventoryError, match="aliases"):
        inventory.parse(bomb, PATH)


@given(st.text(max_size=200))
def test_no_text_does_worse_than_an_inventory_error(text: str) -> None:
    with suppress(InventoryError):
        inventory.parse(text, PATH)


def test_an_unknown_host_is_refused_with_the_likely_one() -> None:
    with pytest.raises(InventoryError, match=r"no host 'alhpa'; did you mean 'alpha'\?"):
        inventory.parse(GOOD, PATH).host("alhpa")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="No such file") as caught:
        inventory.load(tmp_path / "hosts.yaml")
    assert "docs/hosts.md" in (caught.value.hint or "")


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InventoryError, match="not UTF-8"):
        inventory.load(path)


def test_the_inventory_is_found_in_the_order_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert inventory.find(None, {}) is None
    Path("hosts.yaml").touch()
    assert inventory.find(None, {}) == Path("hosts.yaml")
    assert inventory.find(None, {"VMCKPT_INVENTORY": "/b"}) == Path("/b")
    assert inventory.find(Path("/a"), {"VMCKPT_INVENTORY": "/b"}) == Path("/a")


def test_stores_are_read_in_their_order() -> None:
    text = (
        "hosts: {alpha: {uri: qemu:///system}}\n"
        "stores:\n  near: /srv/vmckpt\n"
        "  far: s3://bucket/p?endpoint=https://s3.example.com\n"
    )
    read = inventory.parse(text, Path("hosts.yaml"))
    assert read.store().url == "/srv/vmckpt"
    assert read.store("far").url.startswith("s3://bucket/p?")
    with pytest.raises(InventoryError, match="no store 'fra'; did you mean 'far'"):
        read.store("fra")


@pytest.mark.parametrize("url", ["srv/vmckpt", "s3:///p", "http://x"])
def test_a_store_that_is_nowhere_is_refused(url: str) -> None:
    text = f"hosts: {{alpha: {{uri: qemu:///system}}}}\nstores: {{near: '{url}'}}\n"
    with pytest.raises(InventoryError, match=r"stores\.near"):
        inventory.parse(text, Path("hosts.yaml"))


@pytest.mark.parametrize("name", ["../x", "a/b", ".near", "a b", ""])
def test_a_store_has_a_name_that_can_be_a_files(name: str) -> None:
    text = f"hosts: {{alpha: {{uri: qemu:///system}}}}\nstores: {{'{name}': /srv}}\n"
    with pytest.raises(InventoryError, match="is not a valid store name"):
        inventory.parse(text, Path("hosts.yaml"))


FENCED = """\
hosts:
  alpha:
    uri: qemu:///system
    fence:
      agent: fence_ipmilan
      options: {ip: 10.9.0.11, username: admin, lanplus: "1", password: hunter2}
"""


LEVELS = """\
hosts:
  alpha:
    uri: qemu:///system
    fence:
      levels:
        - [{agent: fence_ipmilan, options: {ip: 10.9.0.11, password: hunter2}}]
        - - {agent: fence_apc, options: {ip: 10.9.0.21, port: "3", password_file: /etc/pdu}}
          - {agent: fence_apc, options: {ip: 10.9.0.22, port: "3", password_file: /etc/pdu}}
"""


def only_device(text: str) -> FenceDevice:
    topology = inventory.parse(text, PATH).host("alpha").fence
    assert topology is not None
    ((found,),) = topology.levels
    return found


def test_levels_of_fence_devices_are_read_in_their_order() -> None:
    found = inventory.parse(LEVELS, PATH).host("alpha").fence
    assert found is not None
    assert found.in_words == "fence_ipmilan, else fence_apc and fence_apc"
    assert [found.name(*place) for place in found.places] == [
        "fence_ipmilan (level 1)",
        "fence_apc (level 2, device 1 of 2)",
        "fence_apc (level 2, device 2 of 2)",
    ]
    assert found.levels[1][1].options == {"ip": "10.9.0.22", "port": "3"}
    assert found.levels[1][1].password_file == Path("/etc/pdu")
    assert "hunter2" not in repr(found)


IPMI = "[{agent: fence_ipmilan, options: {ip: 10.9.0.11, password: hunter2}}]"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            LEVELS[LEVELS.index("      levels") :],
            "      levels: []\n",
            "levels must not be empty, and each",
        ),
        (
            LEVELS[LEVELS.index("      levels") :],
            "      levels: hunter2\n",
            "must be a list of lev",
        ),
        (
            IPMI,
            "[]",
            "hosts.alpha.fence: levels must not be empty, and each level must have at least one"
            " device",
        ),
        (IPMI, IPMI[1:-1], "levels must be a list of levels, each a list of devices"),
        (IPMI, "hunter2", "levels must be a list of levels"),
        (IPMI, "[hunter2]", "level 1: must have the form {agent: NAME, options"),
        ("agent: fence_ipmilan", "agent: [hunter2]", "level 1: agent must be"),
        ('ip: 10.9.0.22, port: "3"', "ip: 10.9.0.22, port: 4711", "level 2: port must be text"),
        ("agent: fence_ipmilan, ", "", ":6: hosts.alpha.fence.levels.0.0.agent is missing"),
        ("agent: fence_ipmilan", "agnet: x, agent: y", ":6: unknown key 'agnet'; did you mean 'a"),
        ("      levels", "      agent: x\n      levels", ":5: unknown key 'agent'"),
    ],
)
def test_a_mistake_in_levels_is_named_without_secrets(old: str, new: str, complaint: str) -> None:
    assert old in LEVELS
    with pytest.raises(InventoryError) as caught:
        inventory.parse(LEVELS.replace(old, new, 1), PATH)
    line = str(caught.value)
    assert complaint in line
    assert "hunter2" not in line
    assert "4711" not in line
    assert "\n" not in line


def test_a_fence_agent_is_read_and_its_secrets_are_not_shown() -> None:
    found = only_device(FENCED)
    assert found.agent == "fence_ipmilan"
    assert found.options == {
        "ip": "10.9.0.11", "username": "admin", "lanplus": "1", "password": "hunter2",
    }  # fmt: skip
    assert found.password_file is None
    assert "hunter2" not in repr(inventory.parse(FENCED, PATH))


def test_a_password_s_file_is_no_option_of_the_agent() -> None:
    text = FENCED.replace("password: hunter2", "password_file: ~/alpha.password")
    found = only_device(text)
    assert found.password_file == Path("~/alpha.password").expanduser()
    assert set(found.options) == {"ip", "username", "lanplus"}


def test_a_host_without_a_fence_agent_has_none() -> None:
    assert inventory.parse(GOOD, PATH).host("alpha").fence is None
    empty = FENCED[: FENCED.index("      agent")]
    assert inventory.parse(empty, PATH).host("alpha").fence is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "agent: fence_ipmilan",
            "agnet: fence_ipmilan",
            ":5: unknown key 'agnet'; did you mean 'a",
        ),
        ("      agent: fence_ipmilan\n", "", ":4: hosts.alpha.fence.agent is missing"),
        ("agent: fence_ipmilan", "agent: 7", ":4: hosts.alpha.fence: agent must be"),
        ("agent: fence_ipmilan", "agent: x password=hunter2", ":4: hosts.alpha.fence: agent must"),
        ("agent: fence_ipmilan", "agent: ../fence_x", ":4: hosts.alpha.fence: agent must"),
        ("agent: fence_ipmilan", "agent: [hunter2]", ":4: hosts.alpha.fence: agent must"),
        ('lanplus: "1"', "lanplus: 1", "hosts.alpha.fence: lanplus must be text; put it in quotes"),
        ("password: hunter2", "password: 4711", "password must be text; put it in quotes"),
        ("password: hunter2", "password: [hunter2]", "password must be text; put it in quotes"),
        ("password: hunter2", "password:hunter2", "invalid option name; write a space after"),
        ("password: hunter2", 'password: "hunter2\\naction=on"', "password must be one line"),
        ("password: hunter2", 'password: "hunter2 "', "password must be one line"),
        ("password: hunter2", 'password: ""', "password must be one line"),
        ("password: hunter2", "password: !hunter2 x", "tags (!) are not allowed"),
        ("password: hunter2", "password: !hunter2!x y", "tags (!) are not allowed"),
        ("password: hunter2", "password: *hunter2", "aliases (&, *) are not allowed"),
        ("username: admin", "action: reboot", "action cannot be set: vmckpt"),
        ("username: admin", "Option: on", "Option cannot be set: vmckpt"),
        (
            "username: admin",
            "password_file: /p",
            "password and password_file are mutually exclusive",
        ),
        ("password: hunter2", "password_file: hunter2", "password_file must be an absolute path"),
        ("password: hunter2", "password_file: ~hunter2", "password_file must be an absolute path"),
        (FENCED[FENCED.index("{ip") :], "password=hunter2\n", "fence: options must be a mapping"),
        (FENCED[FENCED.index("{ip") :], "[hunter2]\n", "fence: options must be a mapping"),
        (
            FENCED[FENCED.index("\n      agent") :],
            " hunter2\n",
            "fence: must have the form {agent: NAME, options",
        ),
        (
            FENCED[FENCED.index("\n      agent") :],
            " [hunter2]\n",
            "fence: must have the form {agent: NAME",
        ),
        (
            FENCED[FENCED.index("\n      agent") :],
            " {agent: x, password:hunter2}\n",
            "fence: must have the form {agent: NAME",
        ),
        (
            FENCED[FENCED.index("\n      agent") :],
            " {agent: x, password: hunter2}\n",
            "unknown key 'password'; known: agent, levels, options",
        ),
    ],
)
def test_a_mistake_in_a_fence_agent_is_named_without_its_secrets(
    old: str, new: str, complaint: str
) -> None:
    assert old in FENCED
    with pytest.raises(InventoryError) as caught:
        inventory.parse(FENCED.replace(old, new, 1), PATH)

    line = str(caught.value)
    assert line.startswith("hosts.yaml:")
    assert complaint in line
    assert "hunter2" not in line
    assert "4711" not in line
    assert "\n" not in line


def test_who_is_told_and_a_mistake_in_it_shows_no_secret() -> None:
    found = inventory.parse(
        GOOD + "webhooks:\n  - {url: 'https://alerts.example.com/T0K3N', secret_file: /etc/x}\n",
        PATH,
    )
    (hook,) = found.webhooks
    assert (hook.shown, hook.secret_file) == ("alerts.example.com", Path("/etc/x"))
    for url in (
        "htps://alerts.example.com/T0K3N",
        "alerts/T0K3N",
        "https://[T0K3N",
        "https://:1/T0K3N",
    ):
        with pytest.raises(InventoryError, match="not a URL") as caught:
            inventory.parse(GOOD + f"webhooks: [{{url: '{url}'}}]\n", PATH)
        assert "T0K3N" not in str(caught.value)


def test_receivers_of_alerts_are_known_and_a_mistake_in_them_shows_no_secret() -> None:
    assert not inventory.parse(GOOD, PATH).sends_alerts
    found = inventory.parse(
        GOOD + "alertmanagers:\n  - url: https://alerts.example.com/T0K3N\n    username: vmckpt\n"
        "    password_file: /etc/x\napprise: /etc/y\n",
        PATH,
    )
    (manager,) = found.alertmanagers
    assert (manager.shown, manager.username) == ("Alertmanager alerts.example.com", "vmckpt")
    assert (manager.password_file, found.apprise) == (Path("/etc/x"), Path("/etc/y"))
    assert found.sends_alerts
    for wrong, told in (
        ("alertmanagers: [{url: 'alerts/T0K3N'}]", "not a URL"),
        ("alertmanagers: [{url: 'http://x', username: T0K3N}]", "need each other"),
        ("alertmanagers: [{url: 'http://x', password_file: /T0K3N}]", "need each other"),
        ("apprise: [json://T0K3N]", "must be text"),
    ):
        with pytest.raises(InventoryError, match=told) as caught:
            inventory.parse(f"{GOOD}{wrong}\n", PATH)
        assert "T0K3N" not in str(caught.value)


def test_a_port_is_not_a_time() -> None:
    text = (
        'hosts:\n  a:\n    uri: "qemu+ssh://root@a.example/system"\n'
        "    ssh: {address: a.example, port: 22:22}\n"
    )
    with pytest.raises(InventoryError, match=r":4: hosts.a.ssh.port: .* not '22:22'"):
        inventory.parse(text, Path("hosts.yaml"))


def test_roles_are_read_with_their_users_and_groups() -> None:
    assert inventory.parse(GOOD, PATH).roles is None
    text = GOOD + "roles:\n  move: {users: [bob], groups: [operators]}\n  destroy: {users: [ann]}\n"
    found = inventory.parse(text, PATH).roles
    assert found is not None
    assert found.members == {
        Role.MOVE: Members(users=frozenset({"bob"}), groups=frozenset({"operators"})),
        Role.DESTROY: Members(users=frozenset({"ann"})),
    }


@pytest.mark.parametrize(
    ("roles", "complaint"),
    [
        ("roles:", "roles: no role is given; remove roles"),
        ("roles: {}", "roles: no role is given; remove roles"),
        ("roles: {admin: {users: [ann]}}", "roles.admin"),
        ("roles: {move: [ann]}", "roles.move"),
        ("roles: {move: {user: [ann]}}", "unknown key 'user'; did you mean 'users'?"),
        ("roles: {move: {users: [1000]}}", "roles.move.users"),
        ("roles: {move: {users: ['@ops']}}", "'@ops' is not a name of a user or group"),
        ("roles: {move: {groups: ['']}}", "'' is not a name of a user or group"),
    ],
)
def test_mistakes_in_roles_are_refused(roles: str, complaint: str) -> None:
    with pytest.raises(InventoryError) as caught:
        inventory.parse(f"{GOOD}{roles}\n", PATH)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("hosts.yaml:11")
