# Tessera with the libtorch that it was built with, in an image:
#   docker build -t tessera .                                     torch as pip gives it
#   docker build -t tessera --build-arg TORCH_INDEX=URL .         a pip index with torch's CPU build
#   docker build -t tessera --build-arg TORCH_VERSION=2.15.0 .    another torch (docs/install.md)
#   docker build -t tessera --build-arg BASE=IMAGE .              IMAGE: Debian 12 or Ubuntu 24.04, with CUDA's toolkit for a
#                                                                 program with CUDA
# Not tried: no engine was at hand. The scripts that it runs are (tests/consumer/package_test.py).
ARG BASE=debian:12
FROM ${BASE} AS build
ARG TORCH_INDEX=
ARG TORCH_VERSION=
ENV TESSERA_TORCH_INDEX=${TORCH_INDEX} TESSERA_TORCH_VERSION=${TORCH_VERSION}
WORKDIR /tessera
COPY . .
RUN scripts/bootstrap
RUN scripts/package

FROM ${BASE}
COPY --from=build /tessera/build/packages/unpacked/* /opt/tessera/
COPY --from=build /tessera/.venv /opt/python
ENV VIRTUAL_ENV=/opt/python PATH=/opt/tessera/bin:${PATH}
ENTRYPOINT ["tessera"]
