"""Leases: which controller or host may act on a guest, and until when."""
