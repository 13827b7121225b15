# flash_attn on the CPU:
#   docker build -f docker/cpu.Dockerfile -t flash_attn:cpu .
#   docker run --rm --shm-size=1g flash_attn:cpu
FROM debian:12

ARG MAX_JOBS=""
ENV MAX_JOBS=${MAX_JOBS} GPU_ARCHS=none
WORKDIR /opt/flash_attn
COPY . .

RUN docker/packages.sh
RUN tools/setup.sh run
ENV PYTHON=/opt/flash_attn/.venv/bin/python
ENV PATH=/opt/flash_attn/.venv/bin:${PATH}
RUN tools/wheel.sh tools
RUN tools/wheel.sh build dist
RUN tools/wheel.sh check dist/*.whl
RUN tools/wheel.sh install dist/*.whl

WORKDIR /workspace
CMD ["python", "-m", "flash_attn", "verify"]
