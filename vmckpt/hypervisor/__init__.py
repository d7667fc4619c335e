"""The only package that uses libvirt: connections and their threads, guests, hosts, jobs."""
