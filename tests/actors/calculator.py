"""A calculator beside search."""

import ast
import operator

_SIGNS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """It works out numbers, + - * / and brackets."""
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot work that out: {error}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(inner))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(left), _value(right))
    raise ValueError("only numbers, + - * / and brackets")
