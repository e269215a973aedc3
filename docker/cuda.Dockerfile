# colocate for NVIDIA GPUs. PyTorch's packages bring CUDA; the host needs a driver for CUDA 13 and NVIDIA's container
# toolkit.
#
#     docker build --file docker/cuda.Dockerfile --tag colocate:cuda .
#     docker run --gpus all --ipc=host --volume "$PWD:/workspace" colocate:cuda train run.yaml

FROM python:3.12-slim

# Triton compiles its launchers with a C compiler when a kernel runs first.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/workspace/.cache/huggingface \
    TRITON_CACHE_DIR=/workspace/.cache/triton

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[cuda,peft,bitsandbytes,math,reasoning-gym,tensorboard,trackio,wandb]"

# Runs, caches and data are on the volume that is mounted here.
WORKDIR /workspace
ENTRYPOINT ["colocate"]
CMD ["--help"]
