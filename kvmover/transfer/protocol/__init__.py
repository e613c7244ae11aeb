"""The protocol on which both ends must agree byte for byte: messages, cards, authentication, and the cut into chunks.

Pure. Together with docs/protocol.md it suffices to write another implementation.
"""
