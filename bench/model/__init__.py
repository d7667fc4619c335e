"""A model of a protection that is explored exhaustively: lease, epochs, output, failover, recovery.

The decisions in the model are the product's own: `replay` runs the real methods (LeaseHolder,
Primary, LeaseClaim, PausedCapture, the orders that end a protection, the watchdog's rules) on
fakes, and stops them at each effect on the world. The model provides the world: two hosts, QEMU
with the kernel's timer, a link, a lease store, clocks, and faults between any two steps.
"""
