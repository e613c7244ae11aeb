"""Peers are connected ranks: their identity, their liveness, the redials of lost ranks, and the costs of links."""
