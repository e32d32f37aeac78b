# p2pstate with its operator, PyTorch and the examples, for a user without privileges. Derive your own image from it, or copy these lines.
#
#     docker build -t registry.example.com/p2pstate:0.1.0 .
#     docker build --build-arg TORCH_INDEX=URL -t registry.example.com/p2pstate:0.1.0 .
#
# TORCH_INDEX is the index of wheels for a CUDA version, or for no card at all (about a fifth of the size), which PyTorch's
# installation page names; without it pip takes its default.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY p2pstate p2pstate
COPY rendezvous rendezvous
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH_INDEX=
# tini becomes process 1: it passes signals on to p2prun, and reaps what dead workers leave behind.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /usr/sbin/nologin p2pstate
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} 'torch>=2.10' \
    && pip install --no-cache-dir "$(echo /wheels/*.whl)[operator]"
WORKDIR /workspace
COPY examples examples
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
EXPOSE 7000
ENTRYPOINT ["tini", "--"]
CMD ["p2prun", "--help"]
