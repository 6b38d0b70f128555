# SPDX-License-Identifier: Apache-2.0
"""Evaluate the pseudo-code in which AMD's ISA documents write what an instruction does, on Python integers.

The texts are those of the PDFs of CDNA's and RDNA4's ISA as the wheel of tinygrad carries them (`str_pcode.py`, MIT);
tinygrad itself does not evaluate them. Nothing but the names of instructions is shared with the executor, and nobody of
this project has written the meanings.

Where the text leaves something open it is read so: integers are unbounded until they are stored; an operation on floats
is rounded once, to the wider of its operands; `+0.0` and `-0.0` with a sign compare with that sign, `0.0` with both;
`<>` of floats is false for a NaN, as its instruction's name says.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from dataclasses import dataclass
from fractions import Fraction

from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE as CDNA
from tinygrad.runtime.autogen.amd.rdna4.str_pcode import PCODE as RDNA4

from amdgcn.gfx12 import renamed
from amdgcn.meaning import MNEMONICS

_FORMATS = {16: ("<e", 5, 10), 32: ("<f", 8, 23), 64: ("<d", 11, 52)}
_TOKEN = re.compile(
    r"\d+'[UIFB]|\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)[UF]?|0x[0-9a-fA-F]+U?L*|\d+\.\d+F?|\d+U?L*"
    r"|[A-Za-z_]\w*|<>|<<|>>|<=|>=|==|!=|&&|\|\||\*\*|\+=|-=|[-+*/%&|^~!?:=<>(){}\[\],.;]"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!=", "<>"),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_ENDS = {"endif", "elsif", "else", "endfor", ")"}

LEFT_OUT = {
    # Pattern -> why AMD's text does not say what the instruction computes.
    r"(global|buffer)_atomic_.*": "its text names an address; test_an_atomic_is_its_text",
    r"ds_(read|write|load|store|swizzle).*|(global|buffer|scratch)_.*|s_load_.*": "an access to memory: its address",
    r"v_nop|s_(nop|sleep|setprio|waitcnt|barrier\w*|endpgm|branch)|s_cbranch_.*": "no result: what runs next, and when",
    r"s_(delay_alu|clause|wait_alu|sendmsg)": "no result: hints",
    r"v_[mw][fm]ma_.*": "its text is the formula, without layout and rounding",
    r"v_accvgpr_.*|v_fma_mix.*": "the document has no text of it",
    r"v_cvt_(scalef32_)?pk_(f32|b?f16)_(fp8|bf8)": "its text names a conversion; test_every_8_bit_float has the tables",
    r"v_div_(scale|fmas)_f32": "its text gives wrong quotients at extreme exponents; test_quotients",
    r"ds_b?permute_b32|v_(readlane|readfirstlane|writelane)_b32|v_permlane\d+_swap_b32": "lanes of other lanes",
    r"v_permlanex16_b32": "lanes of other lanes; test_the_other_row",
    r"v_pk_mov_b32|v_bitop3_b\d+": "its operation is a modifier of the line; below",
    r"s_(and|or|andn2|and_not1)_saveexec_b\d\d": "exec; test_saveexec",
}


@functools.cache
def texts(arch: str = "gfx942") -> dict[str, str]:
    """Mnemonic -> pseudo-code; of several encodings the last."""
    found = RDNA4 if arch == "gfx1201" else CDNA
    return {re.sub(r"_e(32|64)$", "", each.name.lower()): text for each, text in found.items()}


def described(arch: str = "gfx942") -> dict[str, str]:
    """An arch's instructions whose text says what they compute -> the names that the executor knows them by."""
    names = {name: renamed(name) if arch == "gfx1201" else name for name in texts(arch)}
    known = {name: other for name, other in names.items() if other in MNEMONICS}
    return {name: known[name] for name in known if not any(re.fullmatch(pattern, name) for pattern in LEFT_OUT)}


