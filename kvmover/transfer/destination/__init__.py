"""The half of a mover that takes requests in: `machine` decides, `driver` carries out, `reads` fetches in a pull."""
