# SPDX-License-Identifier: Apache-2.0
"""Write two runs of 400 sums through lm-eval, as `lm_eval --log_samples` does: lm_eval_runs.py FOLDER.

The model is a stand-in that adds, and in the second run gives 20 more wrong answers. `hileval compare` reads what is
written: FOLDER/before/samples_sums_TIME.jsonl and FOLDER/after/samples_sums_TIME.jsonl.
"""

import json
import sys
from pathlib import Path

from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.loggers import EvaluationTracker


class Adder(LM):
    """Answer "7 + 35 =" right, but for these numbers of the list."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        self.wrong = wrong

    def generate_until(self, requests, **_):
        """Add."""
        sums = [sum(int(word) for word in request.args[0].split() if word.isdigit()) for request in requests]
        return [f"{total + (number in self.wrong)}" for number, total in enumerate(sums)]

    def loglikelihood(self, _requests, **_):
        """Refuse."""
        raise NotImplementedError("the task generates")

    loglikelihood_rolling = loglikelihood


def main(folder: Path) -> None:
    """Ask twice, and write what lm-eval writes."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"{7 * n} + {n} =", "answer": str(8 * n)} for n in range(400)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for name, wrong in (("before", {*range(0, 400, 40)}), ("after", {*range(0, 400, 40), *range(7, 400, 20)})):
        tracker = EvaluationTracker(output_path=str(folder / name))
        tracker.general_config_tracker.model_name_sanitized = ""
        said = evaluate(Adder(wrong), {"sums": ConfigurableTask(config=task)}, bootstrap_iters=0)
        samples = said.pop("samples")
        tracker.save_results_aggregated(said, samples)
        tracker.save_results_samples("sums", samples["sums"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