@dataclass(frozen=True)
class Float:
    """A float of 16, 32 or 64 bits."""

    bits: int
    width: int
    signed_zero: bool = False
    """Whether it is a zero whose sign was written."""

    @property
    def number(self) -> float:
        return struct.unpack(_FORMATS[self.width][0], self.bits.to_bytes(self.width // 8, "little"))[0]

    @property
    def exponent(self) -> int:
        _, size, fraction = _FORMATS[self.width]
        return self.bits >> fraction & (1 << size) - 1

    @property
    def fraction(self) -> int:
        return self.bits & (1 << _FORMATS[self.width][2]) - 1

    @property
    def is_nan(self) -> bool:
        return math.isnan(self.number)

    @property
    def quiet(self) -> int:
        """The bit of a NaN that does not signal."""
        return 1 << _FORMATS[self.width][2] - 1


def as_float(value, width):
    """A number rounded once, ties to even."""
    if isinstance(value, Fraction) and value:
        value = _nearest(value, width)
    form = _FORMATS[width][0]
    try:
        packed = struct.pack(form, value)
    except OverflowError:
        packed = struct.pack(form, math.copysign(math.inf, value))
    return Float(int.from_bytes(packed, "little"), width)


def _nearest(exact, width):
    _, size, digits = _FORMATS[width]
    low = 2 - (1 << size - 1)
    exponent = max(low, abs(exact.numerator).bit_length() - exact.denominator.bit_length() - 1)
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - digits)
    rounded = round(exact / unit) * unit
    if abs(rounded) >= Fraction(2) ** (1 << size - 1):
        return math.copysign(math.inf, exact)
    return float(rounded) if rounded else math.copysign(0.0, exact)


def converted(value, width):
    """A float of another width; a NaN keeps its upper bits, and so whether it signals."""
    if value.width == width:
        return value
    if not value.is_nan:
        return as_float(value.number, width)
    _, size, digits = _FORMATS[width]
    shift = digits - _FORMATS[value.width][2]
    fraction = value.fraction << shift if shift > 0 else value.fraction >> -shift
    sign = value.bits >> value.width - 1
    return Float(sign << width - 1 | (1 << size) - 1 << digits | fraction, width)


def view(raw, kind, width):
    """Bits read as a type; a float as another float."""
    if kind == "f" and isinstance(raw, Float):
        return converted(raw, width)
    bits = int(raw.bits if isinstance(raw, Float) else raw) & (1 << width) - 1
    if kind == "f":
        return Float(bits, width)
    return bits - (1 << width) if kind == "i" and bits >> width - 1 else bits


def bits_of(value, kind, width):
    """Bits of a value that is stored as a type."""
    if kind == "f" and isinstance(value, Float):
        return converted(value, width).bits
    raw = value.bits if isinstance(value, Float) else int(value)
    return raw & (1 << width) - 1


class _Break(Exception):  # noqa: N818
    pass


class _Return(Exception):  # noqa: N818
    def __init__(self, value):
        self.value = value


class _Parser:
    """Turns a text into functions of the variables."""

    def __init__(self, text):
        text = re.sub(r"//[^\n]*", "", text)
        found = _TOKEN.findall(text)
        if "".join(found) != re.sub(r"\s+", "", text):
            raise SyntaxError(text)
        self.tokens, self.at = found, 0

    def peek(self, k=0):
        return self.tokens[self.at + k] if self.at + k < len(self.tokens) else ""

    def take(self, *wanted):
        token = self.peek()
        if wanted and token not in wanted:
            raise SyntaxError(f"{token!r}, not {wanted}")
        self.at += 1
        return token

    def block(self):
        body = []
        while self.peek() and self.peek() not in _ENDS:
            if self.peek() == ";":
                self.take()
                continue
            body.append(self.statement())

        def run(names):
            for each in body:
                each(names)

        return run

    def statement(self):
        word = self.peek()
        if word == "if":
            return self.branches()
        if word == "for":
            return self.loop()
        if word == "break":
            self.take()

            def stop(_):
                raise _Break

            return stop
        if word == "return":
            self.take()
            value = self.expression()

            def leave(names):
                raise _Return(value(names))

            return leave
        if word == "declare":
            return self.declaration()
        return self.assignment()

    def declaration(self):
        self.take("declare")
        name = self.take()
        while self.peek() not in {";", ""} and self.peek() != "[":
            if self.take() == ":":
                self.at += 2 if re.fullmatch(r"\d+", self.peek()) else 1
        size = 0
        if self.peek() == "[":
            self.take()
            size = int(self.take())
            self.take("]")

        def declare(names):
            names[name] = [0] * size if size else 0

        return declare

    def branches(self):
        self.take("if")
        cases = [(self.expression(), self.take("then") and self.block())]
        otherwise = None
        while self.peek() == "elsif":
            self.take()
            cases.append((self.expression(), self.take("then") and self.block()))
        if self.peek() == "else":
            self.take()
            otherwise = self.block()
        self.take("endif")

        def run(names):
            for condition, body in cases:
                if truth(condition(names)):
                    body(names)
                    return
            if otherwise:
                otherwise(names)

        return run

    def loop(self):
        self.take("for")
        name = self.take()
        self.take("in")
        first = self.expression()
        self.take(":")
        last = self.expression()
        self.take("do")
        body = self.block()
        self.take("endfor")

        def run(names):
            try:
                for k in range(int(first(names)), int(last(names)) + 1):
                    names[name] = k
                    body(names)
            except _Break:
                pass

        return run

    def assignment(self):
        if self.peek() == "{":  # the first part is the upper one
            self.take()
            parts = [self.target()]
            while self.peek() == ",":
                self.take()
                parts.append(self.target())
            self.take("}")
            self.take("=")
            value = self.expression()

            def split(names):
                raw = int(value(names))
                for store, width in reversed(parts):
                    store(names, raw & (1 << width) - 1)
                    raw >>= width

            return split
        start = self.at
        store, _ = self.target()
        operator = self.take("=", "+=", "-=")
        if self.peek() == "lambda":
            return self.function(self.tokens[start])
        value = self.expression()
        if operator != "=":
            end, self.at = self.at, start
            old = self.postfix()
            self.at = end
            return lambda names: store(names, binary(operator[0], old(names), value(names)))
        return lambda names: store(names, value(names))

    def function(self, name):
        self.take("lambda")
        self.take("(")
        arguments = [self.take()]
        while self.peek() == ",":
            self.take()
            arguments.append(self.take())
        self.take(")")
        self.take("(")
        body = self.block()
        self.take(")")

        def define(names):
            def call(*values):
                inner = dict(names) | dict(zip(arguments, values, strict=True))
                try:
                    body(inner)
                except _Return as found:
                    return found.value
                raise ValueError(f"{name} returns nothing")

            names[name] = call

        return define

    def suffixes(self):
        """The suffixes of a name: ("at", index), ("bits", high, low), ("as", kind, width) or ("part", name)."""
        found = []
        while self.peek() in {"[", "."}:
            if self.take() == ".":
                word = self.take()
                kind = re.fullmatch(r"(bf|[uifb])(\d+)", word)
                found.append(("as", kind[1].replace("bf", "b"), int(kind[2])) if kind else ("part", word))
                continue
            high = self.expression()
            if self.peek() == ":":
                self.take()
                found.append(("bits", high, self.expression()))
            else:
                found.append(("at", high))
            self.take("]")
        return found

    def target(self):
        """(function that stores a value, bits of it) of what stands left of `=`."""
        name, suffixes = self.take(), self.suffixes()
        kinds = [each for each in suffixes if each[0] == "as"]

        def store(names, value):
            holder, key, rest = names, name, list(suffixes)
            while rest and rest[0][0] == "at" and isinstance(holder.get(key) if holder is names else holder[key], list):
                holder, key = holder[key], int(rest.pop(0)[1](names))
            whole = [each for each in rest if each[0] in {"bits", "at"}]
            kind, width = (kinds[-1][1], kinds[-1][2]) if kinds else ("b", 0)
            if not whole:
                holder[key] = bits_of(value, kind, width) if width else value
                return
            high = int(whole[0][1](names))
            low = int(whole[0][2](names)) if whole[0][0] == "bits" else high
            size = abs(high - low) + 1
            type_behind = rest[-1][0] == "as"
            new = bits_of(value, kind if type_behind else "b", size)
            if low > high:
                low, new = high, int(f"{new:0{size}b}"[::-1], 2)
            old = (holder.get(key, 0) if holder is names else holder[key]) or 0
            old = old.bits if isinstance(old, Float) else int(old)
            holder[key] = old & ~((1 << size) - 1 << low) | new << low

        return store, kinds[-1][2] if kinds else 0

    def expression(self):
        condition = self.level(0)
        if self.peek() != "?":
            return condition
        self.take()
        yes = self.expression()
        self.take(":")
        no = self.expression()
        return lambda names: yes(names) if truth(condition(names)) else no(names)

    def level(self, number):
        if number == len(_LEVELS):
            return self.unary()
        left = self.level(number + 1)
        while self.peek() in _LEVELS[number]:
            operator, right = self.take(), self.level(number + 1)
            left = functools.partial(
                lambda names, operator, left, right: binary(operator, left(names), right(names)),
                operator=operator,
                left=left,
                right=right,
            )
        return left

    def unary(self):
        if self.peek() in {"-", "+", "~", "!"}:
            sign, zero = self.take(), bool(re.fullmatch(r"0\.0F?", self.peek()))
            value = self.unary()
            return lambda names: unary(sign, value(names), zero)
        return self.postfix()

    def postfix(self):
        token = self.peek()
        if token == "(":
            self.take()
            value = self.expression()
            self.take(")")
        elif token == "{":
            value = self.joined()
        elif re.fullmatch(r"\d+'[UIFB]", token):
            self.take()
            self.take("(")
            inner = self.expression()
            self.take(")")
            value = self.as_type(inner, token[-1].lower(), int(token.split("'")[0]))
        elif re.match(r"\d", token):
            self.take()
            value = constantly(number(token))
        else:
            self.take()
            value = self.call(token) if self.peek() == "(" else named(token)
        suffixes = self.suffixes()
        return lambda names: read(value(names), suffixes, names)

    @staticmethod
    def as_type(inner, kind, width):
        return lambda names: cast(inner(names), kind, width)

    def joined(self):
        parts = []
        while self.take("{", ",", "}") != "}":
            start = self.at
            inner = self.expression()
            width = re.findall(r"(\d+)", self.tokens[self.at - 1])
            bits = re.search(r"\[(\d+):(\d+)\]\.?\w*$", "".join(self.tokens[start : self.at]))
            parts.append((inner, abs(int(bits[1]) - int(bits[2])) + 1 if bits else int(width[0])))
            if self.peek() == "}":
                self.take()
                break

        def join(names):
            raw = 0
            for inner, size in parts:
                raw = raw << size | bits_of(inner(names), "b", size)
            return raw

        return join

    def call(self, name):
        self.take("(")
        arguments = [self.expression()]
        while self.peek() == ",":
            self.take()
            arguments.append(self.expression())
        self.take(")")
        return lambda names: (names.get(name) or function(name))(*(each(names) for each in arguments))


def constantly(value):
    return lambda _: value


def named(name):
    return lambda names: names[name]


def truth(value):
    return value.number != 0 if isinstance(value, Float) else value != 0


def number(token):
    if "'" in token:
        width, token = token.split("'")
        if "." in token:
            return as_float(float(token.rstrip("F")), int(width))
    if "." in token:
        return as_float(float(token.rstrip("F")), 32 if token.endswith("F") else 64)
    return int(token.rstrip("UL"), 0)


def cast(value, kind, width):
    if kind == "f":
        return converted(value, width) if isinstance(value, Float) else Float(value & (1 << width) - 1, width)
    return view(value, kind, width)


def read(value, suffixes, names):
    for each in suffixes:
        if each[0] == "at" and isinstance(value, list):
            value = value[int(each[1](names))]
        elif each[0] == "part":
            value = value[each[1]]
        elif each[0] == "as":
            value = view(value, each[1], each[2])
        else:
            high = int(each[1](names))
            low = int(each[2](names)) if each[0] == "bits" else high
            raw = value.bits if isinstance(value, Float) else int(value)
            size = abs(high - low) + 1
            raw = raw >> min(high, low) & (1 << size) - 1
            value = int(f"{raw:0{size}b}"[::-1], 2) if low > high else raw
    return value


def unary(sign, value, zero):
    if isinstance(value, Float):
        return Float(value.bits ^ (1 << value.width - 1 if sign == "-" else 0), value.width, zero)
    return {"-": -value, "+": value, "~": ~value, "!": int(not value)}[sign]


def binary(operator, a, b):
    if operator in {"&&", "||"}:
        return int(truth(a) and truth(b) if operator == "&&" else truth(a) or truth(b))
    if isinstance(a, Float) and operator == "**":  # 2 to an integer; more than 600 is as good as infinite
        return as_float(a.number ** max(-600, min(600, int(b))), 64)
    if isinstance(a, Float) or isinstance(b, Float):
        width = max(each.width for each in (a, b) if isinstance(each, Float))
        if operator in {"==", "!=", "<>", "<", "<=", ">", ">="}:
            return int(compared(operator, a, b))
        x, y = (each.number if isinstance(each, Float) else each for each in (a, b))
        if operator == "/":
            return quotient(x, y, width)
        results = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y}
        return as_float(results[operator](), width)
    a, b = int(a), int(b)
    operations = {
        "|": lambda: a | b,
        "^": lambda: a ^ b,
        "&": lambda: a & b,
        "==": lambda: int(a == b),
        "!=": lambda: int(a != b),
        "<>": lambda: int(a != b),
        "<": lambda: int(a < b),
        "<=": lambda: int(a <= b),
        ">": lambda: int(a > b),
        ">=": lambda: int(a >= b),
        "<<": lambda: a << b,
        ">>": lambda: a >> b,
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
        "/": lambda: a // b,
        "%": lambda: a % b,
    }
    return operations[operator]()


