"""An engine's rank keeps its caches with these: prefix tree, tiers, ledger of hit tokens, and the replay of traces."""
