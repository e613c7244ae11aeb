"""The demo runs a small exact model on fleets of processes, moves its KV by kvmover, and compares with one process."""
