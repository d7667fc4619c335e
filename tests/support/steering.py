"""Text that would steer a terminal, and what shows that it does not."""

import re

EVIL = "db\x1b]0;title\x07\x1b[2J\x9b1m\u202e\r\x00\x7f:x:[link=http://a]b[/link]\udcff[/]"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
OWN = re.compile("\x1b\\[[0-9;]*m")