def compared(operator, a, b):
    x, y = (each.number if isinstance(each, Float) else each for each in (a, b))
    if isinstance(b, Float) and b.signed_zero and operator == "==":
        return x == 0 and a.bits >> a.width - 1 == b.bits >> b.width - 1
    return {
        "==": x == y,
        "!=": x != y,
        "<>": x < y or x > y,
        "<": x < y,
        "<=": x <= y,
        ">": x > y,
        ">=": x >= y,
    }[operator]


def quotient(x, y, width):
    if y == 0:
        nan = x == 0 or math.isnan(x)
        return as_float(math.nan if nan else math.copysign(math.inf, x) * math.copysign(1, y), width)
    return as_float(x / y, width)


def fma(a, b, c):
    x, y, z = a.number, b.number, c.number
    if all(map(math.isfinite, (x, y, z))) and (exact := Fraction(x) * Fraction(y) + Fraction(z)):
        return as_float(exact, a.width)
    return as_float(x * y + z, a.width)


def whole(function_):
    return lambda a: a if not math.isfinite(a.number) else as_float(float(function_(a.number)), a.width)


def power(a, b):
    try:
        return as_float(a.number**b.number, b.width)
    except OverflowError:
        return as_float(math.inf, b.width)


def root(a):
    return as_float(math.sqrt(a.number) if a.number >= 0 else a.number if a.number == 0 else math.nan, a.width)


