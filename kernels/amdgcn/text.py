# SPDX-License-Identifier: Apache-2.0
"""Read the AMDGCN text of one Triton kernel: instructions with operands and Python lines, basic blocks, descriptor.

Triton makes the code object from this very text, so the text is the program. Whatever line is neither a known
directive nor an instruction of which every word is understood is an error that names it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from . import gfx12
from .errors import UnreadableTextError
from .targets import EXEC, TARGETS, Target

Kind = Literal["v", "s", "literal", "label", "off", "scc"]


@dataclass(frozen=True)
class Operand:
    """One operand. Accumulation registers are vector registers from 256 on, as the hardware numbers them."""

    kind: Kind
    number: int = 0
    """Number of the first register."""
    count: int = 1
    """Registers."""
    constant: int | float | str = 0
    """Value of a literal; the name of a label."""
    negated: bool = False
    absolute: bool = False
    extended: bool = False
    """`sext(...)`: an SDWA part is read with its sign."""

    @property
    def register(self) -> int:
        """Number of the first register.

        Raises:
            ValueError: It is no register, so a caller that forgot literals is refused and not given register 0.
        """
        if self.kind not in {"v", "s"}:
            raise ValueError(f"the operand {self.constant or self.kind!r} is no register")
        return self.number

    @property
    def value(self) -> int | float | str:
        """Value of a literal, or the name of a label.

        Raises:
            ValueError: It is neither.
        """
        if self.kind not in {"literal", "label"}:
            raise ValueError(f"the operand {self.kind}{self.number} is no literal")
        return self.constant

    def registers(self) -> list[tuple[str, int]]:
        """Every register as (kind, number)."""
        return [(self.kind, self.number + k) for k in range(self.count)] if self.kind in {"v", "s"} else []


@dataclass(frozen=True)
class Instruction:
    """One instruction of the text."""

    index: int
    mnemonic: str
    """Without `_e32`, `_e64`, `_dpp`, `_sdwa`."""
    encoding: str
    """What was taken off: e32, e64, dpp, sdwa or nothing."""
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    """Flags have an empty value."""
    source: str
    """`file.py:line`; `?` before the first `.loc`."""
    text: str
    target: Target
    paired: bool = False
    """Whether it is the second of two that run at once (`v_dual_`): it reads what was before the first."""

    def __str__(self) -> str:
        return f"{' '.join(self.text.split())}  ({self.source})"

    @property
    def to_lds(self) -> bool:
        """Whether it is a load whose words go to LDS and not to registers."""
        return "lds" in self.modifiers or "_load_lds_" in self.mnemonic

    @property
    def returns(self) -> bool:
        """Whether it is an atomic that returns what was in memory."""
        returned = self.modifiers.keys() & {"sc0", "glc"} or self.modifiers.get("th") == "TH_ATOMIC_RETURN"
        return "_atomic_" in self.mnemonic and bool(returned)

    def flag(self, name: str) -> bool:
        """Whether a modifier without a value is there."""
        return name in self.modifiers

    def number(self, name: str, default: int = 0) -> int:
        """A modifier's number."""
        return int(self.modifiers[name], 0) if name in self.modifiers else default

    def numbers(self, name: str, default: list[int]) -> list[int]:
        """A modifier's list of numbers, as of `op_sel:[0,1]`."""
        text = self.modifiers.get(name)
        return default if text is None else [int(each) for each in text.strip("[]").split(",")]


