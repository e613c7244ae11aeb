"""Adapters plug kvmover into inference engines. An engine is imported by its own adapter only, when that loads."""
