"""The sending half of a mover: `machine` decides, `driver` carries out, `writes` packs and writes."""
