# tensorstow and torch for CUDA, with the command `tensorstow`:
#
#   docker build --tag tensorstow .
#   docker run --rm --gpus all --ulimit memlock=-1 --volume /nvme:/nvme tensorstow doctor /nvme
#
# --ulimit memlock=-1 lets copies to the GPU start from pinned memory.
#
# Docker's own profile of system calls forbids io_uring. tensorstow then reads and writes by threads, with the same
# results and more CPU time; `doctor` prints which of both it uses. To allow io_uring and nothing else, add its two
# calls to that profile:
#
#   curl -sL https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json | jq '.syscalls +=
#     [{"names": ["io_uring_setup", "io_uring_enter"], "action": "SCMP_ACT_ALLOW"}]' >seccomp.json
#   docker run --security-opt seccomp=seccomp.json ...
#
# Containers have been broken out of through bugs of io_uring in older kernels: allow it where you trust what runs inside.
ARG PYTHON=3.13.5-slim-bookworm

FROM python:${PYTHON} AS build
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}
# For a machine without a GPU: --build-arg TORCH="torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu"
ARG TORCH="torch==2.13.0"
RUN pip install --no-cache-dir ${TORCH}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
RUN useradd --create-home --uid 1000 stow
USER stow
WORKDIR /home/stow
ENTRYPOINT ["tensorstow"]
CMD ["doctor"]