def logarithm(a):
    x = a.number
    return as_float(-math.inf if x == 0 else math.nan if not x > 0 else x if x == math.inf else math.log2(x), a.width)


def to_integer(a, low, high):
    x = a.number
    return 0 if math.isnan(x) else low if x <= low else high if x >= high else int(x)


def from_bit(value, width):
    bits = int(value) & (1 << width) - 1
    return bits - (1 << width) if width and bits >> width - 1 else bits


def to_bf16(a):
    if a.is_nan:
        return a.bits >> 16 | 0x40
    return (a.bits + 0x7FFF + (a.bits >> 16 & 1)) >> 16


_FUNCTIONS = {
    "signext": int,
    "signext_from_bit": from_bit,
    "abs": lambda a: Float(a.bits & (1 << a.width - 1) - 1, a.width) if isinstance(a, Float) else abs(a),
    "sign": lambda a: a.bits >> a.width - 1,
    "exponent": lambda a: a.exponent,
    "isNAN": lambda a: int(a.is_nan),
    "isSignalNAN": lambda a: int(a.is_nan and not a.bits & a.quiet),
    "isEven": lambda a: int(math.isfinite(a.number) and a.number % 2 == 0),
    "cvtToQuietNAN": lambda a: Float(a.bits | a.quiet, a.width),
    "fma": fma,
    "floor": whole(math.floor),
    "trunc": whole(math.trunc),
    "fract": lambda a: as_float(a.number - math.floor(a.number) if math.isfinite(a.number) else math.nan, a.width),
    "pow": power,
    "sqrt": root,
    "log2": logarithm,
    "f32_to_f16": lambda a: converted(a, 16),
    "f16_to_f32": lambda a: converted(a, 32),
    "f32_to_bf16": to_bf16,
    "i32_to_f32": lambda a: as_float(float(a), 32),
    "u32_to_f32": lambda a: as_float(float(a), 32),
    "f32_to_i32": lambda a: to_integer(a, -(2**31), 2**31 - 1),
    "f32_to_u32": lambda a: to_integer(a, 0, 2**32 - 1),
    "s_ff1_i32_b64": lambda a: (a & -a).bit_length() - 1,
}


