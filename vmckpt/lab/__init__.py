"""Real libvirt hosts on one machine: each its own network, mount, process and host-name namespace.

`plan` decides names and addresses; `lab.Lab` builds, heals and removes. The other modules are one
trade each: network, host, configs, pki, image, guests, observer, ledger, witness.
"""
