"""Mutations of the code that makes an epoch consistent: output, order, connection, memory."""

from bench.mutations.mutation import Area, Mutation, unit

_PRIMARY = unit("replication/primary/loop")
_ALONE = unit("replication/primary/loop_unprotected")
_STANDSTILL = unit("capture/memory/shared_memory", "replication/primary/epoch_capture")
_BUFFERS = unit("replication/primary/network_buffer")
_TIMER = unit("replication/primary/network_buffer_timer")
_PLUGGED = unit("replication/primary/new_nics")
_ORDER = unit("replication/primary/loop_order")
_COMPARE = unit("capture/memory/page_diff", "replication/dirty_pages/finder")
_TRACKED = unit("replication/primary/tracked_memory")
_RELEASE = (
    "        self._switch(Kind.SINK, on=False)\n        self._switch(Kind.HOLDING, on=False)\n"
)

_OUTPUT_ORDER = (
    Mutation(
        name="output-without-lease", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="            parts.lease_holder.check()\n            parts.buffers.release()",
        new="            parts.buffers.release()",
        suite=_PRIMARY,
        breaks="A host that has lost the lease still releases output.",
    ),
    Mutation(
        name="output-before-acknowledgement", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="            meanwhile=self._keep,\n        )  # fmt: skip\n"
        "        self._committed(flight)\n",
        new="            meanwhile=lambda: self._committed(flight),\n        )  # fmt: skip\n",
        suite=_PRIMARY,
        breaks="A failover loses data that was acknowledged to clients.",
    ),
    Mutation(
        name="plugged-before-the-first-look", area=Area.OUTPUT_ORDER,
        file="vmckpt/agent/replication/devices.py",
        old="        if self._known is None:",
        new="        if not self._file.exists():",
        suite=unit("agent/replication/devices"),
        breaks="A card plugged in while the standby is created sends output that is in no epoch.",
    ),
    Mutation(
        name="any-acknowledgement-counts", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/acknowledgement.py",
        old="        if isinstance(found, Ack) and found.epoch == number:",
        new="        if isinstance(found, Ack):",
        suite=unit("replication/primary/acknowledgement"),
        breaks="The acknowledgement of another epoch releases an epoch's output.",
    ),
    Mutation(
        name="alone-before-invalid", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="        try:\n            parts.lease_holder.invalidate()\n",
        new="        self._let_out()\n        try:\n            parts.lease_holder.invalidate()\n",
        suite=_PRIMARY,
        breaks="Output is released that a standby, which may still take over, does not have.",
    ),
    Mutation(
        name="alone-though-not-noted", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old='cannot be recorded as invalid: {exc}")\n            return False\n',
        new='cannot be recorded as invalid: {exc}")\n',
        suite=_PRIMARY,
        breaks="Output is released before the lease store records that the standby is invalid.",
    ),
    Mutation(
        name="alone-without-leave", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="        if not parts.leave.has():",
        new="        if parts.leave.wanted:",
        suite=unit("replication/primary/solo_permission"),
        breaks="A guest runs unprotected while its controller fails it over.",
    ),
    Mutation(
        name="leave-under-any-name", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/solo_permission.py",
        old="self._asked is not None and secrets.compare_digest(name, self._asked)",
        new="self._asked is not None",
        suite=unit("replication/primary/solo_permission"),
        breaks="A permission for an earlier request releases output during a later request.",
    ),
    Mutation(
        name="missing-filter-ignored", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="        if not (self._held or self._parts.unprotected):",
        new="        if self._held and self._parts.unprotected:",
        suite=_ALONE,
        breaks="A new agent releases output while the standby may still take over.",
    ),
    Mutation(
        name="first-copy-keeps-standby-valid", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="        self._parts.lease_holder.invalidate()\n"
        "        self._parts.guest.note_unprotected(True)",
        new="        self._parts.guest.note_unprotected(True)",
        suite=_PRIMARY,
        breaks="A standby may take over before its new copy is complete.",
    ),
    Mutation(
        name="backup-acknowledges-first", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/backup/loop.py",
        old="        epoch = self._stage.seal(seal)\n        try:\n"
        "            line.send(Ack(epoch=epoch))",
        new="        line.send(Ack(epoch=seal.epoch))\n        try:\n"
        "            self._stage.seal(seal)",
        suite=unit("replication/backup/loop"),
        breaks="The backup acknowledges an epoch that it cannot commit.",
    ),
    Mutation(
        name="newest-packets-first", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_buffer.py",
        old=_RELEASE,
        new="        self._switch(Kind.SINK, on=False)\n"
        "        self._switch(Kind.COLLECTING, on=False)\n"
        "        self._switch(Kind.HOLDING, on=False)\n",
        suite=_BUFFERS,
        breaks="The output of the open epoch is released with that of the committed epoch.",
    ),
    Mutation(
        name="released-filter-stays-open", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_buffer.py",
        old=_RELEASE + "        self._switch(Kind.HOLDING, on=True)\n", new=_RELEASE,
        suite=_BUFFERS,
        breaks="After the first released epoch, all output is sent at once.",
    ),
    Mutation(
        name="attached-filter-stays-open", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_buffer.py",
        old="        self._switch(Kind.HOLDING, on=True)\n        self._waits, self._there",
        new="        self._waits, self._there",
        suite=unit("agent/replication/primary"),
        breaks="If an agent dies during a release, output is no longer buffered.",
    ),
    Mutation(
        name="filters-begin-open", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_buffer.py",
        old="            self._add_buffer(Filter(Kind.HOLDING, card), on=True)",
        new="            self._add_buffer(Filter(Kind.HOLDING, card), on=False)",
        suite=_BUFFERS,
        breaks="The output of the first epoch is sent before the epoch is committed.",
    ),
    Mutation(
        name="ended-before-invalid", area=Area.OUTPUT_ORDER,
        file="vmckpt/agent/replication/teardown.py",
        old="        lease_holder.invalidate()\n    else:\n",
        new="        network_buffer.remove(monitor, folder)\n"
        "        lease_holder.invalidate()\n    else:\n",
        suite=unit("agent/replication/teardown"),
        breaks="The end of a protection releases output while the standby may still take over.",
    ),
    Mutation(
        name="filters-removed-when-gone", area=Area.OUTPUT_ORDER,
        file="vmckpt/agent/replication/primary.py",
        old="    if alone:\n        network_buffer.remove(monitor, folder)",
        new="    if not held:\n        network_buffer.remove(monitor, folder)",
        suite=unit("agent/replication/primary"),
        breaks="If one card's filter is missing, a new agent releases the other cards' output.",
    ),
    Mutation(
        name="sink-stays-open", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_buffer.py",
        old="        self._switch(Kind.SINK, on=True)\n"
        "        self._switch(Kind.COLLECTING, on=False)",
        new="        self._switch(Kind.COLLECTING, on=False)",
        suite=_TIMER,
        breaks="Without an agent, QEMU's timer releases buffered output.",
    ),
    Mutation(
        name="buffers-not-replaced-in-time", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_filters.py",
        old="    return now - armed >= interval / _SHARE", new="    return now - armed >= interval",
        suite=_TIMER, breaks="QEMU's timer releases output after an hour.",
    ),
    Mutation(
        name="mixed-epochs-released", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/network_buffer.py",
        old="        self._see_timer()\n        if self._mixed:\n            return\n",
        new="        self._see_timer()\n",
        suite=_TIMER,
        breaks="If an agent hangs for an hour, the output of the open epoch is released.",
    ),
    Mutation(
        name="new-card-keeps-its-link", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/new_nics.py",
        old="            if not self._holds:", new="            if self._holds:",
        suite=unit("agent/replication/devices"),
        breaks="A card that is plugged in sends output while the standby may still take over.",
    ),
    Mutation(
        name="replugged-epoch-is-sealed", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="            if not parts.devices.still():", new="            if False:",
        suite=_PLUGGED,
        breaks="The standby receives the state of a device that it lacks, and cannot load it.",
    ),
    Mutation(
        name="invalid-before-filters-are-gone", area=Area.OUTPUT_ORDER,
        file="vmckpt/replication/primary/loop.py",
        old="        self._until_unplugged()\n        self._run_unprotected(why)",
        new="        self._run_unprotected(why)",
        suite=_PLUGGED,
        breaks="A guest whose QEMU crashes when a card is unplugged is lost.",
    ),
)  # fmt: skip

