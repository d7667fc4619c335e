"""Mutations of what keeps a guest from running twice: lease, the kernel's timer, takeover."""

from bench.mutations.mutation import Area, Mutation, unit

_TENURE = unit("replicate_tenure")
_TIMER = unit("lease_timer")
_TAKEOVER = unit("replicate_takeover")
_WITNESS = unit("lease_witness")

_LEASE = (
    Mutation(
        name="guard-ends-late", area=Area.LEASE, file="vmckpt/replicate/guarding.py",
        old="    return renewed != 0 and not now <= renewed + lasts",
        new="    return renewed != 0 and not now <= renewed + 2 * lasts",
        suite=unit("replicate_guard", keyword="it_chooses or nothing_that_is_wrong"),
        breaks="The guard kills a guest only after another host may have taken over.",
    ),
    Mutation(
        name="guard-trusts-nonsense", area=Area.LEASE, file="vmckpt/replicate/guarding.py",
        old="    return renewed != 0 and not now <= renewed + lasts",
        new="    return renewed != 0 and now > renewed + lasts",
        suite=unit("replicate_guard", keyword="it_chooses or nothing_that_is_wrong"),
        breaks="A page of which a value is no number never ends a lease.",
    ),
    Mutation(
        name="guard-sees-to-agent-first", area=Area.LEASE, file="vmckpt/replicate/guarding.py",
        old="    if _has_ended(seen.renewed, seen.lasts, now):\n        return KillGuest(",
        new="    if seen.agent_lives and (hangs := _hangs(seen, now, rules)):\n"
        "        return KillAgent(hangs)\n"
        "    if _has_ended(seen.renewed, seen.lasts, now):\n        return KillGuest(",
        suite=unit("replicate_guard", keyword="it_chooses or nothing_that_is_wrong"),
        breaks="A guest whose lease has ended lives on while its agent hangs.",
    ),
    Mutation(
        name="guard-holds-any-process", area=Area.LEASE, file="vmckpt/replicate/guard.py",
        old="        if identity(process.pid) == known:",
        new="        if identity(process.pid):",
        suite=unit("replicate_guard", keyword="number_of_another or is_another"),
        breaks="The guard kills a process that got the number of another one.",
    ),
    Mutation(
        name="guard-armed-after-valid", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="            self._enforce(self._renewed)\n"
        "            self._client.validate(self.token)",
        new="            self._client.validate(self.token)\n"
        "            self._enforce(self._renewed)",
        suite=_TENURE,
        breaks="An agent that dies in between leaves a guest that runs twice and for good.",
    ),
    Mutation(
        name="valid-without-renewal", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="            self._renew()\n            self.check()\n",
        new="            self.check()\n",
        suite=_TENURE,
        breaks="The guard counts from a renewal that may be older than the lease.",
    ),
    Mutation(
        name="lost-lease-goes-on", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="            if self._is_lost():\n                self._page.lose()",
        new="            if self._is_lost():",
        suite=_TENURE,
        breaks="A guest that another host runs is killed only when its lease would have ended.",
    ),
    Mutation(
        name="refused-agent-ends-nothing", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="            self._page.lose()\n            raise",
        new="            raise",
        suite=_TENURE,
        breaks="A new agent that is refused the lease leaves the guest running.",
    ),
    Mutation(
        name="refusal-is-no-loss", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old='self.lost = "another host has the lease: the guest must not run here"',
        new="pass",
        suite=_TENURE,
        breaks="An agent whose renewal is refused takes the lease for one that is not lost.",
    ),
    Mutation(
        name="hung-agent-renews", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="            if self._hangs():\n                continue\n",
        new="",
        suite=_TENURE,
        breaks="A guest that hangs in libvirt keeps its lease for ever and serves nothing.",
    ),
    Mutation(
        name="change-is-not-repeated", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="            if self._changing:",
        new="            if not self._tokens:",
        suite=_TENURE,
        breaks="A change of the token without an answer is forgotten, and the guest is killed.",
    ),
    Mutation(
        name="old-token-after-crash", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="        if self.token and not (self._folder / _CHANGING).exists():",
        new="        if self.token:",
        suite=_TENURE,
        breaks="An agent that follows one that died over a change has a token of no holder.",
    ),
    Mutation(
        name="handed-over-unheard", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="                except LeaseUnreachable:\n                    pass",
        new="                except LeaseUnreachable:\n                    return",
        suite=_TENURE,
        breaks="A guest is given away although the lease store never said that it is the other's.",
    ),
    Mutation(
        name="output-with-old-renewal", area=Area.LEASE, file="vmckpt/replicate/tenure.py",
        old="        if boottime() - self._renewed > self._lease.terms.lasts:",
        new="        if boottime() - self._renewed > 2 * self._lease.terms.lasts:",
        suite=_TENURE,
        breaks="Output gets out after another host may have taken over.",
    ),
    Mutation(
        name="others-wait-too-little", area=Area.LEASE, file="vmckpt/lease/terms.py",
        old="        return Seconds(self.ttl + self.margin)",
        new="        return Seconds(self.ttl)",
        suite=unit("lease_terms"),
        breaks="Another host may take over while the holder's guest still runs.",
    ),
    Mutation(
        name="holder-has-no-margin", area=Area.LEASE, file="vmckpt/lease/terms.py",
        old="        return Seconds(self.ttl - self.margin)",
        new="        return Seconds(self.ttl)",
        suite=unit("lease_terms"),
        breaks="The guard kills as late as another host may take over.",
    ),
    Mutation(
        name="margin-without-drift", area=Area.LEASE, file="vmckpt/lease/terms.py",
        old="    return Seconds((late + apart) / 2)",
        new="    return Seconds(late / 2)",
        suite=unit("lease_terms"),
        breaks="A long lease has a margin that two clocks at the limit of their drift use up.",
    ),
    Mutation(
        name="renewal-counts-from-answer", area=Area.LEASE, file="vmckpt/lease/witness.py",
        old='        return sent if told["said"] == "done" else None',
        new='        return self._clock() if told["said"] == "done" else None',
        suite=unit("lease_client"),
        breaks="A slow answer lets the guest run longer than the lease store believes.",
    ),
    Mutation(
        name="watch-counts-other-renewals", area=Area.LEASE, file="vmckpt/lease/witness.py",
        old="            self._beat, self._since = beat, self._clock()",
        new="            self._beat, self._since = beat, self._since or self._clock()",
        suite=unit("lease_client"),
        breaks="A standby counts the time for which it saw renewals as time without any.",
    ),
    Mutation(
        name="takeover-by-one-clock", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="greatest(waits(l), span - CASE WHEN beat = p_beat THEN p_watched ELSE 0 END)",
        new="waits(l)",
        suite=unit("lease_witness", keyword="clock_is_set_forward or has_not_watched"),
        breaks="A lease store whose clock jumps forward lets another host in early.",
    ),
    Mutation(
        name="takeover-by-own-clock", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="greatest(waits(l), span - CASE WHEN beat = p_beat THEN p_watched ELSE 0 END)",
        new="greatest(0, span - CASE WHEN beat = p_beat THEN p_watched ELSE 0 END)",
        suite=unit("lease_witness", keyword="own_clock_is_ahead"),
        breaks="A standby whose clock runs fast takes over before the lease has run out.",
    ),
    Mutation(
        name="takeover-by-older-renewal", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="CASE WHEN beat = p_beat THEN p_watched ELSE 0 END",
        new="p_watched",
        suite=unit("lease_witness", keyword="clock_is_set_forward"),
        breaks="A standby that saw an older renewal takes over before the newest has run out.",
    ),
    Mutation(
        name="takeover-with-old-token", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="        WHEN l.token <> p_token\n",
        new="        WHEN l.token < p_token\n",
        suite=unit("lease_witness", keyword="not_valid_or_has_an_old_token"),
        breaks="A standby that was left behind takes over.",
    ),
    Mutation(
        name="takeover-of-invalid-standby", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="        WHEN l.state <> 'protected' THEN 'the standby is not valid'",
        new="        WHEN l.state = 'ended' THEN 'the standby is not valid'",
        suite=unit("lease_witness", keyword="not_valid_or_has_an_old_token"),
        breaks="A standby takes over that has no whole epoch, or that the guest went on without.",
    ),
    Mutation(
        name="renewal-with-old-token", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="     WHERE role = session_user AND token = p_token AND holder = p_holder;",
        new="     WHERE role = session_user;",
        suite=unit("lease_witness", keyword="silent_holder or planned_switch"),
        breaks="A host that lost the lease renews the other's and runs on.",
    ),
    Mutation(
        name="others-lease-acquired", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="DECLARE l vmckpt_lease.lease := mine();\nBEGIN\n"
        "    IF l.guest IS NULL OR coalesce(l.holder, p_holder) <> p_holder THEN\n"
        "        RETURN refusal(l, l.token, p_holder);\n"
        "    ELSIF l.holder = p_holder AND l.claim = p_claim THEN\n"
        "        RETURN acquired(l.token);\n    END IF;\n    RETURN acquired(change(",
        new="DECLARE l vmckpt_lease.lease := mine();\nBEGIN\n"
        "    IF l.guest IS NULL THEN\n"
        "        RETURN refusal(l, l.token, p_holder);\n"
        "    ELSIF l.holder = p_holder AND l.claim = p_claim THEN\n"
        "        RETURN acquired(l.token);\n    END IF;\n    RETURN acquired(change(",
        suite=unit("lease_witness", keyword="planned_switch or silent_holder"),
        breaks="An agent that starts again takes the lease from the host that runs the guest.",
    ),
    Mutation(
        name="token-stays", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="    UPDATE lease SET token = l.token + 1, holder = p_holder,",
        new="    UPDATE lease SET token = l.token, holder = p_holder,",
        suite=unit("lease_witness", keyword="restarted_holder or not_valid"),
        breaks="A standby that was declared invalid still has the token to take over with.",
    ),
    Mutation(
        name="token-told-before-disk", area=Area.LEASE, file="vmckpt/lease/witness_schema.py",
        old="    PERFORM set_config('synchronous_commit', 'on', true);",
        new="    PERFORM set_config('synchronous_commit', 'off', true);",
        suite=unit("lease_witness", keyword="change_the_token_waits"),
        breaks="A lease store that crashes forgets that a standby was declared invalid.",
    ),
    Mutation(
        name="older-token-is-heard", area=Area.LEASE, file="vmckpt/replicate/claim.py",
        old="        if token < self.token:\n            return False\n",
        new="",
        suite=unit("replicate_claim"),
        breaks="A standby follows a primary that has been replaced.",
    ),
    Mutation(
        name="live-controller-replaced", area=Area.LEASE, file="vmckpt/lease/rules.py",
        old="        return not alive\n",
        new="        return True\n",
        suite=unit("lease_rules"),
        breaks="Two controllers act on one guest.",
    ),
    Mutation(
        name="silent-controller-replaced-early", area=Area.LEASE, file="vmckpt/lease/rules.py",
        old="    return alive_until is not None and alive_until < now",
        new="    return alive_until is None or alive_until < now",
        suite=unit("lease_rules"),
        breaks="A controller that never gave its word for a time counts as gone at once.",
    ),
    Mutation(
        name="controller-has-no-margin", area=Area.LEASE, file="vmckpt/lease/rules.py",
        old="    return now - beaten <= ttl - MARGIN",
        new="    return now - beaten <= ttl",
        suite=unit("lease_rules"),
        breaks="A controller still acts when another one may have taken its job over.",
    ),
)  # fmt: skip

