"""What the adapters share: nothing in it is an engine's."""
