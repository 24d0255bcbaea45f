"""The value of a constant expression in a task's own text: `14*14`, `-1`, `[0]*3`, `set()`, `float('inf')`.

Nothing is run: the syntax tree is folded by the tables below, and whatever they do not name is refused. What is built
stays in proportion to the text, except by the four ways to make much of little (repetition, power, left shift, range):
those share one allowance.
"""

import ast
import math
import operator

from misvo.errors import MisvoError

_ALLOWANCE = 1 << 20  # elements, characters and bits that one expression may add beyond what it spells out
_NAMES = {"inf": math.inf, "nan": math.nan}
_NAMES |= {f"math.{name}": getattr(math, name) for name in ("inf", "nan", "pi", "e", "tau")}
_CALLS = {kind.__name__: kind for kind in (int, float, complex, list, tuple, set, frozenset, dict)}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: operator.not_}
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}


class NotConstant(MisvoError):
    """An expression that is no constant, or one of more than its share."""


def constant(node):
    """The value of an expression's syntax tree; NotConstant where it has none."""
    try:
        return _Folding().value(node)
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:  # 1/0, 1 + "a", int("x"), too deep
        raise NotConstant(f"{_shortened(node)} is no constant ({error})") from error


class _Folding:
    """One expression on its way to a value, with what is left of its allowance."""

    def __init__(self):
        self.allowance = _ALLOWANCE

    def value(self, node):
        match node:
            case ast.Constant(value=value) if value is not Ellipsis:
                return value
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Set(elts=items):
                return {self.value(item) for item in items}
            case ast.Dict(keys=keys, values=values) if None not in keys:  # None stands for {**other}
                return {self.value(key): self.value(item) for key, item in zip(keys, values, strict=True)}
            case ast.UnaryOp(op=operation, operand=operand):
                return _UNARY[type(operation)](self.value(operand))
            case ast.BinOp(left=left, op=operation, right=right):
                return self._binary(type(operation), self.value(left), self.value(right))
            case ast.Name() | ast.Attribute() if ast.unparse(node) in _NAMES:
                return _NAMES[ast.unparse(node)]
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(name, [self.value(argument) for argument in arguments])
        raise NotConstant(f"{_shortened(node)} is no constant")

    def _binary(self, operation, left, right):
        if operation is ast.Mult:
            return self._product(left, right)
        if operation is ast.Pow:
            if isinstance(left, int) and isinstance(right, int):
                self._spend(left.bit_length() * abs(right))
            return left**right
        if operation is ast.LShift:
            self._spend(right)
            return left << right
        if operation is ast.Mod and isinstance(left, int | float):  # of text it would be formatting
            return left % right
        if operation in _BINARY:
            return _BINARY[operation](left, right)
        raise NotConstant(f"{operation.__name__} of these is no constant")

    def _product(self, left, right):
        if isinstance(left, int):
            left, right = right, left
        if isinstance(left, str | bytes | list | tuple) and isinstance(right, int):
            self._spend(_size(left) * max(right, 0))
        return left * right

    def _call(self, name, arguments):
        if name == "range":
            numbers = range(*arguments)
            self._spend(len(numbers))
            return numbers
        if name in _CALLS:
            return _CALLS[name](*arguments)
        raise NotConstant(f"{name}(...) is no constant")

    def _spend(self, amount):
        self.allowance -= amount
        if self.allowance < 0:
            raise NotConstant("a constant of more than a million elements or bits")


def _size(value):
    """Elements and characters at every level; a list that is repeated counts as often as it stands there."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if isinstance(value, dict):
        return 1 + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(_size(item) for item in value)
    return 1


def _shortened(node):
    try:
        text = ast.unparse(node)
    except (RecursionError, ValueError):  # nested too deep, or with a number of too many digits
        return "this expression"
    return text if len(text) <= 60 else f"{text[:57]}..."
