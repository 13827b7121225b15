# flash_attn on AMD GPUs, for the torch and the ROCm of the base image, with every backend that this source tree holds:
#   docker build -f docker/rocm.Dockerfile -t flash_attn:rocm .
#   docker run --rm --device=/dev/kfd --device=/dev/dri --group-add=video --ipc=host --security-opt=seccomp=unconfined flash_attn:rocm
ARG BASE=rocm/pytorch:rocm7.2.2_ubuntu22.04_py3.10_pytorch_release_2.10.0
FROM ${BASE}

# GPU_ARCHS: targets, separated by `;`; empty: those of the base image's PYTORCH_ROCM_ARCH that there are kernels for.
ARG GPU_ARCHS=""
ARG MAX_JOBS=""
ENV GPU_ARCHS=${GPU_ARCHS} MAX_JOBS=${MAX_JOBS}
WORKDIR /opt/flash_attn
COPY . .

RUN docker/packages.sh
RUN tools/wheel.sh tools
RUN tools/wheel.sh build dist
RUN tools/wheel.sh check dist/*.whl
RUN tools/wheel.sh install dist/*.whl

WORKDIR /workspace
CMD ["python3", "-m", "flash_attn", "verify"]
