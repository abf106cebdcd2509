"""The build that `_C` belongs to; the build writes it beside `_C` (python/binding/CMakeLists.txt)."""

VERSION: str
TORCH: str
CUDA: bool
