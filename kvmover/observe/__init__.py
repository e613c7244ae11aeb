"""People look at kvmover through this: the doctor, tables and pictures of plans, metrics, logs and reports."""
