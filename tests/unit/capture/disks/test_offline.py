"""Disks of a guest that is off: what is read of their images."""

from vmckpt.capture.disks import offline
from vmckpt.model.disk import DiskFacts
from vmckpt.units import MIB


def test_an_image_tells_of_its_size_version_and_bitmaps() -> None:
    disk = DiskFacts(name="vda", kind="file", device="disk", format="qcow2", source="/x")
    found = offline.read_info(
        disk,
        {
            "virtual-size": 8 * MIB,
            "format-specific": {
                "data": {
                    "compat": "1.1",
                    "bitmaps": [
                        {"name": "good", "flags": ["auto"]},
                        {"name": "torn", "flags": ["in-use", "auto"]},
                        {"name": "asleep", "flags": []},
                    ],
                }
            },
        },
    )
    assert (found.size, found.version) == (8 * MIB, 3)
    assert [one.whole for one in found.bitmaps] == [True, False, False]
    assert offline.read_info(disk, {"virtual-size": 1}).bitmaps == ()
