# SPDX-License-Identifier: Apache-2.0
"""Print what a verdict says: python examples/read_verdict.py results/verdict.json. Needs nothing but Python."""

import json
import sys
from pathlib import Path

verdict = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
print(f"{verdict['outcome']}: {verdict['why']}")
for step in verdict["steps"]:
    if step["outcome"] != "pass":
        print(f"  {step['key']}: {step['outcome']} ({step['ruling']}): {step['why']}")
        print(f"    repeat it with: {step['reproduce']}")
sys.exit(0 if verdict["outcome"] == "pass" else 1)
