# SPDX-License-Identifier: Apache-2.0
"""Show which kernel serves each attention layer of a model, or whether a hybrid fits its GPUs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pagedkv.arch import ARCHES
from pagedkv.errors import Exit, MisuseError, Parser, run_command
from pagedkv.layout import PACKINGS

from .candidates import PROVIDERS
from .explain import ENGINE_DTYPES, Deployment, as_data, explain, format_text
from .fit import ANY, GPUS, UTILIZATION, Budget, fit, fit_data, format_fit, gpu_of, weights_of
from .model_config import read_config
from .request import ELEMENT_BYTES, KvScales, Phase, Sides

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPLAIN = "Show which kernel serves each attention layer of a model, and why not the others."
_FIT = "Show how a hybrid fits its GPUs in vLLM: blocks, states, sequences, prefix cache, kernels; and what to set."
_EPILOG = """\
exit status: 0 every attention layer is served, and the model fits; 1 a layer is not, or the model does not fit; 2
misuse; 3 the config (or the data about a kernel) cannot be read.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; None takes this process's.

    Returns:
        Exit status.
    """
    options = _parse(arguments)
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> Exit:
    config = read_config(options.model)
    if options.command == "fit":
        service = _service(options)  # which says of which arch the GPU is
        made = fit(config, _deployment(options), service)
        sys.stdout.write(
            json.dumps(fit_data(made), indent=1) + "\n" if options.json else format_fit(made, options.model)
        )
        return Exit.FAIL if made.problems or not made.explanation.served else Exit.PASS
    explanation = explain(config, _deployment(options))
    sys.stdout.write(json.dumps(as_data(explanation), indent=1) + "\n" if options.json else format_text(explanation))
    return Exit.PASS if explanation.served else Exit.FAIL


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m pagedkv.routing", description=__doc__, epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    explain_ = commands.add_parser(
        "explain",
        help="Show which kernel serves each attention layer of a model.",
        description=_EXPLAIN,
        epilog=_EPILOG,
    )
    explain_.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="config.json, or the folder that holds it."
    )
    explain_.add_argument("--arch", required=True, choices=list(ARCHES), help="Architecture of the GPUs.")
    _add_deployment(explain_)
    add = explain_.add_argument
    add(
        "--phase",
        default="mixed",
        choices=get_args(Phase),
        help="Phase to serve (default: mixed, which is all of them).",
    )
    add("--q-len", type=int, default=1, metavar="N", help="Query tokens of a sequence in a decode step (default: 1).")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="Most sequences in a step (default: 256).")
    add(
        "--num-blocks",
        type=int,
        metavar="N",
        help="Blocks in the pool. Without it, no kernel that limits them is chosen.",
    )
    fit_ = commands.add_parser(
        "fit",
        prog="python -m pagedkv.fit",
        help="Show whether a hybrid fits its GPUs, and what to set (python -m pagedkv.fit).",
        description=_FIT,
        epilog=_EPILOG,
    )
    fit_.add_argument("model", type=Path, metavar="MODEL", help="config.json, or the folder that holds it")
    add = fit_.add_argument
    add("--arch", default=ANY, metavar="NAME", help="Architecture of the GPUs, such as gfx1201 (default: any).")
    add("--gpu", metavar="NAME", help=f"GPU model: {', '.join(GPUS)} (default: the first of the architecture).")
    _add_deployment(fit_)
    add("--memory", type=float, metavar="GIB", help="Memory of one GPU (default: that of the GPU model).")
    add(
        "--gpu-memory-utilization",
        dest="utilization",
        type=float,
        default=UTILIZATION,
        metavar="SHARE",
        help=f"Share of the memory that vLLM may use (default: {UTILIZATION}, as in vLLM).",
    )
    add(
        "--weights",
        type=float,
        metavar="GIB",
        help="Weights of the whole model (default: size of its safetensors files).",
    )
    add(
        "--reserve",
        type=float,
        default=4.0,
        metavar="GIB",
        help="Memory of a GPU for activations and graphs (default: 4).",
    )
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="Most sequences at once (default: as in vLLM, 1024 from 70 GiB on and 256 below).",
    )
    add("--drafts", type=int, default=0, metavar="N", help="Tokens drafted in a step (default: 0).")
    add(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        help="Whether vLLM has a prefix cache (default: as in vLLM, if any layer has attention).",
    )
    return parser.parse_args(arguments)


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--with",
        dest="providers",
        default="aiter,vllm",
        metavar="NAMES",
        help="Other kernels that are installed: aiter,vllm (default), one of them, or none.",
    )
    add("--tp", type=int, default=1, metavar="N", help="Tensor-parallel ranks (default: 1).")
    add("--dtype", choices=list(ELEMENT_BYTES), help="Type of the model (default: from its config).")
    add("--ssm-dtype", choices=list(ELEMENT_BYTES), help="Type of the recurrent states (default: from the config).")
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=ENGINE_DTYPES,
        help="Type of the KV cache (default: auto, the type of the model).",
    )
    add(
        "--kv-scales",
        default="tensor",
        choices=get_args(KvScales)[1:],
        help="What has a scale of its own in an fp8 cache (default: tensor).",
    )
    add(
        "--block-size",
        type=int,
        default=16,
        metavar="N",
        help="Tokens of a cache block; a hybrid gets at least what its state needs (default: 16).",
    )
    add(
        "--layout",
        default="rows",
        metavar="PACKING[:SIDES]",
        help=f"Packing of the cache ({', '.join(PACKINGS)}), with :planes or :interleaved (default: rows).",
    )
    add(
        "--max-model-len",
        dest="max_seq_len",
        type=int,
        metavar="N",
        help="Longest sequence in tokens (default: from the config).",
    )
    add("--json", action="store_true", help="Print JSON, with every mismatch.")


def _service(options: argparse.Namespace) -> Budget:
    options.arch, gpu, memory = gpu_of(options.arch, options.gpu, options.memory)
    weights = weights_of(options.model) if options.weights is None else options.weights
    if weights is None:
        raise MisuseError(
            f"--weights: {options.model} holds no safetensors files; give the GiB of the model's weights."
        )
    for option, amount in (("--memory", memory), ("--weights", weights)):
        if not 0 < amount < math.inf:
            raise MisuseError(f"{option}: got {amount}; expected more than 0 GiB.")
    if not 0 <= options.reserve < math.inf:
        raise MisuseError(f"--reserve: got {options.reserve}; expected at least 0 GiB.")
    if not 0 < options.utilization <= 1:
        raise MisuseError(f"--gpu-memory-utilization: got {options.utilization}; expected more than 0, at most 1.")
    return Budget(
        gpu=gpu,
        memory=memory,
        weights=weights,
        utilization=options.utilization,
        reserve=options.reserve,
        prefix_cache=options.prefix_cache,
        max_num_seqs=options.max_num_seqs,
    )


def _deployment(options: argparse.Namespace) -> Deployment:
    packing, _, sides = options.layout.partition(":")
    if packing not in PACKINGS or (":" in options.layout and sides not in get_args(Sides)):
        raise MisuseError(
            f"--layout: got {options.layout}; expected {', '.join(PACKINGS)}, "
            f"alone or with :{' or :'.join(get_args(Sides))}."
        )
    others = [] if options.providers == "none" else options.providers.split(",")
    if unknown := [name for name in others if name not in PROVIDERS]:
        raise MisuseError(f"--with: got {', '.join(unknown)}; expected some of {', '.join(PROVIDERS)}, or none.")
    for option in ("tp", "block_size", "max_num_seqs", "max_seq_len"):
        count = getattr(options, option)
        if count is not None and count < 1:
            name = {"max_seq_len": "max_model_len"}.get(option, option).replace("_", "-")
            raise MisuseError(f"--{name}: got {count}; expected at least 1.")
    if getattr(options, "drafts", 0) < 0:
        raise MisuseError(f"--drafts: got {options.drafts}; expected at least 0.")
    chosen = {field.name: getattr(options, field.name) for field in fields(Deployment) if hasattr(options, field.name)}
    if chosen["max_num_seqs"] is None:
        del chosen["max_num_seqs"]
    chosen |= {"providers": tuple(dict.fromkeys(("pagedkv", *others))), "packing": packing, "sides": sides or None}
    return Deployment(**chosen)


if __name__ == "__main__":
    sys.exit(main())
