"""Registered memory of a mover: arenas, copies on the device, descriptors, and operations in flight."""
