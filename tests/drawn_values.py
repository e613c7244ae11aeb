"""Values of any schema, drawn by dice: usual ones, small, odd, or as large as may be; and their bytes, damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec.inspect as schemas

ODD = (0, 1, 2, 3, 7, 15, 16, 255, 256, 4095, 4096, 16384, 65535, 1 << 20, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1)

_TYPES: dict[type, type] = {
    schemas.IntType: int,
    schemas.FloatType: float,
    schemas.BytesType: bytes,
    schemas.BoolType: bool,
    schemas.StrType: str,
}

#: How many elements a sequence has.
_LENGTHS = (0, 1, 1, 2, 5, 40)


def drawn(schema: Any, dice: Random, names: Sequence[str], usual: Mapping[str, Sequence[Any]] | None = None) -> Any:
    """A value of a schema, with strings from `names`; `usual` has values of fields by name, drawn most of the time.

    Elements of a sequence are drawn as the field's name says, too. A field takes values of its own type alone.
    """
    return _Drawing(dice, names, usual or {}).value(schemas.type_info(schema), "")


class _Drawing:
    """What all values of one draw share."""

    def __init__(self, dice: Random, names: Sequence[str], usual: Mapping[str, Sequence[Any]]) -> None:
        self.dice, self.names, self.usual = dice, names, usual

    def value(self, kind: Any, field: str) -> Any:
        dice = self.dice
        match kind:
            case schemas.VarTupleType(item_type=item) | schemas.ListType(item_type=item):
                most = math.inf if kind.max_length is None else kind.max_length
                count = min(max(dice.choice(_LENGTHS), kind.min_length or 0), most)
                values = [self.value(item, field) for _ in range(count)]
                return values if isinstance(kind, schemas.ListType) else tuple(values)
            case schemas.TupleType(item_types=items):
                return tuple(self.value(item, field) for item in items)
            case schemas.StructType(cls=cls, fields=fields):
                return cls(**{each.name: self.value(each.type, each.name) for each in fields})
            case schemas.UnionType(types=types):
                return self.value(dice.choice(types), field)
            case _:
                usual = [each for each in self.usual.get(field, ()) if type(each) is _TYPES.get(type(kind))]
                return dice.choice(usual) if usual and dice.random() < 0.8 else self._plain(kind)

    def _plain(self, kind: Any) -> Any:
        dice = self.dice
        match kind:
            case schemas.IntType(ge=ge, le=le, lt=lt):
                most = le if le is not None else lt - 1 if lt is not None else (1 << 63) - 1
                return max(ge or 0, min(dice.choice([dice.choice(ODD), dice.randrange(8), dice.randrange(4096)]), most))
            case schemas.FloatType():
                return dice.choice([0.0, 0.5, 30.0, 1e300, math.inf, math.nan, -1.0])
            case schemas.StrType():
                return dice.choice(self.names)
            case schemas.BytesType(min_length=least, max_length=most):
                length = max(least or 0, 4 * dice.randrange(40))
                return dice.randbytes(length if most is None else min(length, most))
            case schemas.BoolType():
                return dice.random() < 0.5
            case schemas.EnumType(cls=cls):
                return dice.choice(list(cls))
            case schemas.LiteralType(values=values):
                return dice.choice(values)
            case schemas.NoneType():
                return None
            case _:
                raise AssertionError(f"no value of {kind}")


def damaged(said: bytes, dice: Random) -> bytes:
    """Bytes some of which are changed, cut off, repeated or put somewhere else."""
    body = bytearray(said)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(4):
            case 0:
                body[at : at + 1] = dice.randbytes(1)
            case 1:
                del body[at : at + dice.randrange(12)]
            case 2:
                body[at:at] = body[at : at + dice.randrange(40)]
            case _:
                body[at : at + 2] = dice.choice([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc0"])
    return bytes(body)
