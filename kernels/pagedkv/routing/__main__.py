"""Entry of `python -m pagedkv.routing`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
