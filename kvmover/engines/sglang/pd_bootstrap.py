"""KvmoverBootstrapServer is SGLang's own, for decode ranks of unlike page sizes and of other makes too."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmover.engines.common import CARDS_PATH
from kvmover.engines.sglang import engine_pd
from kvmover.engines.sglang.pd_exchange import CardTable


class KvmoverBootstrapServer(engine_pd.CommonKVBootstrapServer):
    """SGLang's own: who serves what, over HTTP. It says no page size, because SGLang's decode would refuse any but its
    own. What lies token by token moves between pages of any size; for the rest kvmover's handshake refuses.

    Beside SGLang's routes it hands out the ranks' cards, by which engines of another make find them.
    """

    def _setup_routes(self) -> None:
        engine_pd.CommonKVBootstrapServer._setup_routes(self)
        self._table = CardTable()
        self.app.router.add_put(CARDS_PATH, self._put_card)
        self.app.router.add_get(CARDS_PATH, self._get_cards)

    async def _put_card(self, request: Any) -> Any:
        try:
            self._table.put(await request.read())
        except msgspec.MsgspecError as error:
            return engine_pd.web.Response(status=400, text=f"no card: {error}")
        return engine_pd.web.Response(status=200)

    async def _get_cards(self, _: Any) -> Any:
        status, body = self._table.answer()
        return engine_pd.web.Response(status=status, body=body)

    @property
    def page_size(self) -> None:
        """Unknown, whatever the prefill's ranks register."""
        return None

    @page_size.setter
    def page_size(self, registered: Any) -> None:
        """Forget it."""
