# SPDX-License-Identifier: Apache-2.0
"""Serve a small hybrid model in vLLM, ask it, and prove who attended. Without a GPU: TRITON_INTERPRET=1."""

from pathlib import Path

from vllm import SamplingParams

from pagedkv.vllm_plugin.inspect import build_llm, require_served, served_layers

if __name__ == "__main__":  # vLLM starts its engine as a process that imports this file
    model = Path(__file__).parents[1] / "evals/pocket/hybrid"
    llm = build_llm(str(model), dtype="float32", max_model_len=160, max_num_seqs=4, enforce_eager=True)
    prompt = "Question: Ned has 6 coins. Bob has 4 coins. Tom has 3 coins. How many coins do Bob and Tom have together?"
    answer = llm.generate([f"{prompt}\nAnswer:"], SamplingParams(temperature=0.0, max_tokens=32, stop=["Question:"]))[0]
    print(prompt, answer.outputs[0].text, sep="\n")
    layers = served_layers(llm)
    require_served(layers)
    print(len(layers), "attention layers, each served by", layers[0]["backend"])