@dataclass
class Block:
    """Instructions that run one after the other: entered at the top, left at the bottom."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Program:
    """One kernel."""

    name: str
    target: Target
    blocks: list[Block]
    descriptor: dict[str, int]
    """The `.amdhsa_` directives without their prefix."""
    arguments: list[tuple[int, int]]
    """(offset, size) of each kernel argument in the kernarg segment."""
    instructions: list[Instruction]
    hidden: dict[str, tuple[int, int]]
    """Offsets of what the runtime adds: hidden_block_count_x and the like."""

    def successors(self, block: int) -> list[int]:
        """Blocks that may run after this one."""
        instructions = self.blocks[block].instructions
        last = instructions[-1] if instructions else None
        if last is None or not last.mnemonic.startswith(("s_branch", "s_cbranch", "s_endpgm")):
            return [block + 1]
        if last.mnemonic == "s_endpgm":
            return []
        target = self.block_of(last.operands[0])
        return [target] if last.mnemonic == "s_branch" else [block + 1, target]

    def block_of(self, label: Operand) -> int:
        """Index of the block that a branch names."""
        return next(k for k, block in enumerate(self.blocks) if block.label == label.value)


_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"-?\d*\.\d+(?:e[-+]?\d+)?")
_WORD = re.compile(r"(?:[^\s\[\(]|\[[^\]]*\]|\([^\)]*\))+")
_VALUED = re.compile(
    r"(offset[01]?|op_sel(?:_hi)?|neg_(?:lo|hi)|row_(?:shl|shr|ror|bcast|mask|newbcast)|wave_sh[lr]|quad_perm|bank_mask|bound_ctrl"
    r"|dst_sel|src[01]_sel|dst_unused|bitop3):(.+)"
)
_CACHE = re.compile(r"(th|scope):(\w+)")
"""gfx12's words for the cache policy, and for an atomic that returns."""
_FLAGS = {"offen", "lds", "sc0", "sc1", "nt", "glc", "slc", "clamp", "row_mirror", "row_half_mirror"}
_COUNTERS = re.compile(r"\s*(?:&\s*)?(vmcnt|lgkmcnt|expcnt)\((\d+)\)")
_ENDS_BLOCK = re.compile(r"s_(?:c?branch\w*|endpgm|barrier)")
_LABEL = re.compile(r"(\.LBB\d+_\d+):")
_SYMBOL = re.compile(r"([A-Za-z_]\w*):")
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+")
_DIRECTIVE = re.compile(r"\.amdhsa_(\w+)\s+(-?\d+)$")
_TARGET = re.compile(r'\.amdgcn_target\s+"[^"]*--(gfx\w+)')
_MNEMONIC = re.compile(r"([a-z][a-z0-9_]*)(?:\s+(.*))?$")
_ARGUMENT = re.compile(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)")
_IGNORED = (
    ".amdhsa_code_object_version",
    ".text",
    ".globl",
    ".p2align",
    ".type",
    ".size",
    ".cfi_",
    ".Lfunc_",
    ".Ltmp",
    ".section",
    ".amdhsa_kernel",
    ".protected",
    ".ident",
)


def parse(text: str) -> Program:
    """Read what Triton keeps as `asm["amdgcn"]`.

    Raises:
        UnreadableTextError: A line before the end of the kernel's descriptor is not understood, or nothing is there.
    """
    blocks, instructions = [Block("entry")], list[Instruction]()
    files, descriptor = dict[str, str](), dict[str, int]()
    source, name, target, ended = "?", "", None, False
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split(";", maxsplit=1)[0].strip()
        if not code or code.startswith(_IGNORED):
            continue
        if found := _LABEL.fullmatch(code):
            blocks.append(Block(found[1]))
        elif found := _SYMBOL.fullmatch(code):
            name = found[1]
        elif found := _TARGET.match(code):
            if found[1] not in TARGETS:
                raise UnreadableTextError(number, line, f"the arch is none of {', '.join(TARGETS)}")
            target = TARGETS[found[1]]
        elif found := _FILE.match(code):
            files[found[1]] = found[2]
        elif found := _LOC.match(code):
            source = f"{files.get(found[1], '?')}:{found[2]}"
        elif found := _DIRECTIVE.match(code):
            descriptor[found[1]] = int(found[2])
        elif code.startswith(".end_amdhsa_kernel"):
            ended = True
            break
        elif code.startswith("."):
            raise UnreadableTextError(number, line, "unknown directive")
        else:
            if target is None:
                raise UnreadableTextError(number, line, "an instruction before the arch is named")
            try:
                read = _instructions(code, target)
            except ValueError as error:
                raise UnreadableTextError(number, line, str(error)) from error
            for each in read:
                instruction = dataclasses.replace(each, index=len(instructions), source=source)
                instructions.append(instruction)
                blocks[-1].instructions.append(instruction)
            if _ENDS_BLOCK.fullmatch(instruction.mnemonic):
                blocks.append(Block(""))
    if not instructions or not ended or target is None:
        raise UnreadableTextError(0, name, "the text holds no whole kernel")
    _, _, note = text.partition(".amdgpu_metadata")
    arguments = [(int(offset), int(size), kind) for offset, size, kind in _ARGUMENT.findall(note)]
    hidden = {kind: (offset, size) for offset, size, kind in arguments if kind.startswith("hidden_")}
    own = [(offset, size) for offset, size, kind in arguments if kind not in hidden]
    kept = [block for block in blocks if block.instructions or block.label]
    return Program(name, target, kept, descriptor, own, instructions, hidden)


