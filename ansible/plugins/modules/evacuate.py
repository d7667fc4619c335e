#!/usr/bin/python
"""Move all guests off a host, or back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: evacuate
short_description: Move all guests off a host, or back
version_added: "0.1.0"
description:
  - With O(state=evacuated), puts a host into maintenance and moves all its guests to other hosts.
  - With O(state=repopulated), moves the evacuated guests back and ends the maintenance.
  - In check mode, the plan is made and nothing is changed.
attributes:
  check_mode:
    description: Whether the module can predict changes without making them.
    support: full
author:
  - The vmckpt authors (@vmckpt)
options:
  host:
    description: Name of the host in hosts.yaml.
    type: str
    required: true
  state:
    description: Whether the host is to be empty or to have its guests again.
    type: str
    default: evacuated
    choices: [evacuated, repopulated]
  to:
    description: Target hosts of an evacuation. Default is all other hosts.
    type: list
    elements: str
  policy:
    description: Policy for all guests. Default is each guest's own policy.
    type: str
  partly:
    description: Starts even if some guests cannot be moved.
    type: bool
    default: false
  why:
    description: Reason of the maintenance.
    type: str
extends_documentation_fragment:
  - vmckpt.vmckpt.command
"""

EXAMPLES = r"""
- name: Empty alpha before an update
  vmckpt.vmckpt.evacuate:
    host: alpha
    why: kernel update
  delegate_to: localhost

- name: Move the guests back
  vmckpt.vmckpt.evacuate:
    host: alpha
    state: repopulated
  delegate_to: localhost
"""

RETURN = r"""
report:
  description: The plan and its result, as printed by C(vmckpt evacuate --json).
  returned: if something had to be changed
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vmckpt.vmckpt.plugins.module_utils.command import (
    ARGUMENTS,
    LEFT_BEHIND,
    Vmckpt,
)


def main():
    module = AnsibleModule(
        argument_spec=dict(
            ARGUMENTS,
            host={"type": "str", "required": True},
            state={
                "type": "str",
                "choices": ["evacuated", "repopulated"],
                "default": "evacuated",
            },
            to={"type": "list", "elements": "str"},
            policy={"type": "str"},
            partly={"type": "bool", "default": False},
            why={"type": "str"},
        ),
        supports_check_mode=True,
    )
    vmckpt = Vmckpt(module)
    given = module.params
    host = given["host"]
    resting = any(one["host"] == host for one in vmckpt.run("maintenance", "list")[1])
    leave = given["state"] == "evacuated"
    if leave and resting and not any(one["host"] == host for one in vmckpt.run("guests")[1]):
        module.exit_json(changed=False)
    if not leave and not resting:
        module.exit_json(changed=False)
    words = ["evacuate" if leave else "repopulate", host]
    words += ["--dry-run"] if module.check_mode else ["--yes"]
    if given["policy"]:
        words += ["--policy", given["policy"]]
    if given["partly"]:
        words.append("--partly")
    if leave and given["to"]:
        words += ["--to", ",".join(given["to"])]
    if leave and given["why"]:
        words += ["--why", given["why"]]
    accept = (LEFT_BEHIND,) if given["partly"] else ()
    module.exit_json(changed=True, report=vmckpt.run(*words, accept=accept)[1])


if __name__ == "__main__":
    main()
