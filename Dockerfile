# autofit on NVIDIA's CUDA: build with  docker build -t autofit .   and run with
#   docker run --gpus all --shm-size 8g -v "$PWD:/workspace" -v autofit-models:/models autofit sft --model MODEL --dataset DATA
# The image has gcc and Python's headers, since Triton compiles a launcher for each kernel (triton/runtime/build.py).
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A user of its own: what a training writes to a mounted folder is then not root's.
RUN useradd --create-home --uid 10001 autofit && mkdir /models /workspace && chown autofit /models /workspace
ENV PATH=/opt/autofit/bin:$PATH HF_HOME=/models PYTHONUTF8=1
RUN python3 -m venv /opt/autofit

# torch first and alone: it is the largest layer, and changes least.
COPY scripts/constraints.txt /tmp/constraints.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install "$(grep '^torch==' /tmp/constraints.txt)"

COPY pyproject.toml README.md LICENSE /tmp/source/
COPY autotrain_mem /tmp/source/autotrain_mem
COPY recipes /tmp/source/recipes
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c /tmp/constraints.txt /tmp/source && rm -rf /tmp/source

USER 10001
WORKDIR /workspace
ENTRYPOINT ["autofit"]
CMD ["doctor"]