_EPOCHS = (
    Mutation(
        name="runs-with-capabilities", area=Area.EPOCHS,
        file="vmckpt/capture/memory/shared_memory.py",
        old="        migration_settings.set_capabilities(monitor, self._undo.capabilities)\n"
        "        if goes_on:\n            monitor.tell(\"cont\", {})",
        new="        if goes_on:\n            monitor.tell(\"cont\", {})\n"
        "        migration_settings.set_capabilities(monitor, self._undo.capabilities)",
        suite=_STANDSTILL,
        breaks="A `virsh save` between epochs loses the guest's memory.",
    ),
    Mutation(
        name="output-closed-too-late", area=Area.EPOCHS,
        file="vmckpt/capture/memory/shared_memory.py",
        old="            barrier(self.mark)\n            found = comparing.result()",
        new="            found = comparing.result()\n            barrier(self.mark)",
        suite=_STANDSTILL,
        breaks="The disks and output of an epoch are from a later moment than its device state.",
    ),
    Mutation(
        name="resumed-guest-is-captured", area=Area.EPOCHS,
        file="vmckpt/capture/memory/shared_memory.py",
        old="            self._must_stand()\n",
        new="",
        suite=_STANDSTILL,
        breaks="An epoch is committed whose memory is newer than its device state.",
    ),
    Mutation(
        name="runs-before-migration-ended", area=Area.EPOCHS,
        file="vmckpt/capture/memory/shared_memory.py",
        old='(state := self._monitor.run_state()) != "postmigrate"',
        new='not (state := self._monitor.run_state()).endswith("migrate")',
        suite=_STANDSTILL,
        breaks="QEMU is resumed while a migration is still ending, which may crash QEMU.",
    ),
    Mutation(
        name="discarded-changes-are-lost", area=Area.EPOCHS,
        file="vmckpt/replication/primary/loop.py",
        old='parts.memory.doubt(parts.memory.flags(cast("Sequence[Changed]", why.found)))',
        new="pass",
        suite=_PRIMARY,
        breaks="Pages of a discarded epoch never reach the standby.",
    ),
    Mutation(
        name="standby-not-compared", area=Area.EPOCHS, file="vmckpt/replication/primary/memory.py",
        old="            found[first:end] = ours(first, end) != theirs\n",
        new="            found[first:end] = False\n",
        suite=_PRIMARY,
        breaks="Pages that did not arrive are sent as differences from missing pages.",
    ),
    Mutation(
        name="writes-without-log", area=Area.EPOCHS, file="vmckpt/replication/primary/loop.py",
        old="            if (why := log.failed()) is not None:",
        new="            if (why := log.failed()) is not None and not self._held:",
        suite=_PRIMARY,
        breaks="An epoch is completed without all of its disk writes.",
    ),
    Mutation(
        name="seal-without-digest", area=Area.EPOCHS,
        file="vmckpt/replication/protocol/messages.py",
        old="        if seal.digest != self._tally.digest():",
        new="        if not seal.digest:",
        suite=_ORDER,
        breaks="An epoch is committed that differs from what the primary sent.",
    ),
    Mutation(
        name="seal-on-another-base", area=Area.EPOCHS,
        file="vmckpt/replication/protocol/messages.py",
        old="        if seal.base != self.committed:",
        new="        if seal.base > self.committed:",
        suite=_ORDER,
        breaks="An epoch is applied to a different epoch from the epoch that it is based on.",
    ),
    Mutation(
        name="seal-without-count", area=Area.EPOCHS, file="vmckpt/replication/protocol/messages.py",
        old="        if seal.messages != self._tally.count:",
        new="        if seal.messages < self._tally.count:",
        suite=_ORDER,
        breaks="An incomplete epoch is committed.",
    ),
    Mutation(
        name="replayed-epoch-counts", area=Area.EPOCHS,
        file="vmckpt/replication/protocol/messages.py",
        old="        if epoch <= self.committed:",
        new="        if epoch < self.committed:",
        suite=_ORDER,
        breaks="A former primary overwrites a newer epoch with its own.",
    ),
    Mutation(
        name="other-standbys-epoch", area=Area.EPOCHS,
        file="vmckpt/replication/backup/epoch_stage.py",
        old="            if record.standby != self._standby:",
        new="            if not record.standby:",
        suite=unit("replication/backup/epoch_stage"),
        breaks="A restarted standby is assumed to have the data of the previous standby.",
    ),
    Mutation(
        name="spoiled-epoch-is-applied", area=Area.EPOCHS,
        file="vmckpt/replication/backup/epoch_stage.py",
        old="        if not all(kept):",
        new="        if not any(kept):",
        suite=unit("replication/backup/epoch_stage"),
        breaks="A standby loads memory or disk writes that differ from the committed data.",
    ),
    Mutation(
        name="applied-before-it-is", area=Area.EPOCHS,
        file="vmckpt/replication/backup/epoch_stage.py",
        old="            redo_log.put_writes(self._log, self._record.writes.length, self._disks)\n"
        "            redo_log.mark_applied(self._folder / _RECORD)",
        new="            redo_log.mark_applied(self._folder / _RECORD)\n"
        "            redo_log.put_writes(self._log, self._record.writes.length, self._disks)",
        suite=unit("replication/backup/epoch_stage_crashes", keyword="killed"),
        breaks="If a backup dies while it applies an epoch, the epoch counts as applied.",
    ),
    Mutation(
        name="first-copy-is-not-flushed", area=Area.EPOCHS,
        file="vmckpt/replication/backup/epoch_stage.py",
        old="                if self._record is None:\n                    for disk",
        new="                if self._record is not None:\n                    for disk",
        suite=unit("replication/backup/epoch_stage", "replication/backup/epoch_stage_crashes"),
        breaks="A power cut loses data of the first copy, and this is not detected.",
    ),
)  # fmt: skip

