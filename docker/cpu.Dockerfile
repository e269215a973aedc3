# colocate without a GPU: for small models, for reports and plans, and to try it.
#
#     docker build --file docker/cpu.Dockerfile --tag colocate:cpu .
#     docker run --volume "$PWD:/workspace" colocate:cpu plan run.yaml --gpu H100
#
# --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of builds for CPUs> saves gigabytes of CUDA that is never used;
# PyTorch's installation page names it.

FROM python:3.12-slim

ARG PIP_EXTRA_INDEX_URL

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

ENV HF_HOME=/workspace/.cache/huggingface

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[peft,math,reasoning-gym,tensorboard,trackio,wandb,gguf]"

# Runs, caches and data are on the volume that is mounted here.
WORKDIR /workspace
ENTRYPOINT ["colocate"]
CMD ["--help"]
