# One image for both: `stretto join` (a node) and `stretto bootstrap`. Built from the repository's root:
#
#   docker build -f docker/node.Dockerfile -t stretto .                              CPU
#   docker build -f docker/node.Dockerfile -t stretto:cuda --build-arg TORCH=cu126 . NVIDIA GPUs
#
# BASE is what the final image stands on, BUILD_BASE what it is built in; both must have the same Python. Without an
# image registry docker/base.sh makes two stand-ins. Everything that the build machine needs to reach its package
# registries belongs in BUILD_BASE, of which only two folders are copied.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}

# ---------------------------------------------------------------- what Stretto depends on
FROM ${BUILD_BASE} AS dependencies

# Which build of torch: cpu, or a CUDA version as PyTorch names its indexes (cu126, cu128, ...).
ARG TORCH=cpu
# Where it comes from. Empty: from where pip's own settings say.
ARG TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}

# libp2p needs fastecdsa, which is compiled; so are Stretto's codecs.
RUN include="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
 && if ! printf '#include <Python.h>\n#include <gmp.h>\n' | cc -E -I"$include" - >/dev/null 2>&1; then \
      apt-get update -qq \
      && apt-get install -y -qq --no-install-recommends gcc libc6-dev libgmp-dev \
         $(test -e "$include/Python.h" || echo python3-dev); \
    fi
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv /opt/venv \
 && python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    >requirements.txt \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile -c constraints.txt \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile -c constraints.txt -r requirements.txt \
 && /opt/venv/bin/pip check
# Out goes what only compilers of extensions want, and pip itself: nothing is installed into the image later. Byte code
# of what a node imports is written now, since a read-only image cannot keep it; of all that is installed it would be
# 200 MB more.
RUN cd /opt/venv/lib/python3*/site-packages \
 && rm -rf torch/include torch/share \
 && /opt/venv/bin/pip uninstall -q -y pip setuptools \
 && PYTHONDONTWRITEBYTECODE= /opt/venv/bin/python3 -c "import blake3, cryptography, hivemind.dht.node, msgpack, \
    platformdirs, rich.console, safetensors.torch, tokenizers, torch, transformers.models.llama.modeling_llama, \
    typer.main, uvloop" \
 && echo /opt/stretto >stretto.pth

# ---------------------------------------------------------------- Stretto: a layer of its own, small and often new
FROM dependencies AS program
COPY . .
RUN python3 -m venv /tmp/pip \
 && /tmp/pip/bin/pip install --no-cache-dir --no-compile --no-deps --target /opt/stretto . \
 && sed -i '1s|.*|#!/opt/venv/bin/python3|' /opt/stretto/bin/* \
 && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/stretto

# ---------------------------------------------------------------- the image
FROM ${BASE}
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=program /opt/stretto /opt/stretto

# Any uid can write: a fresh named volume takes over owner and mode of these folders. Files in them are private
# (identity.key has mode 0600). /invite is where a bootstrap peer leaves the invite for nodes of the same machine.
RUN mkdir -m 1777 /data /invite
ENV PATH=/opt/stretto/bin:/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    USER=stretto \
    STRETTO_DATA_DIR=/data \
    STRETTO_PORT=4001
VOLUME ["/data"]
EXPOSE 4001
USER 1000:1000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=60s --start-period=10m --retries=3 CMD ["stretto", "status"]
ENTRYPOINT ["stretto"]
CMD ["--help"]
