# An engine's image with rfork in it: torch, vLLM, SGLang and all else that it holds stay as they are.
#
#   docker build -f deploy/docker/engine.Dockerfile --build-arg ENGINE_IMAGE=vllm/vllm-openai:v0.32.0 \
#       -t vllm-rfork:0.32.0 .
#
# Pods of such an image get no files: leave RFORK_K8S_INJECTION_MODE at `none`, or annotate rfork.dev/files: none.

# The image of Dockerfile beside this one: the wheel, and what installs it, come from there.
ARG RFORK_IMAGE=rfork:0.1.0
# With a tag or a digest.
ARG ENGINE_IMAGE

# hadolint ignore=DL3006
FROM ${RFORK_IMAGE} AS rfork

# hadolint ignore=DL3006
FROM ${ENGINE_IMAGE}
ARG PIP_INDEX_URL=https://pypi.org/simple
# What of rfork's extras the engine is to have, comma separated: s3, cloud, mooncake-cuda12, …
ARG EXTRAS=s3
# Packages of the image that rfork needs newer ones of, if pip says so (`protobuf grpcio`); never the engine.
ARG MAY_REPLACE=
# As the user that the image runs as: where that may not write to its Python, pip installs into his home.
RUN --mount=type=bind,from=rfork,source=/opt/rfork/dist,target=/opt/rfork-dist \
    python3 /opt/rfork-dist/engine.py /opt/rfork-dist/rfork-*.whl \
        --extras "${EXTRAS}" --may-replace "${MAY_REPLACE}"
LABEL dev.rfork.engine.extras="${EXTRAS}"
