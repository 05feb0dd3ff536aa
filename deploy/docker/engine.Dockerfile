# Adds rfork to an engine's image. torch, vLLM, SGLang and all other packages stay unchanged.
#
#   docker build -f deploy/docker/engine.Dockerfile --build-arg BASE=vllm/vllm-openai:v0.32.0 \
#       -t vllm-rfork:0.32.0 .
#
# Pods with this image need no injected files: use RFORK_K8S_INJECTION_MODE=none, or the annotation
# rfork.dev/injection-mode: none.

# The image built by Dockerfile, which contains the wheel and its installer.
ARG RFORK_IMAGE=rfork:0.1.0
# The engine's image, with a tag or a digest. Its engine is installed for the `python3` on its PATH, with pip.
ARG BASE

# hadolint ignore=DL3006
FROM ${RFORK_IMAGE} AS rfork

# hadolint ignore=DL3006
FROM ${BASE}
# Extras of rfork to install, comma separated: s3, cloud, mooncake-cuda12, …
ARG EXTRAS=s3
# Packages of the image that may be upgraded if pip reports them as too old (`protobuf grpcio`); never the engine.
ARG MAY_REPLACE=
# Runs as the user of the image: if that cannot write to its Python, pip installs to the home directory.
# pip's settings come from the same optional secrets as in Dockerfile.
RUN --mount=type=bind,from=rfork,source=/opt/rfork/dist,target=/opt/rfork-dist \
    --mount=type=secret,id=pip.conf --mount=type=secret,id=pip-ca \
    PIP_CONFIG_FILE=/run/secrets/pip.conf python3 /opt/rfork-dist/engine.py /opt/rfork-dist/rfork-*.whl \
        --extras "${EXTRAS}" --may-replace "${MAY_REPLACE}"
LABEL dev.rfork.engine.extras="${EXTRAS}"
