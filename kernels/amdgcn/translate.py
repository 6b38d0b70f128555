# SPDX-License-Identifier: Apache-2.0
"""Translate each block of AMDGCN text into one Python function over all waves at it.

The function binds `V`, `S` (registers), `E` (lanes that are on, None for all), `n` (waves) and `scc`, runs its
instructions one after the other on NumPy arrays and says where to go on: a block's index, None at the end, or
(condition of each wave, instruction, block where it holds, block where not).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import arithmetic, matrix, permute, waves
from .effects import effects
from .errors import UnknownInstructionError
from .gfx12 import HINTS
from .meaning import ATOMICS, COMPARE, COMPARED, LOGIC, MNEMONICS, PACKED, SCALAR, SCALAR_COMPARE, VECTOR, WIDTHS
from .targets import EXEC, VCC
from .text import Operand
from .waits import waited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType

    from .arithmetic import Array
    from .text import Instruction, Program

Following = int | None | tuple["Array", int, int, int]

_NAMES: dict[str, Any] = {
    "np": np,
    "merge": waves.merge,
    "both": waves.both,
    "elements": matrix.elements,
    "multiply": matrix.multiply,
    "swap_halves": permute.swap_halves,
    "swap_rows": permute.swap_rows,
    "swizzle": permute.swizzle,
    "gather": permute.gather,
    "scatter": permute.scatter,
    "across_rows": permute.across_rows,
} | {name: each for name, each in vars(arithmetic).items() if not name.startswith("_")}

_NOTHING = {"s_nop", "v_nop", "s_endpgm", "s_barrier", "s_branch", "s_setprio", "s_sleep", "buffer_wbl2", "buffer_inv"}
_NOTHING |= HINTS | {"s_sendmsg"}
_NO_EFFECT = {"sc0", "sc1", "nt", "glc", "slc", "expcnt", "th", "scope"}
"""Modifiers that change no value here: cache policy, and a counter that no known instruction raises."""
_OWN = ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32", "scratch_")
"""They meet no memory of other waves."""


class _Kind(NamedTuple):
    """A type of operands: its width, and the alias of its numpy type in generated code."""

    bits: int
    numpy: str
    signed: bool = False
    floating: bool = False


_KINDS = {
    "u": _Kind(32, "U"),
    "i": _Kind(32, "I", signed=True),
    "f": _Kind(32, "F", floating=True),
    "w": _Kind(16, "W16"),
    "k": _Kind(16, "S16", signed=True),
    "h": _Kind(16, "H", floating=True),
    "Q": _Kind(64, "Q"),
    "L": _Kind(64, "L", signed=True),
}
"""The types under the letters that `meaning.py` gives them."""

_BRANCHES = {"scc0": "~scc", "scc1": "scc"}
_MASKS = {"vccz": (VCC, "=="), "vccnz": (VCC, "!="), "execz": (EXEC, "=="), "execnz": (EXEC, "!=")}


@dataclass
class Translated:
    """A program that can run."""

    program: Program
    vectors: list[bool]
    """Which vector registers it uses, accumulation registers from 256 on."""
    scalars: list[bool]
    lds_element: int
    """Bytes of its smallest LDS access, at most 4: how finely races are looked for."""
    functions: list[Callable[[waves.Waves], Following]] = field(default_factory=list)
    source: str = ""
    """The generated Python."""

    def run(self, block: int, group: waves.Waves) -> Following:
        """Run a block for a group."""
        return self.functions[block](group)


def translate(program: Program) -> Translated:
    """Make a program executable.

    Args:
        program: As read.

    Raises:
        UnknownInstructionError: An instruction, or a form of it, whose meaning is not written down.
    """
    _check_barriers(program)
    writer = _Writer(program)
    sources = []
    for index, block in enumerate(program.blocks):
        lines = [f"def block{index}(g):", "    V, S, E, n, scc = g.V, g.S, g.E, g.n, g.scc"]
        written = ""
        for instruction, following in zip_longest(block.instructions, block.instructions[1:]):
            effects(instruction)
            own = writer.instruction(instruction)
            if instruction.paired:  # it does not see what the first of the pair has just written
                own = [f"after = {written}; {written} = before", *own, f"{written} = after"]
            if following and following.paired:
                written = f"V[{instruction.operands[0].register}]"
                own = [f"before = {written}", *own]
            lines += [f"    {line}" for line in own]
        lines += ["    g.E, g.scc = E, scc", f"    {_leave(program, index)}"]
        sources.append("\n".join(lines) + "\n")
    names = _NAMES | writer.constants | {"lanes": program.target.lanes}
    for function in sources:
        exec(_compiled(function, program.name), names)  # noqa: S102 - our own text, from instructions we know
    vectors, scalars = _used(program)
    sizes = {8 * size: size for size in (1, 2, 4)}
    smallest = min((sizes[int(bits)] for bits in _lds_bits(program)), default=4)
    functions = [names[f"block{index}"] for index in range(len(program.blocks))]
    return Translated(program, vectors, scalars, smallest, functions, "".join(sources))


@lru_cache(512)
def _compiled(text: str, name: str) -> CodeType:
    """A block's code: of a program with a planted fault, all but one are those of the program without."""
    return compile(text, f"<{name}>", "exec")


def _lds_bits(program: Program) -> list[str]:
    found = (re.match(r"ds_(?:read|write)\w*?_[biu](8|16)\b", each.mnemonic) for each in program.instructions)
    short = (re.match(r"ds_(?:read|write)_[biu](8|16)_d16", each.mnemonic) for each in program.instructions)
    return [each[1] for each in (*found, *short) if each]


