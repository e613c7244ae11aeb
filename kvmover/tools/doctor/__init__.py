"""The doctor examines a machine: libraries, devices, limits and host."""
