"""What both ends must agree on byte for byte: messages, cards, authentication, and which chunk holds what.

Pure. With docs/protocol.md it is all that another implementation needs.
"""
