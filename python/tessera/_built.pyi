"""The build that `_C.extension` belongs to; the build writes it next to that (python/binding/CMakeLists.txt)."""

VERSION: str
TORCH: str
CUDA: bool
