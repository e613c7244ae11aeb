"""RequestPages grow with their request: ids of pages in order, a list for kvmover and a tensor for the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class RequestPages:
    """The pages of a request, of `page_tokens` tokens each. `take` returns so many free pages, which are its own then.

    Tensors are on `device`.
    """

    def __init__(self, page_tokens: int, device: torch.device, take: Callable[[int], list[int]]) -> None:
        import torch

        self.page_tokens, self._take, self._device = page_tokens, take, device
        self.pages: list[int] = []
        self._ids = torch.empty(0, dtype=torch.long)

    def until(self, tokens: int) -> torch.Tensor:
        """Returns the ids of the pages of the first `tokens` tokens, int64 [page]; missing pages are taken."""
        import torch

        count = -(-tokens // self.page_tokens)
        if count > len(self.pages):
            self.pages += self._take(count - len(self.pages))
        if count > len(self._ids):
            self._ids = torch.tensor(self.pages, dtype=torch.long, device=self._device)
        return self._ids[:count]

    def leave(self) -> list[int]:
        """Returns all pages, which are not this request's any more."""
        left, self.pages, self._ids = self.pages, [], self._ids[:0]
        return left
