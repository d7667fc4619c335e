"""The only room that knows libvirt: connections and their threads, guests, hosts, jobs.

Foreign data is parsed once, here (`parse`); libvirt's errors become ours here (`library`).
"""
