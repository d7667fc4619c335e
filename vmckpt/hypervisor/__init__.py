"""The only package that calls libvirt: connections and their threads, guests, hosts, jobs."""
