# One image for every command: `docker run IMAGE serve`, `worker`, `migrate`, `jobs list` …
# Build it in the root of the repository, with BuildKit: docker build -t longshore .

ARG RUST_VERSION=1.95
ARG DEBIAN=bookworm

FROM rust:${RUST_VERSION}-${DEBIAN} AS build
WORKDIR /src
COPY . .
# The caches keep downloaded and compiled dependencies, so that a change of Longshore's own
# code compiles only that. They are not part of a layer, so the program is copied out.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked --package longshore-cli --bin longshore \
 && cp target/dist/longshore /usr/local/bin/longshore

FROM debian:${DEBIAN}-slim
# Root certificates, for TLS to Postgres, mail servers and webhooks.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/longshore longshore
COPY --from=build /usr/local/bin/longshore /usr/local/bin/longshore

# Numeric, so that Kubernetes can verify that the user is not root (runAsNonRoot).
USER 10001:10001
WORKDIR /var/lib/longshore
# Nothing outside a container can reach its loopback address. So the server listens on
# all addresses, and requires tokens.
ENV API_BIND_ADDR=0.0.0.0:8080 \
    LONGSHORE_AUTH=tokens \
    WORKER_METRICS_BIND_ADDR=0.0.0.0:9091 \
    RUST_LOG_FORMAT=json
EXPOSE 8080 9091
# SIGTERM lets running jobs finish. Set a stop timeout longer than
# LONGSHORE_SHUTDOWN_GRACE (30s).
STOPSIGNAL SIGTERM
# Checks the server. For a worker, check the metrics port instead (see packaging/compose).
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080 && printf 'GET /health HTTP/1.0\\r\\nhost: localhost\\r\\n\\r\\n' >&3 && read -r line <&3 && [[ $line == *' 200 '* ]]"]
ENTRYPOINT ["longshore"]
CMD ["serve"]
