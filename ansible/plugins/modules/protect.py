#!/usr/bin/python
"""Keep a standby of a running guest on another host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: protect
short_description: Keep a standby of a running guest on another host
version_added: "0.1.0"
description:
  - Makes sure that a guest is protected by a standby, or that it is not.
  - In check mode, the blockers are checked and nothing is changed.
attributes:
  check_mode:
    description: Whether the module can predict changes without making them.
    support: full
author:
  - The vmckpt authors (@vmckpt)
options:
  guest:
    description: Name or UUID of the guest.
    type: str
    required: true
  state:
    description: Whether the guest is to have a standby.
    type: str
    default: present
    choices: [present, absent]
  to:
    description: Host of the standby. Required if O(state=present).
    type: str
  failover:
    description: Whether the failover is automatic.
    type: str
    choices: [automatic, manual]
  interval:
    description: Time between epochs, like V(100ms).
    type: str
  policy:
    description: Policy. Default is the policy that matches the guest.
    type: str
extends_documentation_fragment:
  - vmckpt.vmckpt.command
"""

EXAMPLES = r"""
- name: Protect web1
  vmckpt.vmckpt.protect:
    guest: web1
    to: beta
    failover: automatic
  delegate_to: localhost
"""

RETURN = r"""
report:
  description: The report of vmckpt.
  returned: if something had to be changed
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vmckpt.vmckpt.plugins.module_utils.command import ARGUMENTS, Vmckpt


def main():
    module = AnsibleModule(
        argument_spec=dict(
            ARGUMENTS,
            guest={"type": "str", "required": True},
            state={"type": "str", "choices": ["present", "absent"], "default": "present"},
            to={"type": "str"},
            failover={"type": "str", "choices": ["automatic", "manual"]},
            interval={"type": "str"},
            policy={"type": "str"},
        ),
        required_if=[("state", "present", ("to",))],
        supports_check_mode=True,
    )
    vmckpt = Vmckpt(module)
    given = module.params
    guest = vmckpt.guest(given["guest"])
    protections = [
        one
        for one in vmckpt.run("status")[1]
        if one["uuid"] == guest["uuid"] and one["end"] is None
    ]
    if given["state"] == "absent":
        if not protections or module.check_mode:
            module.exit_json(changed=bool(protections))
        module.exit_json(changed=True, report=vmckpt.run("unprotect", guest["uuid"])[1])
    if protections:
        backup = protections[0]["backup"]
        if backup != given["to"]:
            module.fail_json(
                msg=f"{guest['name']} has a standby on {backup};"
                " end that protection first (state: absent)"
            )
        module.exit_json(changed=False)
    words = ["protect", guest["uuid"], "--to", given["to"]]
    for name in ("failover", "interval", "policy"):
        if given[name]:
            words += ["--" + name, given[name]]
    if module.check_mode:
        words.append("--dry-run")
    module.exit_json(changed=True, report=vmckpt.run(*words)[1])


if __name__ == "__main__":
    main()
