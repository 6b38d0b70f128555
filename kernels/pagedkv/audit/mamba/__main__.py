"""Entry of `python -m pagedkv.audit.mamba`."""

import sys

from pagedkv.audit.cli import main

if __name__ == "__main__":
    sys.exit(main(program="pagedkv.audit.mamba", audit="pagedkv.audit.mamba.audit"))
