"""Read a guest's disks as of one instant, and find what has changed since an earlier one."""
