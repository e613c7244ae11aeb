"""The kernels move bytes on the device and define each move. They take tensors and integers, no type of kvmover.

`reference.move`, `cpu.move` and `rows.move` take the same Regions and leave the same bytes; `digest`, `convert` and
`bulk` have their definitions beside them (`digest_reference`, `convert_reference`, and `reference` again). Importing
the package loads neither torch nor Triton: each loads with the module that needs it.
"""
