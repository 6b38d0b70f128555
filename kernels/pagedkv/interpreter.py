# SPDX-License-Identifier: Apache-2.0
"""Make Triton 3.6's interpreter several times as fast by replacing internal functions; results have the same bits.

The interpreter spends most of an operation on types and on replacing `triton.language`, whatever the operation's size.
Each function here replaces one of Triton's. It does the same, but caches what stays and skips what is dropped. Nothing
is replaced before `speed_up` is called: by tests, and by the plugin with PAGEDKV_INTERPRETER=fast.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import triton
from triton.language import core
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@functools.cache
def speed_up() -> None:
    """Replace Triton's functions by these, once a process; with another version than 3.6, but for masks, none."""
    if triton.__version__.startswith("3.9."):
        _take_spread_comparisons_as_masks()
    if not triton.__version__.startswith("3.6."):
        return
    _patch_language_once_a_launch()
    _drop_unread_overflow_checks()
    _make_types_once()
    _promote_and_spread_what_differs()
    _look_up_numpy_types()


def _take_spread_comparisons_as_masks() -> None:
    """Take int32 masks, as Triton up to 3.8 does.

    The interpreter says int32 of a scalar comparison that is spread over a block (`create_splat`), and Triton 3.9 then
    refuses it: "mask has unsupported dtype".
    """
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store

    def truth(mask: Any) -> Any:
        return handle(mask.data.astype(bool), core.int1)

    def load_where(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, ptrs, truth(mask), *rest, **named)

    def store_where(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return store(self, ptrs, value, truth(mask), cache_policy)

    builder.create_masked_load, builder.create_masked_store = load_where, store_where


def _patch_language_once_a_launch() -> None:
    """Replace the functions of `triton.language` once a launch, by functions that are made once a process.

    Triton does so at each call of a device function too, which replaces nothing.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[int] = set()

    @functools.cache
    def languages(function: Callable[..., Any]) -> set[int]:
        modules = (triton.language, core)
        return {id(value) for value in function.__globals__.values() if any(value is module for module in modules)}

    def patch_once(function: Callable[..., Any]) -> Any:
        if replaced and languages(function) <= replaced:
            return interpreter._LangPatchScope()  # nothing to put back
        launch, scope = not replaced, patch(function)
        replaced.update(languages(function))
        if launch:
            restore = scope.restore

            def forget() -> None:
                replaced.clear()
                restore()

            scope.restore = forget
        return scope

    def bound(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    @functools.cache
    def replacements(package: Any, builder: Any) -> list[tuple[str, Callable[..., Any]]]:
        semantic = interpreter.TritonSemantic(builder)
        return [
            (name, bound(member, semantic)) for name, member in inspect.getmembers(package) if core.is_builtin(member)
        ]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in replacements(package, builder):
            scope.set_attr(package, name, member)

    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtin


def _drop_unread_overflow_checks() -> None:
    """Compute no check of an integer's overflow that is handed to an assertion which is switched off."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _make_types_once() -> None:
    """Make the shape of a block, a part of each value, and its types once; and a type's name when it is asked for."""

    @functools.cache
    def shape(*sizes: int) -> tuple[Any, int, Any, Any, dict[Any, Any]]:
        numel, each = core.validate_block_shape(sizes), core.tuple([core.constexpr(size) for size in sizes])
        return core.tuple(sizes), numel, each, core.constexpr(numel), {}

    nothing, one = core.tuple([]), core.constexpr(1)

    def make_block(self: Any, element_ty: Any, sizes: Sequence[int]) -> None:
        self.element_ty, self._made = element_ty, shape(*core._unwrap_shape(sizes))
        if not self._made[0].values:
            raise TypeError("0d block_type is forbidden")
        self.shape, self.numel, *_ = self._made

    def of_this_shape(self: Any, scalar: Any) -> Any:
        types, key = self._made[4], (scalar.name, getattr(scalar, "address_space", 0))
        if key not in types:
            types[key] = core.block_type(scalar, self.shape)
        return types[key]

    def make_tuple(self: Any, types: Sequence[Any], fields: Sequence[str] | None = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind._made[2:4] if kind.is_block() else (nothing, one)

    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    wrapping = (list, tuple, core.tuple, core.constexpr)

    def name_of_tuple(self: Any) -> str:
        return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types, strict=False)) + "]"

    core.block_type.__init__, core.tuple_type.__init__, core.tensor.__init__ = make_block, make_tuple, make_tensor
    core._unwrap_if_constexpr = lambda value: unwrap(value) if isinstance(value, wrapping) else value
    core.block_type.with_element_ty = of_this_shape
    core.block_type.to_ir = lambda self, builder: of_this_shape(self, self.element_ty.to_ir(builder))
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple_type.name = property(name_of_tuple)


def _promote_and_spread_what_differs() -> None:
    """Leave operands as they are where both have the same type, or the same shape; a number takes a tensor's type."""
    ranges = dict.fromkeys(core.dtype.STANDARD_FP_TYPES, (-(2.0**31), 2.0**31))
    kinds = [getattr(core, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
    ranges |= {kind.name: (kind.get_int_min_value(), kind.get_int_max_value()) for kind in kinds}
    semantic = interpreter.TritonSemantic
    promote, spread, equal = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, core.dtype.__eq__

    def spread_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type._made is rhs.type._made
        return (lhs, rhs) if same else spread(self, lhs, rhs)

    def fits(number: Any, kind: Any) -> bool:
        low, high = ranges.get(kind.name, (1, 0))
        real = type(number) is float and kind.is_standard_floating()
        return real or (type(number) is int and low <= number <= high)

    def promote_what_differs(self: Any, lhs: Any, rhs: Any, *allowed: bool) -> Any:
        # Triton hands on by place what a division demands, third and fourth: one of halves is one of singles.
        if type(lhs) is core.tensor and len(allowed) < 3:
            if type(rhs) is not core.tensor:
                if fits(rhs, lhs.dtype):
                    return spread_what_differs(self, lhs, self.scalar_constant(rhs, lhs.dtype))
            elif lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return spread_what_differs(self, lhs, rhs)
        return promote(self, lhs, rhs, *allowed)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = promote_what_differs, spread_what_differs
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _look_up_numpy_types() -> None:
    """Look the NumPy type of a Triton type up by its name; Triton makes the table anew each time."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = look_up
