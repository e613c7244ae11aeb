"""A mover's observers: metrics, the run log, spans and log lines."""