def _used(program: Program) -> tuple[list[bool], list[bool]]:
    used = {register for each in program.instructions for operand in each.operands for register in operand.registers()}
    always = {0, 1, *range(program.descriptor.get("user_sgpr_count", 0) + 4)}
    always |= {first + k for first, count in program.target.names.values() for k in range(count)}
    scalars = always | {number for kind, number in used if kind == "s"}
    vectors = {0} | {number for kind, number in used if kind == "v"}
    return [k in vectors for k in range(512)], [k in scalars for k in range(128)]


def _leave(program: Program, index: int) -> str:
    instructions = program.blocks[index].instructions
    last = instructions[-1] if instructions else None
    if last is None:
        return f"return {index + 1}"
    if last.mnemonic == "s_endpgm":
        return "return None"
    if last.mnemonic == "s_branch":
        return f"return {program.block_of(last.operands[0])}"
    if last.mnemonic.startswith("s_cbranch_"):
        kind = last.mnemonic.removeprefix("s_cbranch_")
        condition = _BRANCHES.get(kind)
        if condition is None:
            register, compared = _MASKS[kind]
            words = " | ".join(f"S[{register + k}]" for k in range(program.target.words))
            condition = f"({words}) {compared} 0"
        return f"return ({condition}, {last.index}, {program.block_of(last.operands[0])}, {index + 1})"
    waits = "g.waiting = True; " if last.mnemonic == "s_barrier" else ""
    return f"{waits}return {index + 1}"


def _check_barriers(program: Program) -> None:
    """Refuse accesses and branches between a wave's signal and its wait for the others, which make one barrier here."""
    for block in program.blocks:
        signal = None
        for inst in block.instructions:
            if signal:
                accesses = effects(inst).counter and not inst.mnemonic.startswith(_OWN)
                if accesses or re.match(r"s_(c?branch|endpgm|barrier_signal)", inst.mnemonic):
                    raise UnknownInstructionError(signal.text, f"{inst.text!r} stands between it and its wait")
            if inst.mnemonic in {"s_barrier_signal", "s_barrier"}:
                signal = inst if inst.mnemonic == "s_barrier_signal" else None
        if signal:
            raise UnknownInstructionError(signal.text, "its wait is in another block")


