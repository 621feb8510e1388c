# syntax=docker/dockerfile:1
# An image with tfdist, for CPUs or NVIDIA GPUs:
#   docker build -t tfdist .
#   docker build -t tfdist:gpu --build-arg EXTRAS=gpu .
#   docker build -t tfdist:horovod --build-arg HOROVOD=1 .
#   docker build -t tfdist:ray --build-arg EXTRAS=gpu,ray .
#   docker run --rm tfdist train --epochs 2
#   docker run --rm --gpus all --shm-size 1g tfdist:gpu train --strategy mirrored
# TensorFlow's CUDA libraries come from PyPI with the extra `gpu`; the host needs the NVIDIA driver
# and the NVIDIA Container Toolkit. HOROVOD=1 is for `tfdist launch --print-k8s mpijob`, and the
# extra `ray` for `--print-k8s rayjob`.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS base

# A comma-separated list of the extras in setup.cfg.
ARG EXTRAS=""
# 1 builds Horovod for the TensorFlow of the image.
ARG HOROVOD=""

# A compiler, CMake and MPI for Horovod, in the versions of the base image. The MPI operator starts
# sshd in the workers; KubeRay checks the health of pods with wget.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends openssh-client wget \
        ${HOROVOD:+openssh-server g++ cmake make libopenmpi-dev openmpi-bin} \
    && rm -rf /var/lib/apt/lists/*

# The MPI operator mounts the keys of a job, read-only, and host names are new in each job.
RUN if [ -n "$HOROVOD" ]; then \
        mkdir -p /run/sshd \
        && echo "StrictModes no" > /etc/ssh/sshd_config.d/tfdist.conf \
        && printf "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n" \
            > /etc/ssh/ssh_config.d/tfdist.conf; \
    fi

WORKDIR /opt/tfdist
COPY pyproject.toml setup.cfg README.md LICENSE ./
COPY tfdist tfdist
COPY pipelines pipelines
COPY recipes recipes
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[tensorflow${EXTRAS:+,$EXTRAS}]" \
    && if [ -n "$HOROVOD" ]; then tfdist install_horovod; fi

RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["tfdist"]
CMD ["--help"]
