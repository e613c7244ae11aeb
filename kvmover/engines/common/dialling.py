"""Hosts named by requests are dialled only if `exchange.allow` has them.

A name is looked up once and the address found is dialled, so the answer cannot change between check and connection.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from kvmover.errors import TransportError


class HostNotAllowed(TransportError):
    """A host outside `exchange.allow`, which was not dialled. The message names the host and its addresses."""


def address_of(host: str, port: int, allow: Sequence[str]) -> str:
    """Returns the address to dial for `host`: a name or address in `allow`, or within one of its networks; any if
    `allow` is empty.

    Names are compared ignoring case, before the look-up. Raises HostNotAllowed, and TransportError for an unknown name.

    >>> address_of("10.1.2.3", 80, ["10.0.0.0/8"]), address_of("127.0.0.1", 80, [])
    ('10.1.2.3', '127.0.0.1')
    """
    try:
        told = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"no host {host!r} is known: {error}") from error
    found = [str(each[4][0]) for each in told]
    names = {each.lower() for each in allow}
    if not allow or host.lower() in names:
        return found[0]
    networks = [network for each in allow if (network := _network(each)) is not None]
    for text in found:
        address = ip_address(text.partition("%")[0])
        own = getattr(address, "ipv4_mapped", None) or address
        if any(own in network for network in networks):
            return text
    where = f"{host!r} ({', '.join(dict.fromkeys(found))})"
    raise HostNotAllowed(f"{where} is not dialled: exchange.allow has {', '.join(allow)}")


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None
