"""The pocket hybrid: an attention + Mamba-2 model small enough to train, ship and serve on a laptop.

It answers word problems in the format of GSM8K (question, rationale, `#### N`), so that the whole accuracy path
(engine, KV cache, state cache, sampling, lm-eval's extraction, the gate) runs without a GPU or a model hub.
"""