_CONNECTION = (
    Mutation(
        name="certificate-not-pinned", area=Area.CONNECTION,
        file="vmckpt/replication/protocol/connection.py",
        old="        if made.getpeercert(binary_form=True) != wanted:",
        new="        if made.getpeercert(binary_form=True) == b\"\":",
        suite=unit("replication/protocol/connection"),
        breaks="A certificate signed by the session's certificate is accepted instead of it.",
    ),
    Mutation(
        name="certificate-not-verified", area=Area.CONNECTION,
        file="vmckpt/replication/protocol/connection.py",
        old="    context.verify_mode = ssl.CERT_REQUIRED",
        new="    context.verify_mode = ssl.CERT_NONE",
        suite=unit("replication/protocol/connection"),
        breaks="A client without a certificate can connect to the standby's agent.",
    ),
    Mutation(
        name="old-protocol", area=Area.CONNECTION, file="vmckpt/replication/protocol/connection.py",
        old="    context.minimum_version = ssl.TLSVersion.TLSv1_3",
        new="    context.minimum_version = ssl.TLSVersion.TLSv1_2",
        suite=unit("replication/protocol/connection"),
        breaks="A man in the middle can negotiate an older version of TLS.",
    ),
    Mutation(
        name="frame-without-token", area=Area.CONNECTION,
        file="vmckpt/replication/protocol/framing.py",
        old="(token == self._token if isinstance(self._token, int) else self._token(token))",
        new="(token == self._token if isinstance(self._token, int) else token)",
        suite=unit("replication/protocol/connection", "replication/protocol/framing"),
        breaks="Messages from an agent that was replaced are still accepted.",
    ),
    Mutation(
        name="frame-without-digest", area=Area.CONNECTION,
        file="vmckpt/replication/protocol/framing.py",
        old="            if digest(header, told) != frame[_HEADER.size : _HEAD]:",
        new="            if len(frame) < _HEAD:",
        suite=unit("replication/protocol/framing"),
        breaks="A flipped bit reaches the guest's memory.",
    ),
    Mutation(
        name="other-session-is-followed", area=Area.CONNECTION,
        file="vmckpt/replication/backup/loop.py",
        old="        if hello.session != self._session.session:",
        new="        if not hello.session:",
        suite=unit("replication/backup/loop"),
        breaks="A standby follows the guest of an earlier protection.",
    ),
    Mutation(
        name="reset-caller-ends-handshakes", area=Area.CONNECTION,
        file="vmckpt/replication/protocol/connection.py",
        old="            with suppress(OSError):  # a peer that has disconnected",
        new="            with suppress(BlockingIOError):  # a peer that has disconnected",
        suite=unit("replication/protocol/connection", keyword="hang_up_at_once"),
        breaks="Clients that disconnect at once prevent the primary from reaching its standby.",
    ),
    Mutation(
        name="idle-callers-are-kept", area=Area.CONNECTION,
        file="vmckpt/replication/protocol/connection.py",
        old="        if len(self._since) > _AT_ONCE:",
        new="        if len(self._since) > 1 << 20:",
        suite=unit("replication/protocol/connection"),
        breaks="Silent clients exhaust the agent's file descriptors.",
    ),
)  # fmt: skip

