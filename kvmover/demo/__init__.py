"""The demo: a small exact model on fleets of processes, moved between by kvmover and compared with one process."""
