"""Disks of a guest at one point in time, and what has changed since an earlier one."""
