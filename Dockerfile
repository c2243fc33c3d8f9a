# The one recipe of every image. `make image VARIANT=cpu` fills in the arguments; containers/README.md says what they mean.
#
#   system    Debian with Python and what runs beside it         -> the image
#   tools     + compilers
#   packages  + the Python packages of the lock, in a venv
#   compile   + what only compiling needs: wheels of what PyPI has as source alone
#   slim      the venv without what only compiling and testing needs
#   runtime   system + slim + wheels + fmengine                  -> the image
#   sbom      writes what is in it; sbom-file hands that out
#
# Site settings come as secrets and stay in no layer: ca.crt, pip.conf, apt.conf, apt.sources.
ARG VARIANT
ARG BASE

# A folder of wheels that the site's index does not have: `--build-context wheels=FOLDER` takes this stage's place.
FROM scratch AS wheels
# A mount of a context itself would be new to BuildKit each time.
FROM scratch AS site-wheels
COPY --from=wheels . /

FROM ${BASE} AS system-cpu
RUN --mount=type=bind,source=containers/scripts/system.sh,target=/run/build/system.sh \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=apt.conf --mount=type=secret,id=apt.sources \
    /run/build/system.sh python3 tini

# The C compiler and headers are for Triton; the libraries, for NCCL over InfiniBand.
FROM ${BASE} AS system-cuda13
RUN --mount=type=bind,source=containers/scripts/system.sh,target=/run/build/system.sh \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=apt.conf --mount=type=secret,id=apt.sources \
    /run/build/system.sh python3 tini gcc libc6-dev libpython3-dev ibverbs-providers libibverbs1 librdmacm1t64
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM system-cuda13 AS system-cuda12

# hadolint ignore=DL3006
FROM system-${VARIANT} AS system

FROM system AS tools
RUN --mount=type=bind,source=containers/scripts/system.sh,target=/run/build/system.sh \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=apt.conf --mount=type=secret,id=apt.sources \
    /run/build/system.sh python3-venv g++ libpython3-dev

FROM tools AS packages
ARG VARIANT
RUN --mount=type=bind,source=containers/locks,target=/run/build/locks \
    --mount=type=bind,source=containers/scripts/pip.sh,target=/run/build/pip.sh \
    --mount=type=bind,source=containers/scripts/packages.sh,target=/run/build/packages.sh \
    --mount=type=bind,from=site-wheels,target=/run/build/wheels \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=pip.conf \
    --mount=type=cache,id=fmengine-pip,target=/root/.cache/pip \
    /run/build/packages.sh "${VARIANT}"

FROM packages AS compiler
ARG VARIANT
RUN --mount=type=bind,source=containers/locks,target=/run/build/locks \
    --mount=type=bind,source=containers/scripts/pip.sh,target=/run/build/pip.sh \
    --mount=type=bind,source=containers/scripts/compiler.sh,target=/run/build/compiler.sh \
    --mount=type=bind,from=site-wheels,target=/run/build/wheels \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=pip.conf \
    --mount=type=cache,id=fmengine-pip,target=/root/.cache/pip \
    /run/build/compiler.sh "${VARIANT}"

# CUDA_ARCHITECTURES: compute capabilities with commas, none where no CUDA code is compiled. JOBS: compilers at a time.
FROM compiler AS compile-cpu
ARG VARIANT
ARG CUDA_ARCHITECTURES
ARG JOBS=2
RUN --mount=type=bind,source=containers/locks,target=/run/build/locks \
    --mount=type=bind,source=containers/scripts/pip.sh,target=/run/build/pip.sh \
    --mount=type=bind,source=containers/scripts/deepspeed.sh,target=/run/build/deepspeed.sh \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=pip.conf \
    --mount=type=cache,id=fmengine-compiled,target=/var/cache/fmengine \
    /run/build/deepspeed.sh "${VARIANT}"

FROM compile-cpu AS compile-cuda12

FROM compile-cpu AS compile-cuda13
RUN --mount=type=bind,source=containers/locks,target=/run/build/locks \
    --mount=type=bind,source=containers/scripts/pip.sh,target=/run/build/pip.sh \
    --mount=type=bind,source=containers/scripts/flash-attn.sh,target=/run/build/flash-attn.sh \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=pip.conf \
    --mount=type=cache,id=fmengine-compiled,target=/var/cache/fmengine \
    /run/build/flash-attn.sh "${VARIANT}"

# hadolint ignore=DL3006
FROM compile-${VARIANT} AS compile

FROM packages AS slim
RUN --mount=type=bind,source=containers/scripts/slim.sh,target=/run/build/slim.sh \
    /run/build/slim.sh

FROM system AS runtime
ARG VARIANT
COPY --from=slim /opt/fmengine /opt/fmengine
RUN --mount=type=bind,from=compile,source=/opt/wheels,target=/run/build/wheels \
    --mount=type=bind,source=containers/scripts/wheels.sh,target=/run/build/wheels.sh \
    /run/build/wheels.sh
# In PATH, /usr/local/bin/fmengine comes before the one that pip made.
ENV PATH=/usr/local/sbin:/usr/local/bin:/opt/fmengine/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONNOUSERSITE=1 \
    FMENGINE_IMAGE=${VARIANT}
COPY --chmod=755 entrypoints/fmengine.sh /usr/local/bin/fmengine
COPY --chmod=755 entrypoints/entrypoint.sh /usr/local/bin/entrypoint.sh
COPY --chmod=644 LICENSE /usr/share/fmengine/LICENSE
RUN --mount=type=bind,source=src,target=/run/build/source/src \
    --mount=type=bind,source=pyproject.toml,target=/run/build/source/pyproject.toml \
    --mount=type=bind,source=README.md,target=/run/build/source/README.md \
    --mount=type=bind,source=LICENSE,target=/run/build/source/LICENSE \
    --mount=type=bind,source=containers/scripts/project.sh,target=/run/build/project.sh \
    /run/build/project.sh /run/build/source

FROM tools AS sbom-tool
RUN --mount=type=bind,source=containers/locks/sbom.txt,target=/run/build/locks/sbom.txt \
    --mount=type=bind,source=containers/scripts/pip.sh,target=/run/build/pip.sh \
    --mount=type=bind,source=containers/scripts/sbom-tool.sh,target=/run/build/sbom-tool.sh \
    --mount=type=secret,id=ca.crt --mount=type=secret,id=pip.conf \
    --mount=type=cache,id=fmengine-pip,target=/root/.cache/pip \
    /run/build/sbom-tool.sh

FROM runtime AS sbom
RUN --mount=type=bind,from=sbom-tool,source=/opt/sbom,target=/opt/sbom \
    --mount=type=bind,source=containers/scripts/sbom.py,target=/run/build/sbom.py \
    /opt/sbom/bin/python /run/build/sbom.py /opt/fmengine/bin/python /sbom.cdx.json

FROM scratch AS sbom-file
COPY --from=sbom /sbom.cdx.json /

FROM runtime AS image
ARG VARIANT
ARG VERSION
ARG REVISION
ARG CREATED
ARG BASE_NAME
ARG BASE_DIGEST
COPY --from=sbom --chmod=644 /sbom.cdx.json /usr/share/fmengine/sbom.cdx.json
LABEL org.opencontainers.image.title="FMEngine" \
      org.opencontainers.image.description="Train LLaMA and GPT-NeoX models with DeepSpeed: variant ${VARIANT}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      fmengine.variant="${VARIANT}"
WORKDIR /workspace
# Any user id works; none is needed in /etc/passwd.
USER 1000:1000
ENTRYPOINT ["tini", "--", "entrypoint.sh"]
