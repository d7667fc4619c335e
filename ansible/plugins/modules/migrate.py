#!/usr/bin/python
"""Migrate a running guest to a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: migrate
short_description: Migrate a running guest to a host
version_added: "0.1.0"
description:
  - Makes sure that a running guest is on a host. Migrates the guest if it is on another host.
  - In check mode, the blockers are checked and the migration is forecast; nothing is changed.
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
  to:
    description: Target host, by its name in hosts.yaml.
    type: str
    required: true
  policy:
    description: Policy. Default is the policy that matches the guest.
    type: str
  mode:
    description: Overrides the policy's mode.
    type: str
    choices: [auto, precopy, postcopy, hybrid, stop-and-copy, checkpoint]
  copy_storage:
    description: Copies disks that the hosts do not share.
    type: str
    choices: [shared, full, thin]
  timeout:
    description: Gives up after this time, like V(5m).
    type: str
extends_documentation_fragment:
  - vmckpt.vmckpt.command
"""

EXAMPLES = r"""
- name: Move web1 to beta
  vmckpt.vmckpt.migrate:
    guest: web1
    to: beta
  delegate_to: localhost
"""

RETURN = r"""
report:
  description: The report of C(vmckpt migrate --json), with forecast, result and decisions.
  returned: if the guest was on another host
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vmckpt.vmckpt.plugins.module_utils.command import ARGUMENTS, Vmckpt


def main():
    module = AnsibleModule(
        argument_spec=dict(
            ARGUMENTS,
            guest={"type": "str", "required": True},
            to={"type": "str", "required": True},
            policy={"type": "str"},
            mode={
                "type": "str",
                "choices": ["auto", "precopy", "postcopy", "hybrid", "stop-and-copy", "checkpoint"],
            },
            copy_storage={"type": "str", "choices": ["shared", "full", "thin"]},
            timeout={"type": "str"},
        ),
        supports_check_mode=True,
    )
    vmckpt = Vmckpt(module)
    guest = vmckpt.guest(module.params["guest"])
    if guest["host"] == module.params["to"]:
        module.exit_json(changed=False)
    words = ["migrate", guest["uuid"], "--to", module.params["to"]]
    for name in ("policy", "mode", "copy_storage", "timeout"):
        if module.params[name]:
            words += ["--" + name.replace("_", "-"), module.params[name]]
    if module.check_mode:
        words.append("--dry-run")
    module.exit_json(changed=True, report=vmckpt.run(*words)[1])


if __name__ == "__main__":
    main()
