# SPDX-License-Identifier: Apache-2.0
"""The pocket models: one for each class of KV cache, small enough to train, ship and serve on a laptop.

They answer word problems in the format of GSM8K (question, rationale, `#### N`), so that the whole accuracy path
(engine, KV cache, state cache, sampling, lm-eval's extraction, the gate) runs without a GPU or a model hub.
"""