_PAGE_COMPARISON = (
    Mutation(
        name="last-page-of-stretch", area=Area.PAGE_COMPARISON,
        file="vmckpt/capture/memory/page_diff.py",
        old="        stop = min(start + _STRETCH, end)",
        new="        stop = min(start + _STRETCH - 1, end)",
        suite=_COMPARE,
        breaks="Changes of every 64th page of a guest's memory are not sent.",
    ),
    Mutation(
        name="last-page-of-task", area=Area.PAGE_COMPARISON,
        file="vmckpt/capture/memory/page_diff.py",
        old="            yield start, min(start + _TASK, last)",
        new="            yield start, min(start + _TASK - 1, last)",
        suite=_COMPARE,
        breaks="Changes of every 2048th page of a guest's memory are not sent.",
    ),
    Mutation(
        name="last-byte-of-stretch", area=Area.PAGE_COMPARISON,
        file="vmckpt/capture/memory/page_diff.py",
        old="offset, length = start * PAGE, (stop - start) * PAGE",
        new="offset, length = start * PAGE, (stop - start) * PAGE - 1",
        suite=_COMPARE,
        breaks="A change of the last byte of a stretch is not detected.",
    ),
    Mutation(
        name="first-word-of-page", area=Area.PAGE_COMPARISON,
        file="vmckpt/capture/memory/page_diff.py",
        old="(live.pages[start:stop] != last.pages[start:stop]).any(axis=1)",
        new="(live.pages[start:stop] != last.pages[start:stop])[:, 0]",
        suite=_COMPARE,
        breaks="A change after the first eight bytes of a page is not detected.",
    ),
    Mutation(
        name="new-pages-are-missed", area=Area.PAGE_COMPARISON,
        file="vmckpt/capture/memory/page_diff.py",
        old="    work += _submit(live, last, pool, held & ~begun)\n",
        new="",
        suite=_COMPARE,
        breaks="Pages that are written for the first time are not compared.",
    ),
    Mutation(
        name="freed-pages-stay", area=Area.PAGE_COMPARISON,
        file="vmckpt/capture/memory/page_diff.py",
        old="    gone = np.flatnonzero(last.written & ~held & ~begun)",
        new="    gone = np.flatnonzero(last.written & ~last.written)",
        suite=_COMPARE,
        breaks="Pages that the guest has freed keep their old contents in the copy.",
    ),
    Mutation(
        name="epoch-misses-new-pages", area=Area.PAGE_COMPARISON,
        file="vmckpt/replication/dirty_pages/finder.py",
        old="        more = held & ~expected",
        new="        more = expected & ~expected",
        suite=_COMPARE,
        breaks="An epoch lacks the pages that were first written while the epoch was prepared.",
    ),
    Mutation(
        name="epoch-misses-freed-pages", area=Area.PAGE_COMPARISON,
        file="vmckpt/replication/dirty_pages/finder.py",
        old="        gone = np.flatnonzero(last.written & ~held & ~expected)",
        new="        gone = np.flatnonzero(last.written & held & ~held)",
        suite=_COMPARE,
        breaks="A page that became a hole keeps its old contents in the standby.",
    ),
    Mutation(
        name="too-many-pages-are-lost", area=Area.PAGE_COMPARISON,
        file="vmckpt/replication/primary/copied_memory.py",
        old="        rest[changed.whole] = True\n",
        new="",
        suite=unit("replication/primary/sender"),
        breaks="Pages of a large epoch that did not fit into spare memory are not sent.",
    ),
)  # fmt: skip

