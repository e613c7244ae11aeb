"""The adapters share these modules; nothing in them is an engine's."""
