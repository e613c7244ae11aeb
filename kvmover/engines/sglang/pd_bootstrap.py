"""KvmoverBootstrapServer is SGLang's own, open to decode ranks of other page sizes and other makes."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmover.engines.common import CARDS_PATH
from kvmover.engines.sglang import engine_pd
from kvmover.engines.sglang.pd_exchange import CardTable
from kvmover.errors import ProtocolError


class KvmoverBootstrapServer(engine_pd.CommonKVBootstrapServer):
    """SGLang's directory of prefill ranks over HTTP, with the ranks' cards, by which engines of another make find them.

    It reports no page size, because SGLang's decode would refuse any but its own. KV that lies token by token moves
    between pages of any size; kvmover's handshake refuses the rest.
    """

    def _setup_routes(self) -> None:
        engine_pd.CommonKVBootstrapServer._setup_routes(self)
        self._table = CardTable()
        self.app.router.add_put(CARDS_PATH, self._put_card)
        self.app.router.add_get(CARDS_PATH, self._get_cards)

    async def _put_card(self, request: Any) -> Any:
        try:
            self._table.put(await request.read())
        except (msgspec.MsgspecError, ProtocolError) as error:
            return engine_pd.web.Response(status=400, text=f"no card: {error}")
        return engine_pd.web.Response(status=200)

    async def _get_cards(self, _: Any) -> Any:
        status, body = self._table.answer()
        return engine_pd.web.Response(status=status, body=body)

    @property
    def page_size(self) -> None:
        """None, regardless of the page size that ranks register."""
        return None

    @page_size.setter
    def page_size(self, registered: Any) -> None:
        """Ignore the page size."""
