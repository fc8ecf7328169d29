# A slow line for the container whose network namespace it shares: see compose.chaos.yaml.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends iproute2 \
 && rm -rf /var/lib/apt/lists/*
COPY line.sh /line.sh
ENTRYPOINT ["/bin/sh", "/line.sh"]
