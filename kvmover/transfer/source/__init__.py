"""The half of a mover that gives requests out: `machine` decides, `driver` carries out, `writes` packs and writes."""
