# SPDX-License-Identifier: Apache-2.0
"""Serve a small hybrid model in vLLM, ask it, and prove who attended. Without a GPU: TRITON_INTERPRET=1."""

from pathlib import Path

from vllm import SamplingParams

from pagedkv.vllm_plugin.inspect import build_llm, require_served, served_layers

if __name__ == "__main__":  # vLLM starts its engine as a process that imports this file
    model = Path(__file__).parents[1] / "evals/pocket/hybrid"
    llm = build_llm(str(model), dtype="float32", max_model_len=160, max_num_seqs=4, enforce_eager=True)
    prompt = "Question: Tom has 7 apples and gets 2 more. How many apples does Tom have?\nAnswer:"
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=32, stop=["Question:"]))[0]
    print(prompt, answer.outputs[0].text)
    layers = served_layers(llm)
    require_served(layers)
    print(len(layers), "attention layers, each served by", layers[0]["backend"])
