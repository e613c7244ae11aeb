"""The tools plan, watch, replay and show: the mover runs without them, and imports none."""