@lru_cache(maxsize=1 << 16)
def _instructions(code: str, target: Target) -> tuple[Instruction, ...]:
    """The instruction of a line, or the two."""
    parts = gfx12.halves(code) if target.gfx12 else [code]
    first, *second = (_instruction(part, code, target) for part in parts)
    return (first, *(dataclasses.replace(each, paired=True) for each in second))


def _instruction(alone: str, code: str, target: Target) -> Instruction:
    """An instruction of a line, which may have another one."""
    found = _MNEMONIC.match(alone)
    if not found:
        raise ValueError("no instruction")
    mnemonic, rest = found[1], found[2] or ""
    if mnemonic == "s_waitcnt":
        counters = dict(_COUNTERS.findall(rest))
        if _COUNTERS.sub("", rest).strip():
            raise ValueError("a counter is not known")
        return Instruction(0, mnemonic, "", (), counters, "?", code, target)
    if target.gfx12 and (counted := gfx12.counts(mnemonic, rest)):
        return Instruction(0, "s_waitcnt", "", (), counted, "?", code, target)
    if target.gfx12 and (mnemonic in gfx12.HINTS or alone == "s_sendmsg sendmsg(MSG_DEALLOC_VGPRS)"):
        return Instruction(0, mnemonic, "", (), {}, "?", code, target)
    operands: list[Operand] = []
    modifiers: dict[str, str] = {}
    for part in _split(rest):
        for position, word in enumerate(_WORD.findall(part)):
            if word in _FLAGS:
                modifiers[word] = ""
            elif valued := (_VALUED.fullmatch(word) or (target.gfx12 and _CACHE.fullmatch(word))):
                modifiers[valued[1]] = valued[2]
            elif position:
                raise ValueError(f"the modifier {word!r} is not known")
            else:
                operands.append(_operand(word, target))
    base, _, encoding = mnemonic.rpartition("_")
    if encoding not in {"e32", "e64", "dpp", "sdwa"}:
        base, encoding = mnemonic, ""
    if target.gfx12:
        base = gfx12.renamed(base.removesuffix("_e64"))  # of `_e64_dpp`
        if base.startswith("v_cmpx_"):  # a comparison into exec, which its text does not name
            base = base.replace("_cmpx_", "_cmp_")
            operands.insert(0, Operand("s", EXEC))
    return Instruction(0, base, encoding, tuple(operands), modifiers, "?", code, target)


def _split(text: str) -> list[str]:
    """Cut at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for k, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(text[start:k])
            start = k + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _operand(word: str, target: Target) -> Operand:
    if word.startswith("sext("):
        return dataclasses.replace(_operand(word[5:-1], target), extended=True)
    if word.startswith("-") and not (_INTEGER.fullmatch(word) or _FLOAT.fullmatch(word)):
        return dataclasses.replace(_operand(word[1:], target), negated=True)
    if word.startswith("neg("):
        return dataclasses.replace(_operand(word[4:-1], target), negated=True)
    if word.startswith("|"):
        return dataclasses.replace(_operand(word.strip("|"), target), absolute=True)
    if found := _REGISTER.fullmatch(word):
        first = int(found[2] or found[3])
        count = int(found[4]) - first + 1 if found[4] else 1
        return Operand("s" if found[1] == "s" else "v", first + 256 * (found[1] == "a"), count)
    if word in target.names:
        return Operand("s", *target.names[word])
    if word == "null" and target.gfx12:  # reads as 0, and what is written there is lost
        return Operand("literal", constant=0)
    if word in {"scc", "src_scc"}:
        return Operand("scc")
    if word == "off":
        return Operand("off")
    if word.startswith(".LBB"):
        return Operand("label", constant=word)
    if _INTEGER.fullmatch(word):
        return Operand("literal", constant=int(word, 0))
    if _FLOAT.fullmatch(word):
        return Operand("literal", constant=float(word))
    raise ValueError(f"the operand {word!r} is not known")