def function(name):
    """A function of the text: one of its own library, or another instruction."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]

    def instruction(*sources):
        names = start({f"S{k}": each.bits if isinstance(each, Float) else each for k, each in enumerate(sources)})
        source = texts() if name in texts() else texts("gfx1201")
        compiled(source[name])(names)
        if isinstance(sources[0], Float):
            return Float(names["D0"], sources[0].width)
        return names["D0"] - (1 << 32) if "_i32" in name and names["D0"] >> 31 else names["D0"]

    return instruction


def start(names):
    """Variables before the text begins."""
    known = {"D0": 0, "WAVE_MODE": {"IEEE": 1}, "INF": as_float(math.inf, 64), "NAN": as_float(math.nan, 64)}
    known |= {"ROUND_MODE": 0, "ROUND_NEAREST_EVEN": 0, "tmp": 0, "laneId": 0}
    known |= {"UNDERFLOW_F32": as_float(0.0, 32), "OVERFLOW_F32": as_float(math.inf, 32)}
    return known | names


@functools.cache
def compiled(text):
    """A function that runs a text on variables.

    Raises:
        SyntaxError: The text has what this reader does not know.
    """
    parser = _Parser(text)
    block = parser.block()
    if parser.peek():
        raise SyntaxError(f"{parser.peek()!r} in {text}")
    return block


def evaluate(mnemonic, arch="gfx942", **names):
    """Run the text of an instruction on these variables; returns all variables after it."""
    variables = start(names)
    compiled(texts(arch)[mnemonic])(variables)
    return variables
