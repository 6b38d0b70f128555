# SPDX-License-Identifier: Apache-2.0
"""`python -m pagedkv.fit`: whether a hybrid fits its GPUs in vLLM, by its config.json; needs the standard library."""

import sys

from pagedkv.routing.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))
