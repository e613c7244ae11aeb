"""The cache package manages a rank's KV pages: prefix tree, page tiers, ledger of hit tokens, and trace replay."""
