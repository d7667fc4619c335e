"""How each row of docs/locking.md begins and how it ends if it is left alone."""

from collections.abc import Callable, Mapping

from tests.lab.bench import BUSY, until
from tests.lab.locking_commands import (
    COPIED,
    COPY,
    DISK_SNAPSHOT,
    DUMP,
    HOT,
    LARGE,
    MOVE,
    PROTECTED,
    QCOW2,
    SAVE,
    SNAPSHOT,
    VIRSH,
)
from tests.lab.locking_scenes import Doing, Scene
from tests.lab.locking_words import Asked, Under
from vmckpt_lab import command_runner, network
from vmckpt_lab.command_runner import Controller


def _precopy(scene: Scene) -> None:
    scene.guest(BUSY | COPIED)
    scene.slow()
    scene.move()


def _postcopy(scene: Scene) -> None:
    scene.guest(HOT)
    scene.slow()
    one = Controller(scene.bench.plan, *scene.filled((*MOVE, "--mode", "postcopy")))
    scene.controller = one
    assert one.reach(command_runner.Moment.POST_COPY, limit=60.0)
    scene.slow("10mbit")


def _abandoned(scene: Scene) -> None:
    _precopy(scene)
    assert scene.controller is not None
    scene.controller.kill()


def _unsettled(scene: Scene) -> None:
    _abandoned(scene)
    scene.virsh("domjobabort", "web1")
    until(lambda: not scene.presence("alpha").migrating)
    until(lambda: scene.presence("beta").state is None)
    scene.fast()


def _broken(scene: Scene) -> None:
    _postcopy(scene)
    network.cut(scene.bench.plan, "beta")
    done = scene.ended()
    assert done.code == 22, done


def _virsh_migrate(scene: Scene) -> None:
    scene.guest(BUSY | COPIED)
    scene.slow()
    scene.start(*VIRSH[Asked.VIRSH_MIGRATE])
    until(lambda: scene.presence("alpha").migrating and bool(scene.presence("beta").state))
    # Memory is sent: before, libvirt answers otherwise.
    until(lambda: "Data processed" in scene.virsh("domjobinfo", "web1").out)


def _written(what: tuple[str, ...], path: str) -> Callable[[Scene], None]:
    def begin(scene: Scene) -> None:
        scene.guest(QCOW2)
        scene.start(*what)
        scene.hold(path)

    return begin


def _disk_snapshot(scene: Scene) -> None:
    scene.guest(QCOW2)
    assert scene.virsh(*DISK_SNAPSHOT).code == 0


def _backup(scene: Scene) -> None:
    scene.guest(QCOW2)
    done = scene.virsh("backup-begin", "web1", "{shared}/pull.xml")
    assert done.code == 0, done.err


def _blockcopy(scene: Scene) -> None:
    scene.guest(LARGE)
    assert scene.virsh(*COPY).code == 0


def _protected(scene: Scene) -> None:
    scene.guest(PROTECTED)
    scene.bench.good("protect", "web1", "--to", "beta", "--failover", "manual", "--json")


BEGIN: Mapping[Under, Doing] = {
    Under.PRECOPY: _precopy,
    Under.POSTCOPY: _postcopy,
    Under.ABANDONED: _abandoned,
    Under.BROKEN: _broken,
    Under.UNSETTLED: _unsettled,
    Under.VIRSH_MIGRATE: _virsh_migrate,
    Under.SNAPSHOT: _written(SNAPSHOT, "web1-s2.mem"),
    Under.DISK_SNAPSHOT: _disk_snapshot,
    Under.BACKUP: _backup,
    Under.BLOCKCOPY: _blockcopy,
    Under.SAVE: _written(SAVE, "web1.save"),
    Under.DUMP: _written(DUMP, "web1.core"),
    Under.PROTECTED: _protected,
}


def _cancel(scene: Scene) -> None:
    scene.bench.good("cancel", "web1")
    assert scene.ended().outcome == "cancelled"


def _complete(scene: Scene) -> None:
    scene.fast()
    assert scene.ended().outcome == "completed"
    assert scene.bench.where() == ["beta"]


def _cancel_abandoned(scene: Scene) -> None:
    scene.bench.good("cancel", "web1")
    until(lambda: not scene.presence("alpha").migrating)
    until(lambda: scene.presence("beta").state is None)
    scene.bench.good("recover")


def _resume(scene: Scene) -> None:
    network.heal(scene.bench.plan, "beta")
    scene.fast()
    # After a long cut TCP waits a while before it tries again.
    until(lambda: scene.bench.run("recover").code == 0, limit=120.0)
    assert scene.bench.where() == ["beta"]


def _abort(scene: Scene) -> None:
    assert scene.virsh("domjobabort", "web1").code == 0


def _let_end(scene: Scene) -> None:
    said = scene.virsh_ended()
    assert "error" not in said, said


def _restore(scene: Scene) -> None:
    _let_end(scene)
    done = scene.virsh("restore", str(scene.bench.plan.shared / "web1.save"))
    assert done.code == 0, done.err


def _end_copy(scene: Scene) -> None:
    assert scene.virsh("blockjob", "web1", "vda", "--abort").code == 0


FINISH: Mapping[Under, Doing] = {
    Under.PRECOPY: _cancel,
    Under.POSTCOPY: _complete,
    Under.ABANDONED: _cancel_abandoned,
    Under.BROKEN: _resume,
    Under.UNSETTLED: lambda scene: scene.bench.good("recover"),
    Under.VIRSH_MIGRATE: _abort,
    Under.SNAPSHOT: _let_end,
    Under.DISK_SNAPSHOT: lambda _scene: None,
    Under.BACKUP: _abort,
    Under.BLOCKCOPY: _end_copy,
    Under.SAVE: _restore,
    Under.DUMP: _let_end,
    Under.PROTECTED: lambda scene: scene.bench.good("unprotect", "web1"),
}
