"""Mutations of what several operators rely on: the audit trail and the roles."""

from bench.mutations.mutation import Area, Mutation, unit

_CHAIN = unit("journal/audit_chain")
_TRAIL = unit("journal/audit_trail")
_ROLES = unit("model/roles")
_USER = unit("util/acting_user")
_PERMISSION = unit("app/permission")

_AUDIT = (
    Mutation(
        name="digest-without-previous",
        area=Area.AUDIT,
        file="vmckpt/journal/audit_chain.py",
        old="*astuple(fact.deed), previous]",
        new="*astuple(fact.deed)]",
        suite=_CHAIN,
        breaks="The digests form no chain.",
    ),
    Mutation(
        name="replaced-entry-passes",
        area=Area.AUDIT,
        file="vmckpt/journal/audit_chain.py",
        old="    if entry.previous != previous:",
        new="    if not entry.previous:",
        suite=_CHAIN,
        breaks="An entry with a new digest that replaces another entry is not found.",
    ),
    Mutation(
        name="removed-end-passes",
        area=Area.AUDIT,
        file="vmckpt/journal/audit_chain.py",
        old="    if recorded is not None and recorded.seq >= seq:",
        new="    if recorded is not None and recorded.seq > seq:",
        suite=_CHAIN,
        breaks="The removal of the last entry is not found.",
    ),
    Mutation(
        name="known-head-ignored",
        area=Area.AUDIT,
        file="vmckpt/journal/audit_trail.py",
        old="    found = audit_chain.verify(_all(database), known_head, recorded)",
        new="    found = audit_chain.verify(_all(database), None, recorded)",
        suite=_TRAIL,
        breaks="A trail that was rewritten completely passes despite a copy of its head.",
    ),
    Mutation(
        name="end-without-entry",
        area=Area.AUDIT,
        file="vmckpt/journal/store.py",
        old="        if not first:\n            return None\n",
        new="        if first:\n            return None\n",
        suite=_TRAIL,
        breaks="The end of a job leaves no entry.",
    ),
    Mutation(
        name="two-writers-fork-the-trail",
        area=Area.AUDIT,
        file="vmckpt/journal/audit_trail.py",
        old="    chosen = chosen.with_for_update()  # no effect in SQLite, see `sqlite`\n",
        new="",
        suite=_TRAIL,
        breaks="Two controllers that share a journal append the same number.",
    ),
)
_OPERATORS = (
    Mutation(
        name="no-role-is-enough", area=Area.ROLES, file="vmckpt/model/roles.py",
        old="        return held is None or ",
        new="        return held is not None and ",
        suite=_ROLES,
        breaks="A user without any role may run every command.",
    ),
    Mutation(
        name="account-named-root", area=Area.ROLES, file="vmckpt/model/roles.py",
        old="        if user.root:",
        new='        if user.name == "root":',
        suite=_ROLES,
        breaks="The name of a user, and not its ID, decides whether the user is root.",
    ),
    Mutation(
        name="sudo-gives-every-role", area=Area.ROLES, file="vmckpt/util/acting_user.py",
        old="    uid = os.getuid() or _login(proc) or _parent(proc)",
        new="    uid = os.getuid()",
        suite=_USER,
        breaks="A user that became root with su has every role.",
    ),
    Mutation(
        name="environment-precedes-kernel", area=Area.ROLES, file="vmckpt/util/acting_user.py",
        old="    if uid:\n",
        new='    if uid and "SUDO_USER" not in os.environ:\n',
        suite=_USER,
        breaks="A user chooses its own role with an environment variable.",
    ),
    Mutation(
        name="role-not-checked", area=Area.ROLES, file="vmckpt/app/permission.py",
        old='    _check(inventory, NEEDS[command], f"vmckpt {command}", guest)\n',
        new="",
        suite=_PERMISSION,
        breaks="Every user may run every command.",
    ),
    Mutation(
        name="refused-inventory-is-no-inventory", area=Area.ROLES,
        file="vmckpt/app/permission.py",
        old="    except NotPermitted:\n        raise\n",
        new="",
        suite=_PERMISSION,
        breaks="A user without a role may cancel jobs, as if there were no inventory.",
    ),
    Mutation(
        name="refusal-leaves-no-trace", area=Area.ROLES, file="vmckpt/app/permission.py",
        old="    failed = _record(What.REFUSED, what, guest=guest, outcome=why)",
        new="    failed = None",
        suite=_PERMISSION,
        breaks="The audit trail does not show attempts without the role.",
    ),
)  # fmt: skip
OPERATORS = (*_AUDIT, *_OPERATORS)
