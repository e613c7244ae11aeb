"""A StoredPlane lets the demo's model read and write numbers where a pool stores them in another form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmover.kernels.convert_reference import decode, encode
from kvmover.layout.codec import Codec

#: Page ids and tokens in those pages, as a tensor is indexed.
Where = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """`rows` [page, token, head, byte] of one plane, whose scales are 1. What is read are numbers in float64."""

    rows: Tensor
    form: Codec

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows.device

    def __getitem__(self, where: Where) -> Tensor:
        return as_numbers(self.rows[where].cpu(), self.form).double()

    def __setitem__(self, where: Where, numbers: Tensor) -> None:
        flat = numbers.float().cpu().flatten(0, -2)
        stored = encode(self.form, flat, [1.0] * self.form.scales)
        self.rows[where] = stored.view(*numbers.shape[:-1], -1).to(self.device)


def as_numbers(rows: Tensor, form: Codec) -> Tensor:
    """Rows [.., byte] as numbers [.., dim] in float32."""
    flat = rows.contiguous().flatten(0, -2)
    return decode(form, flat, [1.0] * form.scales).view(*rows.shape[:-1], -1)


def restored(rows: Tensor, held: Codec, kept: Codec) -> Tensor:
    """Rows [.., byte] of one form in another, by the definition."""
    if held == kept:
        return rows
    numbers = as_numbers(rows, held)
    return encode(kept, numbers.flatten(0, -2), [1.0] * kept.scales).view(*rows.shape[:-1], -1)
