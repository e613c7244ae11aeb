"""A mover's observers for operators: metrics, the run log, spans and log lines."""