_WRITE_TRACKING = (
    Mutation(
        name="failed-capture-forgets-pages", area=Area.WRITE_TRACKING,
        file="vmckpt/replication/primary/tracked_memory.py",
        old="            block.stale[page_runs.numbers(runs)] = True\n",
        new="            block.stale[:] = False\n"
        "            block.stale[page_runs.numbers(runs)] = True\n",
        suite=_TRACKED,
        breaks="Pages that a failed capture found written are in no later epoch.",
    ),
    Mutation(
        name="pass-protects-a-running-guest", area=Area.WRITE_TRACKING,
        file="vmckpt/replication/primary/tracked_memory.py",
        old="        pause(self._mark_written)\n",
        new="        self._mark_written()\n",
        suite=_TRACKED,
        breaks="Pages written by a disk read in flight are in no epoch.",
    ),
    Mutation(
        name="lost-page-is-still-known", area=Area.WRITE_TRACKING,
        file="vmckpt/replication/primary/tracked_memory.py",
        old="            block.hot.forget(one)\n",
        new="",
        suite=_TRACKED,
        breaks="A page is sent as a difference from content that the backup never received.",
    ),
    Mutation(
        name="displaced-page-is-still-known", area=Area.WRITE_TRACKING,
        file="vmckpt/replication/dirty_pages/hot_pages.py",
        old="        self._slot[replaced[replaced >= 0]] = -1\n",
        new="",
        suite=unit("replication/dirty_pages/hot_pages"),
        breaks="A page is sent as a difference from the content of another page.",
    ),
    Mutation(
        name="scan-ends-too-early", area=Area.WRITE_TRACKING,
        file="vmckpt/capture/memory/write_tracking.py",
        old="        while at < end:\n",
        new="        while not found:\n",
        suite=unit("capture/memory/write_tracking"),
        breaks="Written pages after the first 65,536 runs are missed.",
    ),
    Mutation(
        name="discarded-page-is-not-written", area=Area.WRITE_TRACKING,
        file="vmckpt/capture/memory/soft_dirty.py",
        old="(now & _WRITTEN | (now ^ before) & _PLACE) != 0",
        new="(now & _WRITTEN) != 0",
        suite=unit("capture/memory/soft_dirty"),
        breaks="A page that QEMU discarded keeps its old content in the standby.",
    ),
    Mutation(
        name="soft-dirty-bits-are-shared", area=Area.WRITE_TRACKING,
        file="vmckpt/capture/memory/soft_dirty.py",
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        suite=unit("capture/memory/soft_dirty"),
        breaks="Two protections clear each other's bits, and their standbys lack pages.",
    ),
)  # fmt: skip

EPOCHS = (*_OUTPUT_ORDER, *_EPOCHS, *_CONNECTION, *_PAGE_COMPARISON, *_WRITE_TRACKING)
