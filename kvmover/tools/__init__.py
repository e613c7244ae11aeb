"""The tools plan, watch, replay and show; the mover never imports them."""
