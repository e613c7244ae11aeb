"""An operator sees a mover through this: metrics, the run log, spans and lines of a log."""
