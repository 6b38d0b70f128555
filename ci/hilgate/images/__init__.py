"""Images by content: the pins they are made of, the key of what they are built from, and their building.

`contents` is what a plan carries. `python -m hilgate.images` prints it, `python -m hilgate.images build IMAGE` builds.
"""

from hilgate.images.contents import INPUTS, contents, unfilled, wheel_keys
from hilgate.images.pins import Pins, read

__all__ = ["INPUTS", "Pins", "contents", "read", "unfilled", "wheel_keys"]
