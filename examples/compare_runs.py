# SPDX-License-Identifier: Apache-2.0
"""Judge two stored runs of lm-eval (samples_gsm8k_TIME.jsonl) on the same questions: compare_runs.py BEFORE AFTER."""

import sys
from pathlib import Path

from hileval.gates.compare import compare

before, after = (Path(argument) for argument in sys.argv[1:])
check, flips = compare(before, after, "strict", alpha=0.01, margin=0.05)  # a pass excludes a drop of 5 points
print(f"{check.outcome.value}: {check.message}")
for flip in flips[:5]:
    print(f"  {'lost' if flip.lost else 'gained'}: question {flip.doc_id}, now {flip.new_text!r}")
sys.exit(0 if check.outcome == "pass" else 1)
