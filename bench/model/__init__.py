"""A model of a protection, explored exhaustively: lease, epochs, output, failover, recovery.

The decisions in it are the product's own: `replay` runs the real methods (LeaseHolder, Primary,
LeaseClaim, Standstill, the orders that end a protection, the watchdog's rules) on fakes, and stops
them at each thing that they do to the world. The model contributes that world: two hosts, QEMU with
the kernel's timer, a link, a lease store, clocks, and what can go wrong between any two steps.
"""
