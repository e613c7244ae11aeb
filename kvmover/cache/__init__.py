"""The caches of an engine's rank: prefix tree, tiers, ledger of hit tokens, and the replay of traces through them."""