class _Modifiers(dict[str, str]):
    """Modifiers of an instruction, and which of them have been looked up."""

    def __init__(self, modifiers: Mapping[str, str]) -> None:
        sdwa = {name for name in modifiers if name.endswith("_sel") and modifiers[name] == "DWORD"}
        whole = sdwa | ({"dst_unused"} if "dst_sel" in sdwa else set())  # a whole register is what it is without them
        super().__init__({name: value for name, value in modifiers.items() if name not in whole})
        self.asked: set[object] = set()

    def __contains__(self, name: object) -> bool:
        self.asked.add(name)
        return super().__contains__(name)

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as a dictionary does, and note that it was asked for."""
        self.asked.add(name)
        return super().get(name, default)

    def unread(self) -> list[str]:
        """Modifiers that were not asked for and that might change a value."""
        return sorted(set(self) - self.asked - _NO_EFFECT)


class _Writer:
    """Writes the Python of each instruction."""

    def __init__(self, program: Program) -> None:
        self.target = program.target
        self.whole = f"(n, {self.target.lanes})"
        self.constants: dict[str, Any] = {}

    def instruction(self, inst: Instruction) -> list[str]:
        """Write an instruction.

        Raises:
            UnknownInstructionError: Its mnemonic, a form of it or one of its modifiers is not known. A modifier that no
                code here asked for is not known: what is written in the text and not read would be dropped in silence.
        """
        modifiers = _Modifiers(inst.modifiers)
        lines = self._lines(replace(inst, modifiers=modifiers))
        if unread := modifiers.unread():
            raise UnknownInstructionError(inst.text, f"nothing here reads {', '.join(unread)}")
        return lines

    def _lines(self, inst: Instruction) -> list[str]:
        name = inst.mnemonic
        if name not in MNEMONICS:
            raise UnknownInstructionError(inst.text)
        if name in _NOTHING or name.startswith("s_cbranch_"):
            return []
        if not name.startswith("v_") and any(each.negated or each.absolute for each in inst.operands):
            raise UnknownInstructionError(inst.text, "a sign modifier")
        try:
            if name == "s_waitcnt":
                return [f"g.wait({waited(inst)})"]
            if name == "s_barrier_signal":
                return ["g.signal()"]
            if name == "global_inv":  # counts as a load
                return ["g.issue('vm', (), (), None)"]
            if name.startswith(("s_", "v_s_")):
                return self._scalar(inst)
            if name.startswith(("global_", "buffer_")):
                return self._global(inst)
            if name.startswith("scratch_"):
                return self._scratch(inst)
            if name.startswith("ds_"):
                return self._lds(inst)
            if name.startswith(("v_mfma_", "v_wmma_")):
                return self._matrix(inst)
            return self._vector(inst)
        except (KeyError, IndexError, ValueError, NotImplementedError) as error:
            if isinstance(error, UnknownInstructionError):
                raise
            raise UnknownInstructionError(inst.text, f"this form is not known ({error!r})") from error

    def _constant(self, value: Any) -> str:
        name = f"_c{len(self.constants)}"
        self.constants[name] = value
        return name

    # Operands

    @staticmethod
    def _number(value: Any) -> str:
        """The float32 whose bits a constant is: `1` is the smallest denormal and `1.0` is one."""
        return repr(float(value if isinstance(value, float) else np.uint32(int(value) & 0xFFFFFFFF).view(np.float32)))

    @staticmethod
    def _literal(value: Any, kind: str) -> str:
        bits, numpy, signed, floating = _KINDS[kind]
        if isinstance(value, float):
            if bits == 64:
                raise ValueError("a float in 64 bits")
            if floating:
                return f"{numpy}({value!r})"
            value = int(np.float32(value).view(np.uint32))
        if kind == "f":
            return f"U({value & 0xFFFFFFFF}).view(F)"
        if kind == "h":
            return f"W16({value & 0xFFFF}).view(H)"
        value &= (1 << bits) - 1
        if signed and value >> (bits - 1):
            value -= 1 << bits
        return f"{numpy}({value})"

    def _read(self, operand: Operand, kind: str, inst: Instruction, source: int | None = None, word: int = 0) -> str:
        """An operand as an expression of a type.

        Args:
            operand: What to read.
            kind: The type, as in meaning.py.
            inst: The instruction.
            source: Its number among the sources, for SDWA and DPP.
            word: 1 for the upper half of a register.
        """
        if operand.kind == "literal":
            value = operand.value
            if word and isinstance(value, float):  # a float constant fills 32 bits, as float16 only the lower 16
                value = 0 if kind == "h" else int(np.float32(value).view(np.uint32))
            text = self._literal(int(value) >> 16 if word else value, kind)
        elif operand.kind == "scc":
            text = "scc[:, None].astype(U)"
        elif operand.kind in "vs":
            text = self._register(operand, 0)
            if _KINDS[kind].bits == 64:
                text = f"pair({text}, {self._register(operand, 1)})" + (".view(L)" if kind == "L" else "")
            else:
                part = inst.modifiers.get(f"src{source}_sel", "DWORD") if inst.encoding == "sdwa" else "DWORD"
                if part != "DWORD":
                    text = f"select({text}, {part!r}, {operand.extended})"
                if inst.encoding == "dpp" and source == 0:
                    text = "moved"
                if word:
                    text = f"({text} >> U(16))"
                views = {"u": "{}", "i": "{}.view(I)", "f": "{}.view(F)", "h": "half({})", "w": "{}.astype(W16)"}
                text = (views | {"k": "{}.astype(W16).view(S16)"})[kind].format(text)
        else:
            raise UnknownInstructionError(inst.text, f"an operand of kind {operand.kind!r}")
        if (operand.absolute or operand.negated) and kind not in "fhu":
            raise UnknownInstructionError(inst.text, f"a sign modifier on {kind}")
        if kind == "u":  # v_cndmask takes them as a float's, on the bits
            text = f"({text} & U(0x7FFFFFFF))" if operand.absolute else text
            return f"({text} ^ U(0x80000000))" if operand.negated else text
        text = f"np.abs({text})" if operand.absolute else text
        return f"(-{text})" if operand.negated else text

    @staticmethod
    def _register(operand: Operand, k: int) -> str:
        number = operand.register + k
        return f"V[{number}]" if operand.kind == "v" else f"S[{number}][:, None]"

    @staticmethod
    def _vector_register(operand: Operand) -> str:
        if operand.kind != "v":
            raise ValueError(f"an operand of kind {operand.kind!r}")
        return f"V[{operand.register}]"

    def _scalar_read(self, operand: Operand, kind: str = "u") -> str:
        if operand.kind == "literal":
            return self._literal(operand.value, kind)
        if operand.kind == "scc":
            return "scc.astype(U)"
        if operand.kind != "s":
            raise ValueError(f"an operand of kind {operand.kind!r}")
        text = f"S[{operand.register}]"
        if _KINDS[kind].bits == 64:
            return f"pair({text}, S[{operand.register + 1}])" + (".view(L)" if kind == "L" else "")
        text = {"u": "{}", "i": "{}.view(I)", "f": "{}.view(F)", "h": "half({})"}[kind].format(text)
        text = f"np.abs({text})" if operand.absolute else text
        return f"(-{text})" if operand.negated else text

    @staticmethod
    def _half(operand: Operand, k: int) -> str:
        """One register of a 64-bit scalar."""
        if operand.kind == "literal":
            if isinstance(operand.value, float):
                raise ValueError("a float in 64 bits")
            return f"U({(int(operand.value) >> (32 * k)) & 0xFFFFFFFF})"
        return f"S[{operand.register + k}]"

    def _mask(self, operand: Operand) -> str:
        if operand.kind == "literal":
            return f"np.full({self.whole}, {bool(operand.value)})"
        return f"g.mask({operand.register})"

    def _put(self, target: Operand, text: str, kind: str, inst: Instruction, lanes: str = "E") -> list[str]:
        """Lines that write a vector result."""
        number = target.register
        if inst.flag("clamp"):
            if kind != "f":
                raise UnknownInstructionError(inst.text, "clamp")
            text = f"clamp({text})"
        if _KINDS[kind].bits == 64:
            view = ".view(Q)" if kind == "L" else ""
            return [
                f"r = np.broadcast_to({text}, {self.whole}){view}",
                f"V[{number}] = merge({lanes}, low(r), V[{number}])",
                f"V[{number + 1}] = merge({lanes}, high(r), V[{number + 1}])",
            ]
        casts = {"u": "{}", "i": "({}).view(U)", "f": "({}).view(U)", "h": "half_bits({})", "w": "({}).astype(U)"}
        text = casts[kind].format(text)
        if inst.encoding == "sdwa" and inst.modifiers.get("dst_sel", "DWORD") != "DWORD":
            unused = inst.modifiers.get("dst_unused")
            text = f"place({text}, {inst.modifiers['dst_sel']!r}, {unused!r}, V[{number}])"
        if self.target.gfx12 and kind in "hw":
            text = f"place({text}, 'WORD_0', 'UNUSED_PRESERVE', V[{number}])"
        if not any(each.kind == "v" for each in inst.operands[1:]):
            text = f"np.broadcast_to({text}, {self.whole})"
        return [f"V[{number}] = merge({lanes}, {text}, V[{number}])"]

    def _put_mask(self, target: Operand, lanes: str) -> str:
        """Text that writes `c` into a mask; none for gfx12's `null`."""
        if self.target.gfx12 and target.kind == "literal":
            return ""
        return f"g.set_mask({target.register}, c, {lanes})"

    @staticmethod
    def _put_two(target: Operand, first: str, second: str) -> str:
        number = target.register
        lines = (f"V[{number + k}] = merge(E, {text}, V[{number + k}])" for k, text in enumerate((first, second)))
        return "; ".join(lines)

    # Scalar

    def _scalar(self, inst: Instruction) -> list[str]:
        name, operands = inst.mnemonic, inst.operands
        lines = self._scalar_lines(inst)
        to_exec = operands and operands[0].kind == "s" and operands[0].register in {EXEC, EXEC + 1}
        if (to_exec and not name.startswith(("s_cmp", "s_bitcmp"))) or "saveexec" in name:
            lines.append(f"E = g.enabled({inst.index})")
        return lines

    def _scalar_lines(self, inst: Instruction) -> list[str]:
        """Python lines for a scalar instruction."""
        name, operands = inst.mnemonic, inst.operands
        if re.fullmatch(r"s_(?:cmpk_\w+|\w+k)_i32", name):  # a signed 16-bit number, printed as 0xffe8
            number = ((int(operands[1].value) & 0xFFFF) ^ 0x8000) - 0x8000
            operands = (operands[0], replace(operands[1], constant=number))
        if found := re.fullmatch(r"s_cmpk?_(\w+)_([iuf])(32|64)", name):
            kind = {"i32": "i", "u32": "u", "u64": "Q", "f32": "f"}[found[2] + found[3]]
            a, b = (self._scalar_read(each, kind) for each in operands)
            if kind == "f":
                return [f"a = {a}; b = {b}; scc = np.broadcast_to({COMPARE[found[1]]}, n)"]
            return [f"scc = np.broadcast_to({a} {SCALAR_COMPARE[found[1]]} {b}, n)"]
        if found := re.fullmatch(r"s_bitcmp([01])_b32", name):
            a, b = map(self._scalar_read, operands)
            return [f"scc = np.broadcast_to((({a} >> ({b} & U(31))) & U(1)) == {found[1]}, n)"]
        target = operands[0]
        put, put_next = f"S[{target.register}]", f"S[{target.register + 1}]"
        if found := re.fullmatch(r"s_load_(\w+)", name):
            (size, signed), base = WIDTHS[found[1]], f"pair({self._half(operands[1], 0)}, {self._half(operands[1], 1)})"
            offset = operands[2].constant
            if operands[2].kind == "s" and self.target.gfx12:
                base, offset = f"{base} + {self._scalar_read(operands[2])}.astype(Q)", inst.number("offset")
            elif operands[2].kind != "literal":
                raise UnknownInstructionError(inst.text, "a register offset")
            targets = [("S", target.register + k) for k in range(max(1, size // 4))]
            return [
                f"r = g.scalar_load({inst.index}, {base}, {offset}, {size}, {signed})",
                f"g.issue('sm', {targets}, r, None)",
            ]
        if found := re.fullmatch(r"s_(\w+)_saveexec_b32", name):
            new = self._logic(found[1], self._half(operands[1], 0), f"S[{EXEC}]")
            return [f"p = np.broadcast_to({new}, n); {put} = S[{EXEC}]; S[{EXEC}] = p; scc = p != 0"]
        if found := re.fullmatch(r"s_(\w+)_saveexec_b64", name):
            new = ", ".join(self._logic(found[1], self._half(operands[1], k), f"S[{EXEC + k}]") for k in (0, 1))
            return [
                f"p, r = {new}",
                f"{put}, {put_next} = S[{EXEC}], S[{EXEC + 1}]",
                f"S[{EXEC}], S[{EXEC + 1}] = p, r",
                "scc = (p | r) != 0",
            ]
        if (found := re.fullmatch(r"s_(\w+)_b(32|64)", name)) and found[1] in LOGIC:
            words = [
                f"np.broadcast_to({self._logic(found[1], self._half(operands[1], k), self._half(operands[2], k))}, n)"
                for k in range(int(found[2]) // 32)
            ]
            if len(words) == 1:
                return [f"{put} = {words[0]}", f"scc = {put} != 0"]
            return [f"{put}, {put_next} = {', '.join(words)}", f"scc = ({put} | {put_next}) != 0"]
        if name == "s_bcnt1_i32_b64":
            counts = (f"count_bits(np.broadcast_to({self._half(operands[1], k)}, n))" for k in (0, 1))
            return [f"{put} = {' + '.join(counts)}", f"scc = {put} != 0"]
        if name not in SCALAR:
            raise UnknownInstructionError(inst.text)
        kinds, text, scc = SCALAR[name]
        sources = operands if re.search("k_i32$|bitset|_mul_f16", name) else operands[1:]
        read = (
            f"{'abc'[k]} = np.broadcast_to({self._scalar_read(each, kinds[k % len(kinds)])}, n)"
            for k, each in enumerate(sources)
        )
        lines = [f"{'; '.join(read)}; r = {text}"]
        wide = f"r = r.view(Q); {put} = low(r); {put_next} = high(r)"
        return [
            *lines,
            wide if _KINDS[kinds[0]].bits == 64 else f"{put} = r.view(U)",
            *([f"scc = {scc}"] if scc else []),
        ]

    @staticmethod
    def _logic(operation: str, a: str, b: str) -> str:
        return re.sub(r"\b[ab]\b", lambda found: {"a": a, "b": b}[found[0]], LOGIC[operation])

    # Memory

    def _global(self, inst: Instruction) -> list[str]:
        """Python lines for a load, store or atomic of global memory."""
        operands = inst.operands
        if atomic := re.fullmatch(r"(global|buffer)_atomic_(\w+)", inst.mnemonic):
            return self._atomic(inst, atomic[1], *ATOMICS[atomic[2]])
        found = re.fullmatch(r"(global|buffer)_(load|store)_(?:lds_)?([a-z]+(?:x\d)?)(_d16)?(_hi)?", inst.mnemonic)
        if inst.to_lds:  # no register takes the words
            operands = (Operand("off"), *operands)
        if not found or found[3] not in WIDTHS:
            raise UnknownInstructionError(inst.text)
        size, signed = WIDTHS[found[3]]
        stores, registers = found[2] == "store", max(1, size // 4)
        if found[1] == "global":
            data, address = (operands[1], operands[0]) if stores else operands[:2]
            where, beyond = self._address(inst, address, operands[2])
        else:
            data, *rest = operands
            where, beyond = self._in_buffer(inst, *rest)
        lines, offset = [where], inst.number("offset")
        shift = " >> U(16)" if found[5] else ""
        if stores:
            values = ", ".join(f"V[{data.register + k}]{shift}" for k in range(registers))
            return [*lines, f"g.store({inst.index}, A, E, {size}, [{values}], {beyond})"]
        lines.append(f"r = g.load({inst.index}, A, E, {size}, {signed}, {beyond})")
        if inst.to_lds:
            if size not in {4, 12, 16} or found[4]:
                raise UnknownInstructionError(inst.text, "its place in LDS is not known")
            return [*lines, f"g.load_to_lds({inst.index}, {size}, {offset}, r, E)"]
        lines += self._into_half(data, upper=bool(found[5])) if found[4] else []
        targets = [("V", data.register + k) for k in range(registers)]
        return [*lines, f"g.issue('vm', {targets}, r, E)"]

    @staticmethod
    def _address(inst: Instruction, lanes: Operand, base: Operand) -> tuple[str, str]:
        """A line that binds the addresses of a global access, and which of them are beyond a range: none."""
        offset = inst.number("offset")
        address = (
            f"pair(V[{lanes.register}], V[{lanes.register + 1}])"
            if base.kind == "off"
            else f"pair(S[{base.register}], S[{base.register + 1}])[:, None] + V[{lanes.register}].astype(Q)"
        )
        return f"A = {address}" + (f" + Q({offset & (2**64 - 1)})" if offset else ""), "None"

    def _in_buffer(self, inst: Instruction, address: Operand, descriptor: Operand, scalar: Operand) -> tuple[str, str]:
        """The same of an access through a descriptor."""
        lanes = f"V[{address.register}]" if inst.flag("offen") else "None"
        added = self._scalar_read(scalar) + ("" if scalar.kind == "literal" else "[:, None]")
        return f"A, Z = g.buffer({inst.index}, {descriptor.register}, {lanes}, {added}, {inst.number('offset')})", "Z"

    def _atomic(self, inst: Instruction, where: str, kind: str, text: str) -> list[str]:
        """Read, change and write a word of memory; what was there comes back if asked for."""
        operands = inst.operands
        if where == "buffer":
            target, data = operands[0], operands[0]
            line, beyond = self._in_buffer(inst, *operands[1:])
        else:
            target = operands[0]
            address, data, base = operands[1:] if inst.returns else operands
            line, beyond = self._address(inst, address, base)
        words = [name for name in "bc" if re.search(rf"\b{name}\b", text)]
        if data.count != len(words):
            raise ValueError(f"{data.count} registers of data")
        values = ", ".join(f"V[{data.register + k}]" for k in range(data.count))
        view = {"u": "", "i": ".view(I)", "f": ".view(F)"}[kind]
        changed = re.sub(r"\b([abc])\b(?!\()", rf"\1{view}", text) if view else text
        new = f"lambda {', '.join(['a', *words])}: ({changed}).view(U)"
        lines = [line, f"r = g.atomic({inst.index}, A, E, {new}, [{values}], {beyond})"]
        into = [("V", target.register)] if inst.returns else []
        return [*lines, f"g.issue('vm', {into}, {'r' if inst.returns else '()'}, E)"]

    @staticmethod
    def _into_half(data: Operand, *, upper: bool) -> list[str]:
        """A `_d16` load fills one half of its register and keeps the other."""
        old = f"V[{data.register}]"
        if upper:
            return [f"r = [(r[0] << U(16)) | ({old} & U(0xFFFF))]"]
        return [f"r = [(r[0] & U(0xFFFF)) | ({old} & U(0xFFFF0000))]"]

    @staticmethod
    def _scratch(inst: Instruction) -> list[str]:
        found = re.fullmatch(r"scratch_(load|store)_dword(?:x(\d))?", inst.mnemonic)
        stores = bool(found) and found[1] == "store"  # type: ignore[index]
        data = inst.operands[1] if stores else inst.operands[0]
        if not found or any(each.kind != "off" for each in inst.operands if each is not data):
            raise UnknownInstructionError(inst.text)
        count, at = int(found[2] or 1), inst.number("offset")
        if stores:
            values = ", ".join(f"V[{data.register + k}]" for k in range(count))
            return [f"g.scratch_store({at}, [{values}], E)"]
        return [f"g.issue('vm', {[('V', data.register + k) for k in range(count)]}, g.scratch_load({at}, {count}), E)"]

    def _lds(self, inst: Instruction) -> list[str]:
        """Python lines for an instruction that reads or writes LDS, or moves data between lanes through it."""
        name, operands, index = inst.mnemonic, inst.operands, inst.index
        target = operands[0].register

        def arrive(counter: str, registers: int) -> str:
            return f"g.issue({counter!r}, {[('V', target + k) for k in range(registers)]}, r, E)"

        if name == "ds_bpermute_b32":
            address = f"V[{operands[1].register}] + U({inst.number('offset')})"
            return [f"r = [gather(V[{operands[2].register}], {address}, E)]", arrive("dx", 1)]
        if name == "ds_permute_b32":
            address = f"V[{operands[1].register}] + U({inst.number('offset')})"
            return [f"r = [scatter(V[{operands[2].register}], {address}, E)]", arrive("dx", 1)]
        if name == "ds_swizzle_b32":
            source = self._constant(permute.swizzle_source(inst.modifiers["offset"])[: self.target.lanes])
            return [f"r = [swizzle(V[{operands[1].register}], {source}, E)]", arrive("dx", 1)]
        if found := re.fullmatch(r"ds_(read|write)2(st64)?_b(32|64)", name):
            size = int(found[3]) // 8
            step, registers = size * (64 if found[2] else 1), size // 4
            at = [inst.number(f"offset{k}") * step for k in (0, 1)]
            if found[1] == "read":
                parts = (f"g.lds_read({index}, A + U({each}), E, {size}, False)" for each in at)
                return [f"A = V[{operands[1].register}]; r = {' + '.join(parts)}", arrive("ds", 2 * registers)]
            data = [", ".join(f"V[{each.register + k}]" for k in range(registers)) for each in operands[1:3]]
            writes = (f"g.lds_write({index}, A + U({at[k]}), E, {size}, [{data[k]}])" for k in (0, 1))
            return [f"A = V[{target}]", *writes, "g.issue('ds', (), (), E)"]
        offset = inst.number("offset")
        if found := re.fullmatch(r"ds_read_b64_tr_b(8|16)", name):
            return [
                f"r = g.transposed({index}, 'u{int(found[1]) // 8}', V[{operands[1].register}] + U({offset}), E)",
                arrive("ds", 2),
            ]
        if found := re.fullmatch(r"ds_write_b(8|16|32|64|96|128)(_d16_hi)?", name):
            size, shift = int(found[1]) // 8, " >> U(16)" if found[2] else ""
            values = ", ".join(f"V[{operands[1].register + k}]{shift}" for k in range(max(1, size // 4)))
            return [
                f"g.lds_write({index}, V[{target}] + U({offset}), E, {size}, [{values}])",
                "g.issue('ds', (), (), E)",
            ]
        if found := re.fullmatch(r"ds_read_([biu])(8|16|32|64|96|128)(_d16)?(_hi)?", name):
            size, signed = int(found[2]) // 8, found[1] == "i"
            lines = [f"r = g.lds_read({index}, V[{operands[1].register}] + U({offset}), E, {size}, {signed})"]
            lines += self._into_half(operands[0], upper=bool(found[4])) if found[3] else []
            return [*lines, arrive("ds", max(1, size // 4))]
        raise UnknownInstructionError(inst.text)

    # Vector

    def _matrix(self, inst: Instruction) -> list[str]:
        types = r"(?:(f32|xf32|f16|bf16)|(fp8|bf8)_(fp8|bf8))"
        found = re.fullmatch(rf"v_(?:mf|wm)ma_f32_(16|32)x\1x\d+_{types}", inst.mnemonic)
        if not found:
            raise UnknownInstructionError(inst.text)
        side, kinds = int(found[1]), (found[2] or found[3], found[2] or found[4])
        target, *sources, added = inst.operands
        lines = []
        for name, operand, kind in zip("ab", sources, kinds, strict=True):
            self._vector_register(operand)
            registers = ", ".join(f"V[{operand.register + k}]" for k in range(operand.count))
            lines.append(f"{name} = elements([{registers}], {kind!r}, fnuz={self.target.fnuz})")
        count = side * side // self.target.lanes
        start = (
            self._number(added.value)
            if added.kind == "literal"
            else "[" + ", ".join(f"V[{added.register + k}]" for k in range(count)) + "]"
        )
        _check_depth(inst, side, kinds[0])
        into = f"V[{target.register}:{target.register + count}]"
        return [*lines, f"{into} = multiply({side}, a, b, {start})"]  # lanes that are off take part

    def _vector(self, inst: Instruction) -> list[str]:
        """Python lines for a vector instruction."""
        name, operands, index = inst.mnemonic, inst.operands, inst.index
        target, sources = operands[0], operands[1:]

        def put(text: str, kind: str) -> list[str]:
            lanes, before = self._dpp(inst, text)
            return [*before, *self._put(target, text, kind, inst, lanes)]

        if found := re.fullmatch(r"v_cmp_(\w+?)_([iuf])(16|32|64)", name):
            kind = COMPARED[found[2] + found[3]]
            a, b = self._read(operands[1], kind, inst, 0), self._read(operands[2], kind, inst, 1)
            lanes, before = self._dpp(inst, a)
            lines = [*before, f"a = {a}; b = {b}; g.set_mask({target.register}, {COMPARE[found[1]]}, {lanes})"]
            return [*lines, f"E = g.enabled({index})"] if target.register == EXEC else lines
        if name == "v_cndmask_b32":
            condition = self._mask(sources[2]) if len(sources) > 2 else f"g.mask({VCC})"
            a, b = self._read(sources[0], "u", inst, 0), self._read(sources[1], "u", inst, 1)
            return put(f"np.where({condition}, {b}, {a})", "u")
        if re.fullmatch(r"v_(?:add|sub|subrev|addc|subb|subbrev)_co_u32|v_mad_[iu]64_[iu]32|v_div_scale_f32", name):
            return self._with_carry(inst)
        if name == "v_fmac_f32":
            a, b = self._read(sources[0], "f", inst, 0), self._read(sources[1], "f", inst, 1)
            return put(f"fma({a}, {b}, V[{target.register}].view(F))", "f")
        if name == "v_div_fmas_f32":
            return put(f"div_fmas({', '.join(self._read(each, 'f', inst) for each in sources)}, g.mask({VCC}))", "f")
        if name.startswith("v_fma_mix"):
            return put(*self._mixed(inst))
        if name.startswith("v_pk_"):
            return self._packed(inst)
        if found := re.fullmatch(r"v_cvt_(scalef32_)?pk_(f32|f16|bf16)_(fp8|bf8)", name):
            upper = {"WORD_0": 0, "WORD_1": 1}[inst.modifiers.get("src0_sel", "WORD_0")]
            select = inst.numbers("op_sel", [0])
            if any(select[1:]):
                raise UnknownInstructionError(inst.text, "op_sel")
            upper |= select[0]
            scale = f"scale_exponent({self._read(sources[1], 'f', inst)})" if found[1] else "F(1)"
            table = f"float8_values({found[3]!r}, {self.target.fnuz and not found[1]})"
            lines = [f"x = {self._register(sources[0], 0)} >> U({16 if upper else 0}); t = {table}; c = {scale}"]
            low, high = (f"np.broadcast_to(t[(x >> U({shift})) & U(255)] * c, {self.whole})" for shift in (0, 8))
            if found[2] == "f32":
                return [*lines, self._put_two(target, f"{low}.view(U)", f"{high}.view(U)")]
            bits = {"f16": "half_bits", "bf16": "bfloat16_bits"}[found[2]]
            return [*lines, *self._put(target, f"{bits}({low}) | ({bits}({high}) << U(16))", "u", inst)]
        if name == "v_readlane_b32":
            if sources[1].kind != "literal":
                raise UnknownInstructionError(inst.text, "a lane in a register")
            return [f"S[{target.register}] = {self._vector_register(sources[0])}[:, {sources[1].value}].copy()"]
        if name == "v_writelane_b32":
            value = self._scalar_read(sources[0])
            return [
                f"r = V[{target.register}].copy(); r[:, {int(sources[1].value)}] = {value}; V[{target.register}] = r"
            ]
        if name == "v_readfirstlane_b32":
            return [f"S[{target.register}] = {self._vector_register(sources[0])}[np.arange(n), g.first_lane(E)]"]
        if name == "v_permlanex16_b32":
            if inst.numbers("op_sel", [0, 0])[0] != 1:  # which lets it read lanes that are off
                raise UnknownInstructionError(inst.text, "op_sel")
            low, high = (self._scalar_read(each) for each in sources[1:])
            return put(f"across_rows({self._vector_register(sources[0])}, {low}, {high})", "u")
        if found := re.fullmatch(r"v_permlane(16|32)_swap_b32", name):
            both = f"V[{target.register}], V[{sources[0].register}]"
            return [f"g.all_on({index}, E); {both} = {'swap_rows' if found[1] == '16' else 'swap_halves'}({both})"]
        if found := re.fullmatch(r"v_bitop3_b(16|32)", name):
            halves = inst.numbers("op_sel", [0] * 4) if found[1] == "16" else [0] * 4
            parts = (self._read(each, "u", inst, word=half) for each, half in zip(sources, halves, strict=False))
            text = f"boolean({', '.join(parts)}, {inst.number('bitop3')})"
            if found[1] == "32":
                return put(text, "u")
            unused = "UNUSED_PRESERVE" if halves[3] else "UNUSED_PAD"
            return put(f"place({text}, 'WORD_{halves[3]}', {unused!r}, V[{target.register}])", "u")
        if name == "v_sub_u32" and inst.flag("clamp"):
            a, b = self._read(sources[0], "u", inst), self._read(sources[1], "u", inst)
            return self._put(target, f"np.where({a} > {b}, {a} - {b}, U(0))", "u", replace(inst, modifiers={}))
        text, kind = self._expression(inst)
        if name == "v_mad_u16":  # the one operation on 16 bits that keeps the upper half of its register
            return put(f"place(({text}).astype(U), 'WORD_0', 'UNUSED_PRESERVE', V[{target.register}])", "u")
        return put(text, kind)

    def _expression(self, inst: Instruction) -> tuple[str, str]:
        """An instruction of the table as (expression, type)."""
        if inst.mnemonic not in VECTOR:
            raise UnknownInstructionError(inst.text)
        kind, kinds, text = VECTOR[inst.mnemonic]
        words = inst.numbers("op_sel", [0] * 4)
        if any(words) and inst.mnemonic != "v_pack_b32_f16":
            raise UnknownInstructionError(inst.text, "op_sel")
        sources = {
            "abc"[k]: self._read(each, wanted, inst, k, word=words[k])
            for k, (each, wanted) in enumerate(zip(inst.operands[1:], kinds, strict=True))
        }
        once = {name: value for name, value in sources.items() if len(re.findall(rf"\b{name}\b", text)) == 1}
        repeated = {name: value for name, value in sources.items() if name not in once}
        filled = re.sub(r"\b[abc]\b", lambda found: once.get(found[0], found[0]), text)
        if not repeated:
            return filled, kind
        bound = ", ".join(repeated.values())
        return f"(lambda {', '.join(repeated)}: {filled})({bound})", kind

    def _dpp(self, inst: Instruction, text: str) -> tuple[str, list[str]]:
        """Which lanes write, and lines that move the first source, which `text` must use, between lanes."""
        if inst.encoding != "dpp":
            return "E", []
        if not re.search(r"\bmoved\b", text):
            raise UnknownInstructionError(inst.text, "nothing here reads its moved source")
        source, exists = (each[: self.target.lanes] for each in permute.dpp_source(inst.modifiers))
        lanes = permute.dpp_lanes(inst.modifiers)[: self.target.lanes]
        moved = inst.operands[2 if "_co_" in inst.mnemonic else 1]  # after the carry
        bounded = inst.modifiers.get("bound_ctrl") is not None
        names = f"{self._constant(source)}, {self._constant(exists)}"
        lines = [f"moved, valid = g.dpp({self._vector_register(moved)}, E, {names}, {bounded})", "on = both(E, valid)"]
        if not lanes.all():
            lines.append(f"on = both(np.broadcast_to({self._constant(lanes)}, {self.whole}), on)")
        return "on", lines

    def _with_carry(self, inst: Instruction) -> list[str]:
        """Instructions with a second result, a mask: carries, 64-bit multiply-add, division's scaling."""
        name, (target, mask, *sources) = inst.mnemonic, inst.operands
        carry = self._put_mask(mask, "E")
        if name == "v_div_scale_f32":
            three = ", ".join(f"np.broadcast_to({self._read(each, 'f', inst)}, {self.whole})" for each in sources)
            return [
                f"r, c = div_scale({three})",
                f"V[{target.register}] = merge(E, r.view(U), V[{target.register}]); {carry}",
            ]
        if found := re.fullmatch(r"v_mad_([iu])64_[iu]32", name):
            narrow, wide, view = ("u", "Q", "") if found[1] == "u" else ("i", "L", ".view(Q)")
            a, b = (f"{self._read(each, narrow, inst)}.astype({wide})" for each in sources[:2])
            added = self._read(sources[2], wide, inst)
            # Bit 64 of the exact sum: of numbers with a sign it is the sign, also where 64 bits hold another one.
            overflow = "r < p" if wide == "Q" else "(r < 0) ^ (((p ^ r) & (q ^ r)) < 0)"
            return [
                f"p = {a} * {b}; q = {added}; r = np.broadcast_to(p + q, {self.whole}); c = {overflow}; {carry}",
                self._put_two(target, f"low(r{view})", f"high(r{view})"),
            ]
        a, b = (self._read(each, "u", inst, k) for k, each in enumerate(sources[:2]))
        lanes, before = self._dpp(inst, a)
        a, b = (b, a) if "rev" in name else (a, b)
        sign = "+" if "add" in name else "-"
        taken = f" {sign} {self._mask(sources[2])}" if len(sources) > 2 else ""
        return [
            *before,
            f"r = np.broadcast_to({a}, {self.whole}).astype(Q) {sign} {b}{taken}; c = high(r) != 0",
            f"V[{target.register}] = merge({lanes}, low(r), V[{target.register}])",
            self._put_mask(mask, lanes),
        ]

    def _mixed(self, inst: Instruction) -> tuple[str, str]:
        """`v_fma_mix`: each source is a float32, or a half of a register as float16."""
        words, halves = inst.numbers("op_sel", [0, 0, 0]), inst.numbers("op_sel_hi", [0, 0, 0])
        three = (
            f"{self._read(each, 'h', inst, word=words[k])}.astype(F)" if halves[k] else self._read(each, "f", inst)
            for k, each in enumerate(inst.operands[1:])
        )
        text = f"fma({', '.join(three)})"
        if inst.mnemonic == "v_fma_mix_f32":
            return text, "f"
        part = "WORD_0" if inst.mnemonic == "v_fma_mixlo_f16" else "WORD_1"
        return f"place(half_bits({text}), {part!r}, 'UNUSED_PRESERVE', V[{inst.operands[0].register}])", "u"

    def _packed(self, inst: Instruction) -> list[str]:
        """`v_pk_`: two results; op_sel and op_sel_hi choose the halves that go into each."""
        target, sources = inst.operands[0], inst.operands[1:]
        lower, upper = inst.numbers("op_sel", [0, 0, 0]), inst.numbers("op_sel_hi", [1, 1, 1])
        negated = inst.numbers("neg_lo", [0, 0, 0]), inst.numbers("neg_hi", [0, 0, 0])
        if inst.mnemonic == "v_pk_mov_b32":
            if any(map(any, negated)):
                raise UnknownInstructionError(inst.text, "a sign modifier")
            moved = (
                self._literal(each.value, "u") if each.kind == "literal" else self._register(each, lower[k])
                for k, each in enumerate(sources)
            )
            parts = (f"np.broadcast_to({word}, {self.whole})" for word in moved)
            return [f"p, r = {', '.join(parts)}", self._put_two(target, "p", "r")]
        if found := re.fullmatch(r"v_pk_(mul|add|fma)_f32", inst.mnemonic):
            form = {"mul": "{} * {}", "add": "{} + {}", "fma": "fma({}, {}, {})"}[found[1]]

            def part(k: int, word: int, minus: int) -> str:
                each = sources[k]
                literal = each.kind == "literal"
                text = self._literal(each.value, "f") if literal else f"{self._register(each, word)}.view(F)"
                return f"(-{text})" if minus else text

            both = [
                form.format(*(part(k, words[k], signs[k]) for k in range(len(sources))))
                for words, signs in zip((lower, upper), negated, strict=True)
            ]
            values = ", ".join(f"np.broadcast_to({text}, {self.whole}).view(U)" for text in both)
            return [f"p, r = {values}", self._put_two(target, "p", "r")]
        kind, text = PACKED[inst.mnemonic.removeprefix("v_pk_")]
        if any(map(any, negated)):
            raise UnknownInstructionError(inst.text, "a sign modifier")
        cast = {"h": "half_bits(r)", "k": "r.view(W16).astype(U)", "w": "r.astype(U)"}[kind]
        lines = []
        for result, words in (("p", lower), ("q", upper)):
            reads = (f"{'ab'[k]} = {self._read(each, kind, inst, word=words[k])}" for k, each in enumerate(sources))
            lines.append(f"{'; '.join(reads)}; r = {text}; {result} = {cast}")
        return [*lines, *self._put(target, "p | (q << U(16))", "u", inst)]


def _check_depth(inst: Instruction, side: int, kind: str) -> None:
    """Refuse registers that do not hold the K of the mnemonic."""
    width = {"f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8}[kind]
    found = re.search(r"x(\d+)_", inst.mnemonic.partition(f"_f32_{side}x{side}")[2])
    k = int(found[1]) if found else 0
    if inst.operands[1].count * 32 // width * (inst.target.lanes // side) != k:
        raise UnknownInstructionError(inst.text, f"its registers do not hold K = {k}")