_LEASE_TIMER = (
    Mutation(
        name="timer-is-relative", area=Area.LEASE_TIMER,
        file="vmckpt/hypervisor/qemu_process/lease_timer.py",
        old="_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 1, 9",
        new="_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 0, 9",
        suite=_TIMER,
        breaks="The kernel ends the guest hours after its lease.",
    ),
    Mutation(
        name="timer-stops-in-sleep", area=Area.LEASE_TIMER,
        file="vmckpt/hypervisor/qemu_process/lease_timer.py",
        old="_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 1, 9",
        new="_BOOTTIME, _ABSOLUTE, _SIGKILL = 1, 1, 9",
        suite=_TIMER,
        breaks="A host that was suspended runs its guest after another one took over.",
    ),
    Mutation(
        name="timer-asks-politely", area=Area.LEASE_TIMER,
        file="vmckpt/hypervisor/qemu_process/lease_timer.py",
        old="_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 1, 9",
        new="_BOOTTIME, _ABSOLUTE, _SIGKILL = 7, 1, 15",
        suite=_TIMER,
        breaks="A QEMU that hangs or ignores SIGTERM outlives its lease.",
    ),
    Mutation(
        name="timer-rounds-up", area=Area.LEASE_TIMER,
        file="vmckpt/hypervisor/qemu_process/lease_timer.py",
        old="    seconds = int(ends)\n",
        new="    seconds = int(ends) + 1\n",
        suite=_TIMER,
        breaks="The kernel ends the guest up to a second after its lease.",
    ),
    Mutation(
        name="timer-fails-in-silence", area=Area.LEASE_TIMER,
        file="vmckpt/hypervisor/qemu_process/lease_timer.py",
        old="        if boottime() < ends or process.lives():\n            raise",
        new="        if boottime() < ends:\n            raise",
        suite=_TIMER,
        breaks="A guest whose timer could not be set lives on after its lease, unnoticed.",
    ),
    Mutation(
        name="timer-of-another-kind", area=Area.LEASE_TIMER,
        file="vmckpt/hypervisor/qemu_process/lease_timer.py",
        old='signal: {_SIGKILL}/.*\\nnotify',
        new='signal: .*\\nnotify',
        suite=_TIMER,
        breaks="A timer of QEMU's own is taken for the lease's and is set in its place.",
    ),
    Mutation(
        name="timer-not-set-again", area=Area.LEASE_TIMER, file="vmckpt/replicate/tenure.py",
        old="            if self._page.renewed:\n                self._enforce(sent)",
        new="            if self._page.renewed:\n                self._page.renewed = sent",
        suite=_TENURE,
        breaks="The kernel kills a guest whose lease is renewed all the time.",
    ),
    Mutation(
        name="timer-never-set", area=Area.LEASE_TIMER, file="vmckpt/replicate/tenure.py",
        old="        if self._enforcer is not None and self._lease is not None:",
        new="        if self._enforcer is not None and self._lease is None:",
        suite=_TENURE,
        breaks="Without its agent and guard a guest runs on beside the one that took over.",
    ),
    Mutation(
        name="timer-counts-from-now", area=Area.LEASE_TIMER, file="vmckpt/replicate/tenure.py",
        old="            self._enforcer.arm(sent + self._lease.terms.lasts)",
        new="            self._enforcer.arm(boottime() + self._lease.terms.ttl)",
        suite=_TENURE,
        breaks="The kernel ends the guest when another one may have taken over already.",
    ),
    Mutation(
        name="timer-outlives-standby", area=Area.LEASE_TIMER, file="vmckpt/replicate/tenure.py",
        old="        self._page.renewed = 0.0\n        self._disarm()",
        new="        self._page.renewed = 0.0",
        suite=_TENURE,
        breaks="The kernel kills a guest that went on alone and whose lease store is away.",
    ),
    Mutation(
        name="timer-of-dead-agent-stays", area=Area.LEASE_TIMER, file="vmckpt/replicate/tenure.py",
        old="                self._disarm()  # an agent before us may have died right before it",
        new="                pass",
        suite=_TENURE,
        breaks="The kernel kills a guest whose standby is worth nothing.",
    ),
    Mutation(
        name="timer-forgotten-at-end", area=Area.LEASE_TIMER, file="vmckpt/agent/replicas.py",
        old="        afterlife.renewed(session, sent)\n        _stop_agent(folder)",
        new="        _stop_agent(folder)\n        afterlife.renewed(session, sent)",
        suite=unit("agent_end_primary"),
        breaks="A guest whose protection is being ended is killed if the lease store is slow.",
    ),
)  # fmt: skip

