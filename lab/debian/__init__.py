"""A real Debian guest: systemd, guest agent, and PostgreSQL under load."""
