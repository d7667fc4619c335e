"""A fleet in memory: hosts that fill up, moves that take their time, and things that go wrong."""
