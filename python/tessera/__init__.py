"""Tessera: sharded mixed-precision training on libtorch. This package carries the program: `tessera`, or
`python -m tessera`."""
