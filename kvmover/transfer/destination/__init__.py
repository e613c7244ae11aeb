"""The receiving half of a mover: `machine` decides, `driver` carries out and reads in a pull."""
