# shellcheck shell=bash
# What a working copy needs, by name: the one place where packages and versions are listed; and how
# many jobs build it. Sourced by run and scripts/bootstrap in the root of the working copy; does
# nothing by itself.
# shellcheck disable=SC2034

# To build everything with g++, tests included (their libraries are small). Of libgloo-dev only the
# headers are used: the library itself is inside libtorch.
apt_build=(
  git ca-certificates g++ cmake ninja-build ccache mold python3 python3-venv
  libgloo-dev libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libspdlog-dev libfmt-dev
  libxxhash-dev libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev
)

# To run the tests, the fuzzers and the lint.
apt_tests=(
  clang-19 libclang-rt-19-dev clang-format-19 clang-tidy-19 shellcheck openmpi-bin
)

# To build the API reference (scripts/docs).
apt_docs=(doxygen)

# To build the Python module for Debian's own Python; another one has its headers next to it.
apt_python=(python3-dev)

# TESSERA_TORCH_VERSION chooses another of those that cmake/TesseraTorch.cmake names.
torch_pin=torch==${TESSERA_TORCH_VERSION:-2.13.0}

# Python packages of tools/, the tutorials and the tests; the second list brings pip's torch along,
# or is useful only with it.
pip_tools=(numpy==2.4.6 safetensors==0.8.0 tensorboard==2.21.0 matplotlib==3.11.2)
pip_with_torch=(transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 pyarrow==26.0.1)

# The tests of the Python module; the lint.
pip_tests=(pytest==9.0.3 ruff==0.17.6 mypy==2.4.1)

# scripts/package makes the wheel with it (pyproject.toml names the same).
pip_packaging=(scikit-build-core==1.1.2)

# ccache reuses objects made with the precompiled header, and between working copies, only when told.
export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1

# A translation unit of 16 sources that include torch takes up to 1.5 GB (with the
# rest of the system 2 GB a job): two of them on a 2 GB machine swap.
build_jobs() {
  local cores free_kib by_memory
  cores=$(nproc)
  free_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((free_kib / (2048 * 1024)))
  ((by_memory >= 1)) || by_memory=1
  echo $((cores < by_memory ? cores : by_memory))
}
