# SPDX-License-Identifier: Apache-2.0
"""`python -m pagedkv.routing explain`: which kernel serves each attention layer of a model, and why not the others."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pagedkv.arch import ARCHES
from pagedkv.errors import Exit, MisuseError, run_command
from pagedkv.layout import PACKINGS

from .candidates import PROVIDERS
from .explain import ENGINE_DTYPES, Deployment, as_data, explain, format_text
from .model_config import read_config
from .request import ELEMENT_BYTES, KvScales, Phase, Sides

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG = """\
exit status: 0 every attention layer is served; 1 one is not; 2 misuse; 3 the config (or the data about a kernel) cannot
be read.
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
    explanation = explain(read_config(options.model), _deployment(options))
    sys.stdout.write(json.dumps(as_data(explanation), indent=1) + "\n" if options.json else format_text(explanation))
    return Exit.PASS if explanation.served else Exit.FAIL


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.routing", description=__doc__, epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    explain_ = commands.add_parser(
        "explain", help="the routes of a model's layers", description=__doc__, epilog=_EPILOG
    )
    add = explain_.add_argument
    add("--model", type=Path, required=True, metavar="PATH", help="config.json, or the folder that holds it")
    add("--arch", required=True, choices=list(ARCHES), help="GPU architecture of the agents")
    add(
        "--with",
        dest="providers",
        default="aiter,vllm",
        metavar="NAMES",
        help="installed beside ours: aiter,vllm (default), one of them, or none",
    )
    add("--phase", default="mixed", choices=get_args(Phase), help="default: mixed, which is all of them")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share a layer; default: 1")
    add("--dtype", choices=list(ELEMENT_BYTES), help="default: the config's")
    add("--ssm-dtype", choices=list(ELEMENT_BYTES), help="of recurrent states; default: the config's")
    add("--kv-cache-dtype", default="auto", choices=ENGINE_DTYPES, help="default: auto, the model's")
    add("--kv-scales", default="tensor", choices=get_args(KvScales)[1:], help="of an fp8 cache; default: tensor")
    add(
        "--block-size",
        type=int,
        default=16,
        metavar="N",
        help="tokens; a hybrid gets what its state needs; default: 16",
    )
    add(
        "--layout",
        default="rows",
        metavar="PACKING[:SIDES]",
        help=f"{', '.join(PACKINGS)}, with :planes or :interleaved; default: rows, and the sides that the model needs",
    )
    add("--q-len", type=int, default=1, metavar="N", help="query tokens of a decode step; default: 1")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="default: 256")
    add("--max-model-len", dest="max_seq_len", type=int, metavar="N", help="tokens; default: the config's")
    add("--num-blocks", type=int, metavar="N", help="of the pool; a kernel with a limit on it is not chosen without")
    add("--json", action="store_true", help="the same as JSON, with every mismatch")
    return parser.parse_args(arguments)


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
    for option, count in (("--tp", options.tp), ("--block-size", options.block_size)):
        if count < 1:
            raise MisuseError(f"{option}: got {count}; expected at least 1.")
    chosen = {field.name: getattr(options, field.name, None) for field in fields(Deployment)}
    chosen |= {"providers": tuple(dict.fromkeys(("pagedkv", *others))), "packing": packing, "sides": sides or None}
    return Deployment(**chosen)


if __name__ == "__main__":
    sys.exit(main())