_TAKEOVERS = (
    Mutation(
        name="half-standby-runs", area=Area.TAKEOVER, file="vmckpt/replicate/takeover.py",
        old="    if seen.committed == 0:",
        new="    if seen.committed == 0 and not seen.person:",
        suite=_TAKEOVER,
        breaks="A standby runs of which only some memory was copied.",
    ),
    Mutation(
        name="silence-decides", area=Area.TAKEOVER, file="vmckpt/replicate/takeover.py",
        old='        return Decision(step=Step.ASK, why=f"silent',
        new='        return Decision(step=Step.RUN, why=f"silent',
        suite=_TAKEOVER,
        breaks="A network that is cut starts the guest a second time.",
    ),
    Mutation(
        name="final-epoch-decides", area=Area.TAKEOVER, file="vmckpt/replicate/takeover.py",
        old="    if seen.handed_over and seen.final:",
        new="    if seen.final:",
        suite=_TAKEOVER,
        breaks="A switch that its primary gave up runs the guest on both hosts.",
    ),
    Mutation(
        name="handed-over-without-final", area=Area.TAKEOVER, file="vmckpt/replicate/takeover.py",
        old="    if seen.handed_over and seen.final:",
        new="    if seen.handed_over:",
        suite=_TAKEOVER,
        breaks="A guest that was handed over runs from an epoch that is not its last one.",
    ),
    Mutation(
        name="person-against-evidence", area=Area.TAKEOVER, file="vmckpt/replicate/takeover.py",
        old="    if seen.person and seen.silent > patience:",
        new="    if seen.person:",
        suite=_TAKEOVER,
        breaks="A person's wrong word starts a guest whose primary is heard.",
    ),
    Mutation(
        name="moving-guest-taken", area=Area.TAKEOVER, file="vmckpt/replicate/takeover.py",
        old="    if seen.final and seen.person:",
        new="    if seen.final or seen.person:",
        suite=_TAKEOVER,
        breaks="A guest that moves starts on the target while its source still runs it.",
    ),
    Mutation(
        name="hello-is-death", area=Area.TAKEOVER, file="vmckpt/replicate/backup.py",
        old="        self._wishes.drop(Wish.FAILOVER)\n        if hello.captured == 0:",
        new="        if hello.captured == 0:",
        suite=unit("replicate_backup_takeover", keyword="comes_back"),
        breaks="A primary that comes back is taken for dead at its next hiccup.",
    ),
    Mutation(
        name="others-holding-is-ours", area=Area.TAKEOVER, file="vmckpt/replicate/claim.py",
        old="        if found.holder != self._host:",
        new="        if found.holder is None:",
        suite=unit("replicate_claim"),
        breaks="A standby runs a guest whose lease a third host holds.",
    ),
    Mutation(
        name="living-guest-handed-over", area=Area.TAKEOVER, file="vmckpt/agent/afterlife.py",
        old="    if identity.runs(session.guest):\n        return\n",
        new="",
        suite=unit("agent_afterlife"),
        breaks="A guest is handed to the standby while its QEMU still runs here.",
    ),
    Mutation(
        name="second-copy-is-let-out", area=Area.TAKEOVER, file="vmckpt/agent/replicas.py",
        old="    if runs_here and not order.define and not session.moves:",
        new="    if runs_here and not order.define and session.moves:",
        suite=unit("agent_end_primary"),
        breaks="Recovery connects both copies of a guest to the network.",
    ),
    Mutation(
        name="heard-copy-is-killed", area=Area.TAKEOVER, file="vmckpt/agent/replicas.py",
        old="    if afterlife.is_alone(folder):\n        raise TwoCopies(",
        new="    if not folder:\n        raise TwoCopies(",
        suite=unit("agent_end_primary"),
        breaks="Of two copies that were both heard one is killed with all that it acknowledged.",
    ),
    Mutation(
        name="others-lease-ends-quietly", area=Area.TAKEOVER, file="vmckpt/agent/replicas.py",
        old="        if _renewed(client, folder) is None:",
        new="        if _renewed(client, folder) == 0:",
        suite=unit("agent_end_primary"),
        breaks="Output is let out although another host holds the guest's lease.",
    ),
)  # fmt: skip

LEASE = (*_LEASE, *_LEASE_TIMER, *_TAKEOVERS)
